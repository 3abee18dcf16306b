"""Random models, settings and requests on random layouts of ranks, against one rank and Transformers.

Ranks are threads. Each seed draws a tiny model with sizes of its own (heads, KV heads, layers, tokens,
biases, ties, experts), a layout of ranks and stages, settings, and eight requests. What the ranks say must be
what one rank says, log-probabilities included; greedy tokens must be the likeliest by Transformers' logits.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams, StructuredOutputsParams
from octavo.kv.capacity import request_blocks
from octavo.worker import worker as worker_module
from tests import tiny
from tests.engine.test_llm_parity import make
from tests.parallel.thread_executor import ThreadRanksExecutor, thread_ranks  # noqa: F401 (a fixture)

pytestmark = pytest.mark.usefixtures("thread_ranks", "one_thread")

TIE = 2e-3  # logits that are as near may fall either way
CLOSE = 2e-3  # of log-probabilities
LAYOUTS = [(2, 1), (1, 2), (3, 1), (2, 2), (1, 3), (4, 1), (3, 2), (1, 4), (2, 3)]  # ranks of a stage, stages
TIED = ("Llama", "Qwen2", "Qwen3", "Mistral", "Granite", "Phi3", "Olmo2", "StableLm")
HEAD = 16


@dataclass
class Model:
    """A checkpoint, and Transformers' model of it."""

    variant: str
    changes: dict[str, Any]
    reference: Any
    folder: Path
    vocab: int


def draw_model(draw: random.Random, tensor: int, stages: int, folder: Path) -> Model:
    variant = draw.choice(sorted(tiny.VARIANTS))
    family, own, _ = tiny.VARIANTS[variant]
    heads = draw.choice([3, 6] if tensor == 3 else [4, 8])
    kv_heads = [n for n in (1, 2, 3, 4, 6, 8) if heads % n == 0 and (n % tensor == 0 or tensor % n == 0)]
    layers = draw.randint(max(2, stages), 5)
    changes: dict[str, Any] = dict(
        num_attention_heads=heads,
        num_key_value_heads=heads if family.startswith("Deepseek") else draw.choice(kv_heads),
        hidden_size=HEAD * heads,
        intermediate_size=tensor * draw.choice([16, 28, 48]),
        vocab_size=draw.choice([384, 385, 391, 400, 517]),
        num_hidden_layers=layers,
    )
    if "moe_intermediate_size" in own:
        changes["moe_intermediate_size"] = tensor * draw.choice([8, 12])
    if "shared_expert_intermediate_size" in own:
        changes["shared_expert_intermediate_size"] = tensor * 20
    if "layer_types" in own:
        changes["layer_types"] = [draw.choice(["sliding_attention", "full_attention"]) for _ in range(layers)]
    if "max_window_layers" in own:
        changes["max_window_layers"] = draw.randint(0, layers)
    if family == "Llama":
        changes |= dict(attention_bias=draw.random() < 0.3, mlp_bias=draw.random() < 0.3)
    if family in TIED and draw.random() < 0.3:
        changes["tie_word_embeddings"] = True
    reference = tiny.build(variant, seed=draw.randrange(1000), **changes)
    reference.save_pretrained(folder)
    tiny.save_tokenizer(folder)
    return Model(variant, changes, reference, folder, changes["vocab_size"])


def draw_settings(draw: random.Random, model: Model, tensor: int, stages: int) -> dict[str, Any]:
    """What does not change the tokens: those of the engine, and those of several ranks."""
    settings: dict[str, Any] = dict(
        block_size=draw.choice([8, 16]),
        max_num_batched_tokens=draw.choice([5, 16, 48, 256]),
        max_num_seqs=draw.choice([2, 4, 16]),
        async_scheduling=draw.choice([None, True, False]),
        enforce_eager=draw.random() < 0.3,
        enable_prefix_caching=draw.random() < 0.8,
        look_ahead_admission=draw.random() < 0.5,
        long_prefill_token_threshold=draw.choice([0, 0, 7]),
        attention_backend=draw.choice(["auto", "auto", "torch"]),
        enable_expert_parallel=draw.random() < 0.5,
        skip_tokenizer_init=False,
        tensor_parallel_size=tensor,
        pipeline_parallel_size=stages,
    )
    if stages > 1 and draw.random() < 0.5:
        layers = model.changes["num_hidden_layers"]
        cuts = sorted(draw.sample(range(1, layers), stages - 1))
        parts = [stop - first for first, stop in zip([0, *cuts], [*cuts, layers], strict=True)]
        settings["pp_layer_partition"] = ",".join(map(str, parts))
    chance = draw.random()
    if chance < 0.4:
        drafts = dict(method=draw.choice(["ngram", "suffix"]), adaptive=draw.random() < 0.3)
        if chance < 0.15 and stages == 1:
            drafts |= dict(method="draft_model", model=str(model.folder))
        settings["speculative_config"] = drafts | dict(num_speculative_tokens=draw.randint(1, 5))
    return settings


