"""DECIDES: which blocks are kept, evicted, pinned. Pure and synchronous: no thread, clock, loop, socket or torch."""
