"""Eviction policies and their registry."""
