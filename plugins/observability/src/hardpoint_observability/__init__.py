"""Metrics and log lines for Hardpoint."""
