"""Search seeds: `python -m tests.tiny VARIANT...`."""

import sys

import torch

from tests.tiny import VARIANTS, build, is_good

torch.set_num_threads(1)
for variant in sys.argv[1:] or VARIANTS:
    print(variant, next(seed for seed in range(1000) if is_good(build(variant, seed))), flush=True)
