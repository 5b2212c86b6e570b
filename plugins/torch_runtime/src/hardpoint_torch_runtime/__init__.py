"""The torch worker and model runner for Hardpoint."""