def draw_request(draw: random.Random, stems: list[list[int]]) -> tuple[list[int], SamplingParams]:
    prompt = draw.choice(stems)[: draw.randint(6, 60)]
    if draw.random() < 0.3:
        prompt = prompt[:6] * 4  # something to draft by
    fields: dict[str, Any] = dict(temperature=0.0, max_tokens=draw.randint(1, 30), ignore_eos=True)
    if draw.random() < 0.5:
        fields["logprobs"] = draw.randint(0, 4)
    if draw.random() < 0.3:
        fields["prompt_logprobs"] = draw.randint(0, 3)
    kind = draw.random()
    if kind < 0.2:
        fields |= dict(temperature=draw.choice([0.6, 1.0]), seed=draw.randrange(99), n=draw.choice([1, 2]))
        fields |= dict(
            top_p=draw.choice([1.0, 0.8]), top_k=draw.choice([-1, 20]), min_p=draw.choice([0, 0.05])
        )
    elif kind < 0.35:
        fields |= dict(repetition_penalty=1.3, presence_penalty=0.4, logit_bias={draw.randrange(380): 2.0})
    elif kind < 0.45:
        fields |= dict(stop_token_ids=draw.sample(range(380), 60), min_tokens=draw.randint(0, 1))
    elif kind < 0.6:
        form = StructuredOutputsParams(
            regex=draw.choice(["[a-f]{3,9}-[0-9]{4}", "(yes|no), [A-Z][a-z]{1,6}"])
        )
        fields |= dict(structured_outputs=form, ignore_eos=False)
    return prompt, SamplingParams(**fields)


def is_plain(params: SamplingParams) -> bool:
    """Whether the tokens are the likeliest by the model alone."""
    plain = params.temperature == 0 and params.structured_outputs is None
    return plain and not (params.logit_bias or params.min_tokens) and params.repetition_penalty == 1.0


@torch.no_grad()
def leads(model: Model, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """By how much Transformers' likeliest token leads each one that was chosen."""
    scores = model.reference(torch.tensor([[*prompt, *tokens[:-1]]])).logits[0, len(prompt) - 1 :]
    return scores.amax(1) - scores.gather(1, torch.tensor(tokens)[:, None])[:, 0]


def check_places(found: Any, want: Any, most: int) -> None:
    """Log-probabilities of the first `most` places."""
    assert (found is None) == (want is None)
    for ours, theirs in zip((found or [])[:most], (want or [])[:most], strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:  # of near ones either may be among those that are told
            common = ours.keys() & theirs.keys()
            assert len(common) >= min(len(ours), len(theirs)) - 1 and common
            assert all(abs(ours[token].logprob - theirs[token].logprob) < CLOSE for token in common)


def check(model: Model, prompt: list[int], params: SamplingParams, found: Any, want: Any) -> None:
    check_places(found.prompt_logprobs, want.prompt_logprobs, len(prompt))
    for ours, theirs in zip(found.outputs, want.outputs, strict=True):
        tokens, expected = list(ours.token_ids), list(theirs.token_ids)
        pairs = enumerate(zip(tokens, expected, strict=False))
        same = next((i for i, (one, other) in pairs if one != other), len(expected))
        if is_plain(params):
            assert float(leads(model, prompt, tokens).max()) < TIE, (tokens, expected)
        if same == len(expected):
            assert tokens == expected and ours.finish_reason == theirs.finish_reason
        else:
            assert is_plain(params), (tokens, expected)  # a tie, as has just been seen
            assert float(leads(model, prompt, expected[: same + 1])[-1]) < TIE
        check_places(ours.logprobs, theirs.logprobs, same)


def tight(draw: random.Random, model: Model, settings: dict[str, Any], longest: int) -> dict[str, Any]:
    """A cache in which few of the requests have room, perhaps with a host tier."""
    with make("llama", model=str(model.folder), **settings) as llm:
        groups, page = llm.facts.groups, ThreadRanksExecutor.newest.page_bytes
    blocks = request_blocks(groups, longest, rows=settings["max_num_batched_tokens"])
    blocks = blocks + len(groups) * draw.randint(1, 4)
    few: dict[str, Any] = dict(kv_cache_memory_bytes=blocks * page)
    if draw.random() < 0.5:
        few["swap_space"] = draw.choice([1, 4]) * blocks * page / 2**30
    return few


def check_layout(seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run one seed; what it was, in words."""
    draw = random.Random(seed)
    tensor, stages = LAYOUTS[seed % len(LAYOUTS)]
    model = draw_model(draw, tensor, stages, folder)
    settings = draw_settings(draw, model, tensor, stages)
    stems = [[draw.randrange(5, 384) for _ in range(60)] for _ in range(3)]
    requests = [draw_request(draw, stems) for _ in range(8)]
    monkeypatch.setattr(worker_module, "prefill_rate", lambda *_: 1e-3)  # copying always pays
    drafts = settings.get("speculative_config", {}).get("model")
    if draw.random() < 0.5 and drafts is None:
        settings |= tight(draw, model, settings, longest=60 + 30)
    rounds = draw.choice([1, 1, 2])
    text = f"seed {seed}: {model.variant} {model.changes} {settings}"
    prompts, params = [prompt for prompt, _ in requests], [p for _, p in requests]

    def generate(llm: LLM) -> list[Any]:
        return llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)

    plain = dict(skip_tokenizer_init=False, max_num_batched_tokens=64, block_size=16)
    with make("llama", model=str(folder), **plain) as llm:
        want = generate(llm)
    try:
        with make("llama", model=str(folder), **settings) as llm:
            for _ in range(rounds):
                for request, ours, theirs in zip(requests, generate(llm), want, strict=True):
                    check(model, *request, ours, theirs)
            stats = llm.stats()
            assert stats.kv_blocks_used == 0
            assert (stats.pipeline_stage_seconds > 0) == (stages > 1)
    except BaseException:
        print(text)
        raise
    return text


@pytest.mark.parametrize("seed", range(len(LAYOUTS)))
def test_random_layouts(seed, tmp_path, monkeypatch):
    check_layout(seed, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(len(LAYOUTS), 100))
def test_more_random_layouts(seed, tmp_path, monkeypatch):
    check_layout(seed, tmp_path, monkeypatch)
