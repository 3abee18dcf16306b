"""Triton kernels for NVIDIA GPUs, one file per subject; import them only where CUDA tensors are at hand.

Every wrapper has a plain PyTorch twin of the same meaning (`octavo.kernels.reference`), against
which `tests/kernels` compares it in Triton's interpreter and `tests/gpu` on a device. Wrappers
launch on the current stream, read nothing back from the device, and take their grids from shapes
alone, so each of them can be recorded in a CUDA graph.

Launches of one decoder layer at decode: norm 1, QKV product 1, rotary with KV write (and q/k
norms) 1, attention 1 (the splits are combined by the last program to finish), output product 1,
add and norm 1, gate/up product 1, SiLU 1, down product 1.
"""
