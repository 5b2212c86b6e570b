"""Tokenizer providers over the ``tokenizers`` library."""
