"""DeepSeek-V2 and V3 against Transformers, float32, on tiny random models of every variant."""

from __future__ import annotations

import functools
import math
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from octavo.errors import ModelError
from octavo.kernels import ops
from octavo.models.config import LatentConfig, ModelConfig, MoEConfig
from octavo.models.gguf_config import model_config_from_gguf
from octavo.models.gguf_file import GGUFFile
from octavo.models.gguf_weights import gguf_weights
from octavo.models.hf_config import model_config_from_dict, model_config_from_folder
from octavo.models.interface import CausalLM
from octavo.models.loading import build_model, load_targets, load_weights, targets_of
from octavo.models.weights import folder_weights
from octavo.parallel.state import use_group
from tests import tiny
from tests.engine.test_llm_parity import GREEDY, generate, make
from tests.engine.test_llm_parity import expected as greedy
from tests.models.paged import PagedRun
from tests.models.parity import assert_equal, converted, random_model, random_prompts
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


pytestmark = pytest.mark.usefixtures("one_thread")


@functools.cache
def hf_model(variant: str) -> tuple[transformers.PreTrainedModel, ModelConfig]:
    family, changes = VARIANTS[variant]
    return random_model(family, {**BASE, **changes}, variant)


def prompts() -> list[list[int]]:
    return random_prompts(BASE["vocab_size"], LENGTHS)


@functools.cache
def expected(variant: str) -> list[torch.Tensor]:
    model, _ = hf_model(variant)
    with torch.inference_mode():
        return [model(torch.tensor([p])).logits[0].float() for p in prompts()]


def octavo_model(
    variant: str,
    block_size: int = 16,
    backend: str = "torch",
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> CausalLM:
    return converted(
        *hf_model(variant),
        dtype=dtype,
        device=device,
        attention_backend=backend,
        max_model_len=128,
        block_size=block_size,
    )


def check(actual: list[torch.Tensor], variant: str) -> None:
    assert_equal(actual, expected(variant))


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


@pytest.mark.proves("tensor parallel")
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


@pytest.mark.proves("GGUF")
@pytest.mark.parametrize(
    ("variant", "whole_kv_b"), [("deepseek-v2", False), ("deepseek-v2", True), ("deepseek-v3", False)]
)
def test_gguf_file_equals_its_folder(variant: str, whole_kv_b: bool, tmp_path: Path):
    """Metadata, names and both forms of kv_b, as llama.cpp's converter writes them."""
    file = GGUFFile(tiny.gguf_file(variant, tmp_path / "tiny.gguf", whole_kv_b=whole_kv_b))
    config = model_config_from_gguf(file)
    folder = model_config_from_folder(tiny.checkpoint(variant))
    assert config.latent == folder.latent and config.moe == folder.moe
    assert config.architecture == folder.architecture
    assert config.attention_scale == pytest.approx(folder.attention_scale, rel=1e-6)
    model = build_model(config, dtype=torch.float32, device="cpu", block_size=8)
    weights = gguf_weights(file, config, load_targets(model), torch.float32, torch.device("cpu"))[1]
    load_weights(model, weights)
    logits = PagedRun(model, 1, 48).prompts([tiny.PROMPTS[1]], 20)[0]
    assert (logits - tiny.logits(variant, tiny.PROMPTS[1])).abs().max() < 1e-4


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path):
    """Real checkpoints of V3 hold them after the last layer; no other layers may be there."""
    source = tiny.checkpoint("deepseek-v3")
    config = model_config_from_folder(source)
    targets = targets_of(config)
    stored = load_file(source / "model.safetensors")
    extra = {f"model.layers.3.{name}": torch.zeros(2) for name in ("eh_proj.weight", "mlp.experts.0.up_proj")}
    save_file({**stored, **extra}, tmp_path / "model.safetensors")
    device = torch.device("cpu")
    _, weights = folder_weights(tmp_path, targets, config.architecture, "auto", device)
    assert {name for name, _ in weights} == set(stored)
    model = build_model(config, dtype=torch.float32, device="cpu")
    load_weights(model, {**stored, **extra}.items())
    save_file({**stored, "model.layers.4.eh_proj.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="model.layers.4.eh_proj.weight"):
        folder_weights(tmp_path, targets, config.architecture, "auto", device)


RAW = {**BASE, "architectures": ["DeepseekV3ForCausalLM"], "n_group": 4, "topk_group": 2}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_config": {"quant_method": "mxfp4"}}, "'mxfp4'"),
        ({"scoring_func": "softmax"}, "scoring_func='softmax'"),
        ({"n_group": 3}, "2 groups for each token, of 3 of 8 experts"),
        ({"qk_rope_head_dim": 7}, "rope turns 7 dimensions"),
        ({"kv_lora_rank": 0}, "kv_rank 0"),
        ({"num_nextn_predict_layers": 1 << 40}, "num_nextn_predict_layers"),
        ({"architectures": ["DeepseekV2ForCausalLM"], "topk_method": "noaux_tc"}, "topk_method='noaux_tc'"),
        ({"architectures": ["DeepseekV2ForCausalLM"], "norm_topk_prob": True}, "norm_topk_prob=true"),
    ],
)
def test_configs_that_cannot_be_run_are_refused(changes: dict[str, object], message: str):
    with pytest.raises(ModelError, match=message) as caught:
        model_config_from_dict({**RAW, **changes})
    assert "\n" not in str(caught.value)
    unsupported = {"scoring_func", "topk_method", "norm_topk_prob", "quantization_config"} & set(changes)
    assert ("malformed" in str(caught.value)) != bool(unsupported)


