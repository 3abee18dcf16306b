"""A model file's logits through Octavo's loaders and layers against Transformers'."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from octavo.models.config import ModelConfig
from octavo.models.hf_config import model_config_from_dict
from octavo.models.interface import CausalLM
from octavo.models.loader import iterate_weights, load_model_config
from octavo.models.loading import build_model, load_targets, load_weights
from octavo.models.locate import find_model
from tests import tiny
from tests.models.paged import PagedRun

TOLERANCE = 1e-4


def read(
    path: Path,
    load_format: str = "auto",
    backend: str = "torch",
    block_size: int = 8,
    max_model_len: int = tiny.CONTEXT,
    expert_parallel: bool = False,
) -> CausalLM:
    """The float32 model of a folder or GGUF file; a parameter that nothing fills is NaN."""
    source = find_model(str(path))
    config = load_model_config(source)
    model = build_model(
        config,
        dtype=torch.float32,
        device="cpu",
        attention_backend=backend,
        max_model_len=max_model_len,
        block_size=block_size,
        expert_parallel=expert_parallel,
    )
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    targets = load_targets(model)
    load_weights(
        model, iterate_weights(source, config, targets, load_format, torch.float32, "cpu", progress=False)
    )
    return model


def assert_as_exact(
    ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]
) -> None:
    """Logits of texts in float32 err from those in float64 by no more than `TOLERANCE`, or three times what
    Transformers errs by: how much rounding is magnified is the model's and the text's, not the engine's."""
    for ours_, theirs_, exact_ in zip(ours, theirs, exact, strict=True):
        allowed = max(TOLERANCE, 3 * float((theirs_.double() - exact_).abs().max()))
        error = float((ours_.double() - exact_).abs().max())
        assert error <= allowed, f"{error:.2e} from float64, and {allowed:.2e} is allowed"


def check(model: CausalLM, variant: str, chunk: int = 1000, prompts: list[list[int]] | None = None) -> None:
    """Hold the logits at every position of the prompts, computed together in chunks, to Transformers'."""
    prompts = tiny.PROMPTS if prompts is None else prompts
    run = PagedRun(model, len(prompts), max(map(len, prompts)), seed=chunk)
    for got, prompt in zip(run.prompts(prompts, chunk), prompts, strict=True):
        want = tiny.logits(variant, prompt)
        assert (got - want).abs().max() < TOLERANCE
        assert want.std() > 1  # else closeness would mean little


def random_model(
    family: str, options: dict[str, Any], seed: str
) -> tuple[transformers.PreTrainedModel, ModelConfig]:
    """A model of a family of Transformers ("Llama", …) whose every weight matters, and its config as ours."""
    config = getattr(transformers, f"{family}Config")(**options)
    config.architectures = [f"{family}ForCausalLM"]
    torch.manual_seed(sum(seed.encode()))
    model = getattr(transformers, f"{family}ForCausalLM")._from_config(config, attn_implementation="eager")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith("e_score_correction_bias"):
            tensor.data.uniform_(-0.3, 0.3)
        elif name.endswith("bias"):
            tensor.data.normal_(std=0.3)
        elif "norm" in name:
            tensor.data.uniform_(0.5, 1.5)
    return model.eval(), model_config_from_dict(config.to_dict())


def converted(hf: transformers.PreTrainedModel, config: ModelConfig, **settings: Any) -> CausalLM:
    """The same model as ours; `settings` are those of `build_model`."""
    model = build_model(config, **settings)
    state = hf.state_dict()
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    load_weights(model, state.items())
    return model


def random_prompts(vocab_size: int, lengths: Sequence[int]) -> list[list[int]]:
    """The same prompts every time."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(vocab_size, (n,), generator=generator).tolist() for n in lengths]


def assert_equal(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> None:
    """Logits of texts in float32 are Transformers', and are worth comparing."""
    for got, want in zip(ours, theirs, strict=True):
        assert (got - want).abs().max() < TOLERANCE
        assert want.std() > 1  # else closeness would mean little
        assert len(set(want.argmax(-1).tolist())) > 3


@torch.no_grad()
def greedy(model: Any, ids: list[int], count: int) -> tuple[list[int], float]:
    """Transformers' greedy continuation of `count` tokens, and the smallest lead of a chosen token."""
    out, cache, lead, step = [], None, float("inf"), torch.tensor([ids])
    for _ in range(count):
        result = model(step, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, row = result.past_key_values, result.logits[0, -1]
        first, second = row.topk(2).values.tolist()
        lead = min(lead, first - second)
        out.append(int(row.argmax()))
        step = torch.tensor([[out[-1]]])
    return out, lead
