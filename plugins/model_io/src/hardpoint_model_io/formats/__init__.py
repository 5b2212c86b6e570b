"""Readers of file formats: bounds checked, nothing allocated on a file's word."""
