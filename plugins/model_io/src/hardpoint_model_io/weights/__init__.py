"""Weight loaders: what a model is, and its tensors under Hugging Face names."""
