"""Kernels for the CPU in C++, built when first used and called through ctypes."""
