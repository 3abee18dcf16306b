"""Tiny EAGLE-3 heads in each dialect, and a plain PyTorch implementation: float64, no cache, no batch.

Nothing of Octavo is used here. A head is made for a tiny target (`tests.tiny.models`) with random weights, or
trained on the target's greedy continuations, so that some of its drafts are right.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from tests.tiny.models import greedy, reference, root
from tests.tiny.variants import CONTEXT, PROMPTS, VOCAB_SIZE

Tensors = dict[str, torch.Tensor]
H, HEADS, KV_HEADS, DIM, INNER, EPS = 64, 4, 2, 16, 96, 1e-5
LLAMA: dict[str, Any] = dict(
    model_type="llama", hidden_size=H, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=DIM,
    intermediate_size=INNER, num_hidden_layers=1, rms_norm_eps=EPS, vocab_size=VOCAB_SIZE, hidden_act="silu",
    max_position_embeddings=64, torch_dtype="float32",
)  # fmt: skip


@dataclass
class Dialect:
    """How a head is written, and what that means.

    Attributes:
        config: config.json.
        aux: the target's layers whose inputs it reads.
        layer: prefix of the layer's tensors; prefix: of all.
        suffix: of the file's name: "safetensors" or "bin".
        theta: of its positions.
        norm_before_residual, norm_before_fc, fc_norm, qk_norm, norms_logits, feeds_norm, own_embedding: what
            it computes.
    """

    config: dict[str, Any]
    aux: tuple[int, int, int]
    draft_vocab: int = 300
    layer: str = "midlayer"
    prefix: str = ""
    suffix: str = "safetensors"
    theta: float = 10000.0
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    qk_norm: bool = False
    norms_logits: bool = True
    feeds_norm: bool = False
    own_embedding: bool = False
    seed: int = field(default=0)


_IDS = "eagle_aux_hidden_state_layer_ids"


def _speculators(model_type: str = "llama", theta: float = 500000.0, **flags: Any) -> dict[str, Any]:
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "tiny", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": {**LLAMA, "model_type": model_type, "rope_theta": theta},
        "draft_vocab_size": 300,
        _IDS: [0, 1, 2],
        **flags,
    }


def _specforge(**flags: Any) -> dict[str, Any]:
    head = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 300}
    return {**LLAMA, **head, "eagle_config": {_IDS: [0, 1, 2]}, **flags}


DIALECTS: dict[str, Dialect] = {
    # EAGLE's own states no layers: it is one with the defaults of SpecForge's.
    "eagle": Dialect(
        {**LLAMA, "architectures": ["LlamaForCausalLM"], "draft_vocab_size": VOCAB_SIZE,
         "eagle_config": {_IDS: [0, 1, 2]}},
        (1, 2, 3), draft_vocab=VOCAB_SIZE, suffix="bin", own_embedding=True,
    ),
    "specforge": Dialect(_specforge(), (1, 2, 3)),
    "specforge-3.1": Dialect(
        _specforge(fc_norm=True, norm_output=False), (1, 2, 3), fc_norm=True, norms_logits=False
    ),
    "speculators": Dialect(
        _speculators(norm_before_residual=True), (0, 1, 2), layer="layers.0", theta=500000.0,
        norm_before_residual=True,
    ),
    "speculators-3.1": Dialect(
        _speculators(norm_before_residual=False, norm_before_fc=True, norm_output=True), (0, 1, 2),
        layer="layers.0", theta=500000.0, norm_before_fc=True, feeds_norm=True,
    ),
    "speculators-qwen3": Dialect(
        _speculators("qwen3", norm_before_residual=False), (0, 1, 2), layer="layers.0", prefix="model.",
        theta=500000.0, qk_norm=True,
    ),
}  # fmt: skip


def random_weights(dialect: Dialect) -> Tensors:
    """Weights under EAGLE's names, float64, of which logits of standard deviation 1 and more come."""
    generator = torch.Generator().manual_seed(dialect.seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return noise(rows, columns) * 1.2 / columns**0.5

    attention, mlp = "midlayer.self_attn", "midlayer.mlp"
    out = {
        "fc.weight": matrix(H, 3 * H),
        f"{attention}.q_proj.weight": matrix(HEADS * DIM, 2 * H),
        f"{attention}.k_proj.weight": matrix(KV_HEADS * DIM, 2 * H),
        f"{attention}.v_proj.weight": matrix(KV_HEADS * DIM, 2 * H),
        f"{attention}.o_proj.weight": matrix(H, HEADS * DIM),
        f"{mlp}.gate_proj.weight": matrix(INNER, H),
        f"{mlp}.up_proj.weight": matrix(INNER, H),
        f"{mlp}.down_proj.weight": matrix(H, INNER),
        "lm_head.weight": 0.3 * noise(dialect.draft_vocab, H),
    }
    norms = {"norm": H} | {
        f"midlayer.{name}": H for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    }
    if dialect.norm_before_fc:
        norms["input_norm"] = 3 * H
    if dialect.fc_norm:
        norms |= {f"fc_norm.{i}": H for i in range(3)}
    if dialect.qk_norm:
        norms |= {f"{attention}.q_norm": DIM, f"{attention}.k_norm": DIM}
    out |= {f"{name}.weight": 1 + 0.2 * noise(size) for name, size in norms.items()}
    if dialect.own_embedding:
        out["embed_tokens.weight"] = 0.3 * noise(VOCAB_SIZE, H)
    return out


def draft_ids(dialect: Dialect) -> torch.Tensor:
    """The target's ids of the head's tokens, ascending: those of the continuations, and as many as fit."""
    if dialect.draft_vocab == VOCAB_SIZE:
        return torch.arange(VOCAB_SIZE)
    wanted = dict.fromkeys(t for i in range(len(PROMPTS)) for t in greedy("llama", i))
    wanted |= dict.fromkeys(reversed(range(VOCAB_SIZE)))
    return torch.tensor(sorted(list(wanted)[: dialect.draft_vocab]))


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def _rotate(x: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotary positions 0, 1, … of `[rows, heads, DIM]`, halves paired."""
    frequencies = theta ** (-torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)
    angles = torch.arange(len(x), dtype=torch.float64)[:, None] * frequencies
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def combine(dialect: Dialect, w: Tensors, states: list[torch.Tensor]) -> torch.Tensor:
    """The rows' hidden states of the target's three."""
    if dialect.fc_norm:
        states = [_norm(s, w[f"fc_norm.{i}.weight"]) for i, s in enumerate(states)]
    joined = torch.cat(states, dim=-1)
    if dialect.norm_before_fc:
        joined = _norm(joined, w["input_norm.weight"])
    return joined @ w["fc.weight"].T


def layer(dialect: Dialect, w: Tensors, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """The layer over a whole text's rows, `[rows, H]`."""
    e = _norm(embedded, w["midlayer.input_layernorm.weight"])
    n = _norm(hidden, w["midlayer.hidden_norm.weight"])
    x = torch.cat((e, n), dim=-1)
    at = "midlayer.self_attn"
    q = (x @ w[f"{at}.q_proj.weight"].T).unflatten(-1, (HEADS, DIM))
    k = (x @ w[f"{at}.k_proj.weight"].T).unflatten(-1, (KV_HEADS, DIM))
    v = (x @ w[f"{at}.v_proj.weight"].T).unflatten(-1, (KV_HEADS, DIM))
    if dialect.qk_norm:
        q, k = _norm(q, w[f"{at}.q_norm.weight"]), _norm(k, w[f"{at}.k_norm.weight"])
    q, k = _rotate(q, dialect.theta), _rotate(k, dialect.theta)
    k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) / DIM**0.5
    scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), float("-inf"))
    attended = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).flatten(1)
    u = (n if dialect.norm_before_residual else hidden) + attended @ w[f"{at}.o_proj.weight"].T
    m = _norm(u, w["midlayer.post_attention_layernorm.weight"])
    inner = F.silu(m @ w["midlayer.mlp.gate_proj.weight"].T) * (m @ w["midlayer.mlp.up_proj.weight"].T)
    return u + inner @ w["midlayer.mlp.down_proj.weight"].T


