"""JOINS AND WAITS: the synchronous engine and the asyncio service on top of it."""
