"""Engines that `benchmarks/cpu.py` measures, one file each, run in processes and environments of their own."""
