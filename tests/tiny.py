"""Tiny random models as folders and GGUF files, made by Transformers and the `gguf` package alone.

Nothing of Octavo is used here, so that what it reads and computes is compared with something else.
`checkpoint("qwen3")` is a folder as `save_pretrained` writes it (float32 safetensors, tokenizer with
a chat template, generation_config.json), made once per process and removed when it ends.

The weights are scaled so that the logits' standard deviation is at least 1, and each variant's seed
is one whose greedy continuation of every prompt of `PROMPTS` has at least 20 distinct tokens of 64 and
leads at every step by more than 1e-3: equality of tokens is then a test of the computation, not of
rounding or of a loop. `python -m tests.tiny VARIANT...` searches for such seeds.
"""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

NEW_TOKENS = 64
MIN_DISTINCT = 20
MIN_GAP = 1e-3
CONTEXT = 256
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>")
VOCAB_SIZE = 384
BOS, EOS = 1, 2

# Longer than longrope's original context (below), where Transformers chooses by each forward's length.
PROMPTS: list[list[int]] = [
    np.random.default_rng(length).integers(len(SPECIAL_TOKENS), VOCAB_SIZE, length).tolist()
    for length in (6, 41, 100)
]

_BASE: dict[str, Any] = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=CONTEXT,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    bos_token_id=BOS,
    eos_token_id=EOS,
)
_FACTORS = {
    "short_factor": [1.0 + 0.05 * i for i in range(8)],
    "long_factor": [1.0 + 0.5 * i for i in range(8)],
    "factor": 4.0,
    "rope_theta": 10000.0,
    "rope_type": "longrope",
}


def _rope(kind: str, **params: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **params}}


# Class prefix in Transformers, changes to the base, seed of the weights.
VARIANTS: dict[str, tuple[str, dict[str, Any], int]] = {
    "llama": ("Llama", {}, 0),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}, 0),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}, 3),
    "linear": ("Llama", _rope("linear", factor=2.0), 0),
    "llama3": (
        "Llama",
        _rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
        1,
    ),
    "yarn": ("Llama", _rope("yarn", factor=4.0, original_max_position_embeddings=64), 2),
    "dynamic": ("Llama", _rope("dynamic", factor=2.0), 0),
    "longrope-short": (
        "Llama",
        {"rope_parameters": {**_FACTORS, "original_max_position_embeddings": CONTEXT}},
        0,
    ),
    "longrope": ("Llama", {"rope_parameters": {**_FACTORS, "original_max_position_embeddings": 4}}, 0),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 32}, 0),
    "qwen2": ("Qwen2", {}, 0),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}, 73),
    "qwen3": ("Qwen3", {"head_dim": 32}, 1),
    "qwen3-tied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}, 151),
}

_SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "A page of a book is a leaf of paper; an octavo has eight of them.",
    "Numbers such as 0, 1, 2, 3, 42 and 1234567890 are tokens too.",
    "def add(a, b):\n    return a + b\n",
    "今天天气很好，我们去公园散步吧。",
    "Zażółć gęślą jaźń — naïve café, Ünïcödé ✓ 🙂👍🏽 👨‍👩‍👧",
    "What is the capital of France? The capital of France is Paris.",
]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '</s>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@functools.cache
def root() -> Path:
    """The folder of this process's tiny models."""
    path = Path(tempfile.mkdtemp(prefix="tiny-models-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


@functools.cache
def tokenizer_json() -> str:
    """A byte-level BPE of `VOCAB_SIZE` entries trained on a few sentences; reversible for any UTF-8."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_SENTENCES, trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    return tokenizer.to_str()


def save_tokenizer(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json (bos, eos, chat template), as Hugging Face does."""
    (folder / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def build(variant: str, seed: int | None = None, **changes: Any) -> Any:
    """The Transformers model of a variant, float32, in eval mode, with weights by `seed`.

    `changes` override the config. Norms and biases are random too, so that leaving one out shows.
    """
    import transformers

    prefix, overrides, own_seed = VARIANTS[variant]
    config_class = getattr(transformers, f"{prefix}Config")
    config = config_class(**{**_BASE, **overrides, **changes})
    config.dtype = torch.float32
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(own_seed if seed is None else seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            noise = torch.randn(weight.shape, generator=generator)
            if "norm" in name:
                weight.copy_(1.0 + 0.2 * noise)
            elif name.endswith(".bias"):
                weight.copy_(0.3 * noise)
            elif name.endswith(("embed_tokens.weight", "lm_head.weight")):
                weight.copy_(0.3 * noise)
            else:
                weight.copy_(noise * 1.2 / weight.shape[1] ** 0.5)
    model.generation_config.bos_token_id = BOS
    model.generation_config.eos_token_id = EOS
    return model


@functools.cache
def reference(variant: str) -> Any:
    """The Transformers model of a variant, built once."""
    return build(variant)


@functools.cache
def checkpoint(variant: str) -> Path:
    """The folder of a variant, written once."""
    folder = root() / variant
    reference(variant).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@torch.no_grad()
def logits(variant: str, ids: list[int]) -> torch.Tensor:
    """Transformers' logits at every position, float32 `[len(ids), VOCAB_SIZE]`."""
    return reference(variant)(torch.tensor([ids])).logits[0]


@functools.cache
def greedy(variant: str, prompt: int, count: int = NEW_TOKENS) -> list[int]:
    """Transformers' greedy continuation of `PROMPTS[prompt]`, EOS not heeded."""
    return _greedy(reference(variant), PROMPTS[prompt], count)[0]


@torch.no_grad()
def _greedy(model: Any, prompt: list[int], count: int) -> tuple[list[int], float, float]:
    """Tokens, the smallest lead of a chosen token, the smallest deviation of a step's logits."""
    out, cache, ids = [], None, torch.tensor([prompt])
    gap = spread = float("inf")
    for _ in range(count):
        result = model(ids, past_key_values=cache, use_cache=True)
        cache, row = result.past_key_values, result.logits[0, -1]
        first, second = row.topk(2).values.tolist()
        gap, spread = min(gap, first - second), min(spread, float(row.std()))
        out.append(int(row.argmax()))
        ids = torch.tensor([[out[-1]]])
    return out, gap, spread


def is_good(model: Any) -> bool:
    """Whether a model meets what the module promises, for every prompt."""
    for prompt in PROMPTS:
        tokens, gap, spread = _greedy(model, prompt, NEW_TOKENS)
        if len(set(tokens)) < MIN_DISTINCT or gap <= 2 * MIN_GAP or spread < 1.0:
            return False
    return True


def gguf_file(variant: str, path: Path, qtype: str = "F32", **metadata: Any) -> Path:
    """Write a variant as llama.cpp's converter would (q and k of Llama with permuted rows).

    Args:
        qtype: GGML's name of the matrices' encoding (what `gguf.quants.quantize` knows); vectors are F32.
        metadata: further string, int or float keys, `.` written as `__`.
    """
    import gguf

    model = reference(variant)
    config = model.config
    arch = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}[config.model_type]
    writer = gguf.GGUFWriter(path, arch)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    _add_rope(writer, config.rope_parameters, head_dim)
    _add_vocabulary(writer)
    for key, value in metadata.items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)]
        add(key.replace("__", "."), value)
    names = gguf.get_tensor_name_map(
        next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == arch), config.num_hidden_layers
    )
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        if config.tie_word_embeddings and name == "lm_head.weight":
            continue
        data = tensor.numpy()
        part = name.split(".")[-2]
        if arch == "llama" and part in heads:
            n = heads[part]
            data = data.reshape(n, 2, data.shape[0] // n // 2, -1).swapaxes(1, 2).reshape(data.shape)
        stem, _, suffix = name.rpartition(".")
        kind = gguf.GGMLQuantizationType[qtype if data.ndim > 1 else "F32"]
        encoded = gguf.quants.quantize(np.ascontiguousarray(data), kind)
        writer.add_tensor(f"{names.get_name(stem)}.{suffix}", encoded, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_rope(writer: Any, rope: dict[str, Any], dim: int) -> None:
    import gguf

    kind = rope["rope_type"]
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if kind == "llama3":
        # As llama.cpp's converter: the divisor of every frequency.
        wavelengths = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, dim, 2) / dim)
        original, low, high = (
            rope["original_max_position_embeddings"],
            rope["low_freq_factor"],
            rope["high_freq_factor"],
        )
        smooth = np.clip((original / wavelengths - low) / (high - low), 0, 1)
        writer.add_tensor(
            "rope_freqs.weight", (1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32)
        )


def _add_vocabulary(writer: Any) -> None:
    model = json.loads(tokenizer_json())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if t in SPECIAL_TOKENS else 1 for t in tokens])
    writer.add_token_merges([" ".join(m) if isinstance(m, list) else m for m in model["merges"]])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for variant in sys.argv[1:] or VARIANTS:
        print(variant, next(seed for seed in range(1000) if is_good(build(variant, seed))), flush=True)
