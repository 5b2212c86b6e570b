"""KV cache managers and schedulers for Hardpoint."""
