"""Schedulers: who computes what in the next step."""
