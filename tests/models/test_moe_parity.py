"""Mixtures of experts against Transformers in float32: every spelling of their weights, chunks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.errors import ModelError
from octavo.kernels import ops
from octavo.models.interface import CausalLM
from octavo.models.loader import load_model_config
from octavo.models.loading import build_model, load_targets, load_weights
from octavo.models.locate import find_model
from tests import tiny
from tests.models.parity import check, read

FAMILIES = ["mixtral", "qwen3-moe", "qwen3-moe-mixed", "qwen3-moe-sparse", "qwen2-moe", "olmoe"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=tiny.NEW_TOKENS, ignore_eos=True, detokenize=False)


pytestmark = pytest.mark.usefixtures("one_thread")


def build(path: Path) -> CausalLM:
    config = load_model_config(find_model(str(path)))
    return build_model(config, dtype=torch.float32, device="cpu", max_model_len=tiny.CONTEXT, block_size=8)


@pytest.mark.parametrize("variant", FAMILIES)
def test_layers_are_those_of_the_config(variant: str):
    model = read(tiny.checkpoint(variant))
    sparse = [type(layer.mlp).__name__ == "MoE" for layer in model.model.layers]
    want = {"qwen3-moe-mixed": [False, True, True], "qwen3-moe-sparse": [False, True, False]}
    assert sparse == want.get(variant, [True] * 3)
    for chunk in (1000, 7):
        check(model, variant, chunk)


@pytest.mark.parametrize("variant", ["mixtral", "qwen3-moe"])
def test_plain_operations(variant: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ops, "kernels_for", lambda device, dtype: ops.REFERENCE)
    check(read(tiny.checkpoint(variant)), variant)


@pytest.mark.parametrize("variant", ["mixtral", "qwen2-moe"])
def test_joined_spelling(variant: str, tmp_path: Path):
    """As Transformers 5 holds them, and saves them if asked to."""
    tiny.reference(variant).save_pretrained(tmp_path, save_original_format=False)
    check(read(tmp_path), variant)


@pytest.mark.proves("GGUF")
@pytest.mark.parametrize(("variant", "single"), [("mixtral", False), ("mixtral", True), ("qwen3-moe", False)])
def test_gguf(variant: str, single: bool, tmp_path: Path):
    """`single`: Mixtral's first files held experts one by one."""
    check(read(tiny.gguf_file(variant, tmp_path / "m.gguf", single_experts=single)), variant)


def test_quantized_gguf_is_read(tmp_path: Path):
    file = tiny.gguf_file("mixtral", tmp_path / "m.gguf", "Q8_0")
    got, exact = read(file).model.layers[1].mlp.experts, read(tiny.checkpoint("mixtral")).model.layers[1].mlp
    for name in ("w13", "w2"):
        a, b = getattr(got, name), getattr(exact.experts, name)
        assert 0 < (a - b).abs().max() < 0.02


def test_dummy_weights_fill_everything():
    model = read(tiny.checkpoint("qwen3-moe"), "dummy")
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    layer = model.model.layers[0].mlp.experts
    assert len({float(matrix.sum()) for matrix in [*layer.w13, *layer.w2]}) == 16


def test_faults_are_named(tmp_path: Path):
    model = build(tiny.checkpoint("mixtral"))
    state = tiny.reference("mixtral").state_dict()
    name = "model.layers.1.mlp.experts.gate_up_proj"
    targets = load_targets(model)
    with pytest.raises(ModelError, match=r"8 missing \(model\.layers\.1\.block_sparse_moe\.experts\.0\.w1"):
        load_weights(model, ((n, t) for n, t in state.items() if n != name))
    with pytest.raises(ModelError, match=r"gate_up_proj has shape \[4, 192, 32\].*\[4, 192, 64\]"):
        load_weights(build(tiny.checkpoint("mixtral")), (state | {name: state[name][..., :32]}).items())
    assert targets[name].shape == (4, 192, 64)
    path = tiny.gguf_file("mixtral", tmp_path / "m.gguf", llama__expert_used_count=5)
    with pytest.raises(ModelError, match=r"5 experts for each token of 4"):
        load_model_config(find_model(str(path)))


@pytest.mark.parametrize("variant", ["mixtral", "qwen3-moe"])
def test_engine_with_chunks_preemption_and_prefix_hits(variant: str):
    per_token = 3 * 2 * 2 * (32 if variant == "qwen3-moe" else 16) * 4
    settings = dict(
        dtype="float32", device="cpu", num_threads=1, max_model_len=tiny.CONTEXT, skip_tokenizer_init=True,
        check_invariants=True, max_num_seqs=4, max_num_batched_tokens=24, block_size=8,
        kv_cache_memory_bytes=220 * per_token, look_ahead_admission=False,
    )  # fmt: skip
    want = [tiny.greedy(variant, i) for i in range(len(tiny.PROMPTS))]
    with LLM(str(tiny.checkpoint(variant)), **settings) as llm:
        for _ in range(2):
            outputs = llm.generate(tiny.PROMPTS, GREEDY, use_tqdm=False)
            assert [o.outputs[0].token_ids for o in outputs] == want
        assert llm.stats().num_preemptions > 0 and llm.stats().prefix_cache_hits > 0
