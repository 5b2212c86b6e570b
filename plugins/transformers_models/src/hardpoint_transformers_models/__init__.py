"""Causal models of the ``transformers`` library on the attention and the linear layers of the torch worker."""