def test_original_configs_are_read():
    """config.json as DeepSeek published it: V2-Lite's and V3's keys, without those of Transformers 5."""
    shared = dict(hidden_act="silu", kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64)
    rope = dict(type="yarn", factor=40, original_max_position_embeddings=4096, beta_fast=32, beta_slow=1)
    lite = model_config_from_dict(
        dict(
            shared, architectures=["DeepseekV2ForCausalLM"], vocab_size=102400, hidden_size=2048,
            intermediate_size=10944, moe_intermediate_size=1408, num_hidden_layers=27, num_attention_heads=16,
            num_key_value_heads=16, q_lora_rank=None, v_head_dim=128, n_routed_experts=64,
            n_shared_experts=2, num_experts_per_tok=6, first_k_dense_replace=1, moe_layer_freq=1,
            topk_method="greedy", n_group=1, topk_group=1, norm_topk_prob=False, scoring_func="softmax",
            routed_scaling_factor=1.0, max_position_embeddings=163840, rope_theta=10000,
            rope_scaling=dict(rope, mscale=0.707, mscale_all_dim=0.707), torch_dtype="bfloat16",
        )
    )  # fmt: skip
    assert lite.latent == LatentConfig(None, 512, 128, 64, 128)
    assert lite.moe == MoEConfig(64, 6, 1408, tuple(range(1, 27)), 2816, renormalize=False)
    assert lite.rope.dim == 64 and lite.context_length == 163840
    mscale = 0.1 * 0.707 * math.log(40) + 1
    assert lite.attention_scale == pytest.approx(192**-0.5 * mscale**2)
    v3 = model_config_from_dict(
        dict(
            shared, architectures=["DeepseekV3ForCausalLM"], vocab_size=129280, hidden_size=7168,
            intermediate_size=18432, moe_intermediate_size=2048, num_hidden_layers=61,
            num_attention_heads=128, num_key_value_heads=128, q_lora_rank=1536, v_head_dim=128,
            n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8, first_k_dense_replace=3,
            moe_layer_freq=1,
            topk_method="noaux_tc", n_group=8, topk_group=4, norm_topk_prob=True, scoring_func="sigmoid",
            routed_scaling_factor=2.5, max_position_embeddings=163840, rope_theta=10000,
            rope_scaling=dict(rope, mscale=1.0, mscale_all_dim=1.0), num_nextn_predict_layers=1,
            torch_dtype="bfloat16",
        )
    )  # fmt: skip
    assert v3.latent == LatentConfig(1536, 512, 128, 64, 128)
    assert v3.moe == MoEConfig(
        256, 8, 2048, tuple(range(3, 61)), 2048, "sigmoid", True, 2.5, True, 8, 4, "top2"
    )


@pytest.mark.parametrize(("chunk", "block_size"), [(1, 16), (7, 8), (64, 16)])
def test_engine_with_chunks_block_sizes_and_prefix_hits(chunk: int, block_size: int):
    prompts = tiny.PROMPTS[:2] if chunk == 1 else tiny.PROMPTS  # a token a step takes its time
    want = greedy("deepseek-v3")[: len(prompts)]
    with make("deepseek-v3", max_num_batched_tokens=chunk, block_size=block_size) as llm:
        assert generate(llm, prompts) == want
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)  # the prompts' blocks are cached now
        assert [o.outputs[0].token_ids for o in outputs] == want
        cached = [(len(p) - 1) // block_size * block_size for p in prompts]
        assert [o.num_cached_tokens for o in outputs] == cached


def test_random_weights():
    """As in `--load-format dummy`: what is stored by halves in some files is made once."""
    tokens = []
    for backend in ("torch", "cpu"):
        with make("deepseek-v3", load_format="dummy", attention_backend=backend) as llm:
            params = GREEDY.clone(max_tokens=4)
            tokens.append(
                [o.outputs[0].token_ids for o in llm.generate(tiny.PROMPTS, params, use_tqdm=False)]
            )
    assert tokens[0] == tokens[1]


def test_engine_preempts():
    per_token = 3 * (32 + 8) * 4  # layers, elements of a vector, bytes of one: a single vector is cached
    settings = dict(kv_cache_memory_bytes=200 * per_token, block_size=8, look_ahead_admission=False)
    with make("deepseek-v2-lite", **settings) as llm:
        assert llm.facts.num_blocks == 25
        assert generate(llm, tiny.PROMPTS[::-1]) == greedy("deepseek-v2-lite")[::-1]
        assert llm.stats().num_preemptions > 0
        assert llm.stats().kv_blocks_used == 0
