"""Model sources, tokenizers and weight readers for Hardpoint, without torch."""
