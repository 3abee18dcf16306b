"""KV caches of 8 bits in whole engines on a CPU."""

from __future__ import annotations

import pytest

from octavo.errors import ConfigError
from tests.engine.quantized_kv import FAMILIES, KINDS, check_quality, check_same_tokens, make


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", FAMILIES)
def test_log_probabilities_stay_close(variant, kind):
    check_quality(variant, "cpu", kind, num_threads=1)


@pytest.mark.parametrize("kind", KINDS)
def test_cached_blocks_and_preemption_change_nothing(kind):
    check_same_tokens("llama", "cpu", kind, num_threads=1)


@pytest.mark.parametrize("kind", KINDS)
def test_plain_attention_agrees(kind):
    check_quality("llama", "cpu", kind, num_threads=1, attention_backend="torch")


def test_latent_attention_is_refused():
    with pytest.raises(ConfigError, match="kv_cache_dtype='fp8' does not serve latent attention"):
        make("deepseek-v2", "cpu", "fp8")
