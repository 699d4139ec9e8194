"""COUNTS: the metric catalog, its collector and its exposition."""
