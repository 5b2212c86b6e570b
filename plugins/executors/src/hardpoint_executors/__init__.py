"""Worker executors for Hardpoint: one process or many."""
