"""TELLS other processes what the cache holds, over ZeroMQ."""
