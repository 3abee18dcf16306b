"""Quantized checkpoints by recipe: `octavo quantize` and `oneshot`."""