def logits(dialect: Dialect, w: Tensors, made: torch.Tensor) -> torch.Tensor:
    """Logits over the head's own tokens."""
    return (_norm(made, w["norm.weight"]) if dialect.norms_logits else made) @ w["lm_head.weight"].T


@functools.cache
def _wide_target(variant: str) -> Any:
    import copy

    return copy.deepcopy(reference(variant)).double()


@torch.no_grad()
def target_states(variant: str, aux: tuple[int, ...], tokens: list[int]) -> list[torch.Tensor]:
    """What enters some of the target's layers (or, by their number, leaves the last), float64 `[n, H]`."""
    model, seen = _wide_target(variant), []
    hooks = [m.register_forward_pre_hook(lambda _, args: seen.append(args[0][0])) for m in model.model.layers]
    hooks.append(model.model.norm.register_forward_pre_hook(lambda _, args: seen.append(args[0][0])))
    model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return [seen[i].clone() for i in aux]


def embedding(variant: str, w: Tensors) -> torch.Tensor:
    """The head's embedding, or the target's."""
    own = w.get("embed_tokens.weight")
    return _wide_target(variant).model.embed_tokens.weight.detach() if own is None else own


@torch.no_grad()
def drafts(
    dialect: Dialect, w: Tensors, variant: str, tokens: list[int], begin: int, count: int
) -> tuple[list[int], float]:
    """Greedy drafts behind known tokens, and the smallest lead of one over the next best.

    Args:
        begin: the first position that the head saw.
    """
    table, ids = embedding(variant, w), draft_ids(dialect)
    states = [s[begin:-1] for s in target_states(variant, dialect.aux, tokens)]
    hidden = combine(dialect, w, states)
    text, out, lead = list(tokens), [], float("inf")
    for _ in range(count):
        made = layer(dialect, w, table[torch.tensor(text[begin + 1 :])], hidden)
        row = logits(dialect, w, made[-1:])[0]
        first, second = row.topk(2).values.tolist()
        lead = min(lead, first - second)
        out.append(int(ids[int(row.argmax())]))
        text.append(out[-1])
        fed = _norm(made[-1:], w["norm.weight"]) if dialect.feeds_norm else made[-1:]
        hidden = torch.cat((hidden, fed))
    return out, lead


