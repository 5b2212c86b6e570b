"""From a model name to files."""
