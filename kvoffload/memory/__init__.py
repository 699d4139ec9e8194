"""WHERE bytes live: the block-wise view of KV caches, shared regions, pinning, checks before anything is mapped."""
