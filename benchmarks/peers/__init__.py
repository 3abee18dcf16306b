"""Engines that `benchmarks/cpu.py` measures, one file each, run in environments of their own."""
