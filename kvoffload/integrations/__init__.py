"""Adapters to engines."""
