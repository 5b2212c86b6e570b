"""Quantization methods: weights in eight or four bits, made while a model loads or kept as a GGUF file has them."""
