"""Policies: the order of waiting requests, and who makes room when blocks run out."""
