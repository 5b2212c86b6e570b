"""KV blocks: pool, prefix index, managers per spec kind, hashing and memory layouts."""
