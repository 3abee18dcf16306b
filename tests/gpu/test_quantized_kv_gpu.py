"""KV caches of 8 bits on a GPU: kernels against float64 and the plain twins, engines against Transformers."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from octavo.errors import ConfigError  # noqa: E402
from octavo.kernels.triton.kv_codes import PACKED  # noqa: E402 (defines kernels)
from tests.engine.quantized_kv import FAMILIES, KINDS, check_quality, check_same_tokens, make  # noqa: E402
from tests.kernels.attention_cases import (  # noqa: E402
    ALL_CODES,
    CASES,
    Case,
    Codes,
    check_decode,
    check_prefill,
)
from tests.kernels.kv_write_cases import WRITE_CASES, WriteCase, check_gather, check_write  # noqa: E402

# The device's own way, and that of devices without FP8.
EVERY = [*ALL_CODES, *(Codes(c.kind, c.offset, PACKED.value) for c in ALL_CODES if c.kind == "fp8")]


@pytest.mark.parametrize("codes", EVERY, ids=str)
@pytest.mark.parametrize(("number", "case"), enumerate(CASES), ids=str)
def test_attention(number: int, case: Case, codes: Codes) -> None:
    dtype = ("bfloat16", "float16", "bfloat16", "float32")[number % 4]
    check_decode(case, dtype, [(1, 1500), (0, 0), (1, 1), (1, 700)], 3, "cuda", codes=codes)
    check_prefill(case, dtype, [(150, 150), (0, 12), (33, 500), (2, 260)], "cuda", codes=codes)
    if case.window is None:
        shapes = [(1, 1025), (1, 2600), *[(1, 1030 + i) for i in range(40)]]
        check_decode(case, dtype, shapes, 2, "cuda", 1024 // case.block, codes=codes)


@pytest.mark.parametrize("codes", EVERY, ids=str)
@pytest.mark.parametrize("case", WRITE_CASES, ids=str)
def test_writes_are_the_twins(case: WriteCase, codes: Codes) -> None:
    check_write(case, codes, "cuda")
    if codes.kind != "int8":
        check_write(case, codes, "cuda", centred=True)


@pytest.mark.parametrize("codes", ALL_CODES, ids=str)
def test_values_of_a_block_table(codes: Codes) -> None:
    check_gather(codes, "cuda")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", FAMILIES)
def test_log_probabilities_stay_close(variant: str, kind: str) -> None:
    check_quality(variant, "cuda", kind)


@pytest.mark.parametrize("kind", KINDS)
def test_cached_blocks_and_preemption_change_nothing(kind: str) -> None:
    check_same_tokens("llama", "cuda", kind)


def test_batch_invariance_is_refused() -> None:
    with pytest.raises(ConfigError, match="batch_invariant has no kernel for kv_cache_dtype='int8'"):
        make("llama", "cuda", "int8", batch_invariant=True)
