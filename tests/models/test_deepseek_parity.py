"""DeepSeek-V2 and V3 against Transformers, float32, on tiny random models of every variant."""

from __future__ import annotations

import functools

import pytest
import torch
import transformers

from octavo.errors import ModelError
from octavo.kernels import ops
from octavo.models.config import ModelConfig
from octavo.models.hf_config import model_config_from_dict
from octavo.models.interface import CausalLM
from octavo.models.loading import build_model, load_weights
from octavo.parallel.state import use_group
from tests.models.paged import PagedRun
from tests.parallel.threads import on_ranks

BASE = dict(
    vocab_size=199,
    hidden_size=64,
    intermediate_size=96,
    moe_intermediate_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=4,
    q_lora_rank=24,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=12,
    n_routed_experts=8,
    n_shared_experts=1,
    num_experts_per_tok=3,
    first_k_dense_replace=1,
    routed_scaling_factor=1.5,
    max_position_embeddings=128,
    tie_word_embeddings=False,
    initializer_range=0.25,
    # Not the 1e-6 that the norms of compressed queries and KV have.
    rms_norm_eps=1e-4,
)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}


def yarn(mscale: float, mscale_all_dim: float) -> dict[str, object]:
    return {"rope_parameters": {**YARN, "mscale": mscale, "mscale_all_dim": mscale_all_dim}}


GROUPS = {"n_group": 4, "topk_group": 2}
VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    "v2": ("DeepseekV2", {**GROUPS, "topk_method": "group_limited_greedy", "n_shared_experts": 2}),
    "v2-lite": ("DeepseekV2", {"q_lora_rank": None, **yarn(0.707, 0.707)}),
    "v2-bias": ("DeepseekV2", {"attention_bias": True}),
    "v2-linear": (
        "DeepseekV2",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "mscale_all_dim": 1.0, "rope_theta": 1e4}},
    ),
    "v3": ("DeepseekV3", {**GROUPS, **yarn(1.0, 1.0)}),
    "v3-mscales-differ": ("DeepseekV3", {**GROUPS, **yarn(1.0, 0.7), "norm_topk_prob": False}),
    "v3-no-q-rank": ("DeepseekV3", {"q_lora_rank": None, "n_group": 1, "topk_group": 1}),
    "v3-halves": ("DeepseekV3", {**GROUPS, "rope_interleave": False, "attention_bias": True}),
    "v3-tied-dense": ("DeepseekV3", {**GROUPS, "first_k_dense_replace": 3, "tie_word_embeddings": True}),
}
LENGTHS = (41, 7, 23)


@pytest.fixture(autouse=True)
def one_thread():
    """Models this small only lose by threads, all the more on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.cache
def hf_model(variant: str) -> tuple[transformers.PreTrainedModel, ModelConfig]:
    family, changes = VARIANTS[variant]
    config = getattr(transformers, f"{family}Config")(**{**BASE, **changes})
    config.architectures = [f"{family}ForCausalLM"]
    torch.manual_seed(sum(variant.encode()))
    model = getattr(transformers, f"{family}ForCausalLM")._from_config(config, attn_implementation="eager")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith("e_score_correction_bias"):
            tensor.data.uniform_(-0.3, 0.3)
        elif name.endswith("bias"):
            tensor.data.normal_(std=0.3)
        elif "norm" in name:
            tensor.data.uniform_(0.5, 1.5)
    return model.eval(), model_config_from_dict(config.to_dict())


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(BASE["vocab_size"], (n,), generator=generator).tolist() for n in LENGTHS]


@functools.cache
def expected(variant: str) -> list[torch.Tensor]:
    model, _ = hf_model(variant)
    with torch.inference_mode():
        return [model(torch.tensor([p])).logits[0].float() for p in prompts()]


def octavo_model(
    variant: str, block_size: int = 16, backend: str = "torch", dtype: torch.dtype = torch.float32
) -> CausalLM:
    hf, config = hf_model(variant)
    model = build_model(
        config, dtype=dtype, device="cpu", attention_backend=backend, max_model_len=128, block_size=block_size
    )
    state = hf.state_dict()
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    load_weights(model, state.items())
    return model


def check(actual: list[torch.Tensor], variant: str) -> None:
    for ours, theirs in zip(actual, expected(variant), strict=True):
        assert (ours - theirs).abs().max() < 1e-4
        assert theirs.std() > 1  # else closeness would mean little
        assert len(set(theirs.argmax(-1).tolist())) > 3


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(variant: str):
    for backend, chunk in (("torch", 1000), ("cpu", 7)):
        model = octavo_model(variant, block_size=8, backend=backend)
        check(PagedRun(model, 3, 48).prompts(prompts(), chunk), variant)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("block_size", [8, 16])
@pytest.mark.parametrize("variant", ["v2", "v3"])
def test_chunks_and_block_sizes(variant: str, block_size: int, backend: str):
    model = octavo_model(variant, block_size, backend)
    for chunk in (1, 7, 64):
        check(PagedRun(model, 3, 48, seed=chunk).prompts(prompts(), chunk), variant)


def test_plain_operations(monkeypatch: pytest.MonkeyPatch):
    """Without kernels of the device, as where no compiler is found."""
    monkeypatch.setattr(ops, "kernels_for", lambda device, dtype: ops.REFERENCE)
    check(PagedRun(octavo_model("v3"), 3, 48).prompts(prompts(), 9), "v3")


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_mixed_batch_of_prefill_and_decode_with_padding(backend: str):
    model = octavo_model("v3", block_size=8, backend=backend)
    texts = prompts()
    run = PagedRun(model, 3, 64)
    parts = [[run.step({0: texts[0][:40]}, padding=2)[0]], [], []]
    mixed = run.step({2: texts[2][:9], 0: texts[0][40:], 1: texts[1]}, padding=3)
    last = run.step({2: texts[2][9:]})
    for i in range(3):
        parts[i].append(mixed[i])
    parts[2].append(last[2])
    check([torch.cat(x) for x in parts], "v3")


@pytest.mark.parametrize("variant", ["v2-lite", "v3"])
def test_ranks_together_equal_one(variant: str):
    def rank(group):
        with use_group(group):
            model = octavo_model(variant, block_size=8, backend="cpu")
        fmt = model.kv_groups()[0].format
        assert fmt.latent and (fmt.num_kv_heads, fmt.head_dim) == (1, 40)
        return PagedRun(model, 3, 48).prompts(prompts(), 9)

    hf_model(variant), expected(variant)
    for result in on_ranks(2, rank):
        check(result, variant)


def test_bfloat16_stays_near_float32():
    model = octavo_model("v2-lite", 16, "cpu", torch.bfloat16)
    for ours, theirs in zip(PagedRun(model, 3, 64).prompts(prompts(), 8), expected("v2-lite"), strict=True):
        difference = ours.log_softmax(-1) - theirs.log_softmax(-1)
        assert difference.abs().mean() < 0.15