def train(dialect: Dialect, w: Tensors, variant: str, steps: int = 60) -> Tensors:
    """Weights that were taught the target's greedy continuations, each row from true hidden states."""
    w = {name: x.clone().requires_grad_() for name, x in w.items()}
    optimizer = torch.optim.Adam(w.values(), lr=3e-3)
    place = torch.full((VOCAB_SIZE,), -100)
    place[draft_ids(dialect)] = torch.arange(dialect.draft_vocab)
    texts = [prompt + greedy(variant, i) for i, prompt in enumerate(PROMPTS)]
    states = [[s[:-2] for s in target_states(variant, dialect.aux, text)] for text in texts]
    for _ in range(steps):
        for text, seen, prompt in zip(texts, states, PROMPTS, strict=True):
            rows = embedding(variant, w)[torch.tensor(text[1:-1])]
            made = layer(dialect, w, rows, combine(dialect, w, seen))
            answers = place[torch.tensor(text[2:])]
            loss = F.cross_entropy(logits(dialect, w, made)[len(prompt) - 2 :], answers[len(prompt) - 2 :])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return {name: x.detach() for name, x in w.items()}


@functools.cache
def weights(name: str, trained_for: str | None = None) -> Tensors:
    """A dialect's weights, rounded to float32 (as its file has them): random, or trained for a target."""
    w = random_weights(DIALECTS[name])
    if trained_for is not None:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # many small products: threads only wait for each other
        w = train(DIALECTS[name], w, trained_for)
        torch.set_num_threads(threads)
    return {key: x.float().double() for key, x in w.items()}


def head(name: str, trained_for: str | None = None) -> Path:
    """The folder of a head, written once."""
    dialect = DIALECTS[name]
    folder = root() / f"eagle3-{name}-{trained_for}"
    if folder.exists():
        return folder
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(dialect.config))
    tensors = {
        dialect.prefix + key.replace("midlayer", dialect.layer): x.float().contiguous()
        for key, x in weights(name, trained_for).items()
    }
    if dialect.draft_vocab < VOCAB_SIZE:
        ids = draft_ids(dialect)
        tensors[f"{dialect.prefix}d2t"] = ids - torch.arange(len(ids))
        tensors[f"{dialect.prefix}t2d"] = torch.isin(torch.arange(VOCAB_SIZE), ids)
    if dialect.suffix == "bin":
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    assert CONTEXT > LLAMA["max_position_embeddings"]  # so that positions beyond a head's training are seen
    return folder
