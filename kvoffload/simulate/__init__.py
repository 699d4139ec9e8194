"""Traces in, hit ratios out: the same manager code as in production."""
