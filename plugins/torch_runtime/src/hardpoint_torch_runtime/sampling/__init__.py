"""From logits to tokens: a stateless sampler over metadata gathered from per-slot state."""
