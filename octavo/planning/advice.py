"""Which setting to change, and to what, where a plan does not fit or fits few requests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.kv.format import QUANTIZED
from octavo.planning.plan import Layout, Machine, Plan, Planner

# What changes are lighter than others: first those that cost nothing but a smaller step, then those that
# cost a margin, quality, length, or more devices.
_MOST_RANKS = 8


@dataclass(frozen=True)
class Advice:
    """A change of settings and its effect.

    Attributes:
        changes: the settings by name, with their new values.
        plan: the plan under them.
        cost: what it costs, in a few words.
    """

    changes: dict[str, Any]
    plan: Plan
    cost: str

    @property
    def fits(self) -> bool:
        """Whether the plan fits with it."""
        return self.plan.problem is None


def advise(
    planner: Planner,
    plan: Plan,
    config: EngineConfig,
    request_len: int | None = None,
    most: int = 6,
) -> list[Advice]:
    """Changes that help, the best first: those after which the plan fits, each by itself, in the order of
    what they cost; then those that only help, by how many tokens they make room for. Where no single one
    makes it fit, the first is all of them together as far as needed, if that does.

    Args:
        plan: of `config`.
        request_len: as the plan's; None: the whole context, which a change of max_model_len changes too.
    """
    found: list[Advice] = []
    together: dict[str, Any] = {}
    ranks: list[dict[str, Any]] = []
    combined: Advice | None = None
    for changes, cost in _candidates(planner, plan, config):
        advice = _try(planner, plan, config, changes, cost, request_len)
        if advice is None or not _helps(plan, advice.plan):
            continue
        found.append(advice)
        if "tensor_parallel_size" in changes:
            ranks.append(changes)
            continue  # beside the others only if nothing else does
        together = {**changes, **together}
        if plan.problem is not None and combined is None and len(together) > len(changes):
            both = _try(planner, plan, config, together, "all of these", request_len)
            combined = both if both is not None and both.fits else None
    for changes in ranks if plan.problem is not None and not any(a.fits for a in found) else ():
        if combined is None and together:
            both = _try(planner, plan, config, {**together, **changes}, "all of these", request_len)
            combined = both if both is not None and both.fits else None
    good = [advice for advice in found if advice.fits] if plan.problem is not None else []
    rest = sorted((a for a in found if a not in good), key=_room, reverse=True)
    first = [combined] if combined is not None and not good else []
    return [*first, *good, *rest][:most]


def _room(advice: Advice) -> tuple[int, int, int]:
    """The more, the better: on as few devices, of requests, of tokens."""
    plan = advice.plan
    return -plan.layout.num_devices, plan.num_requests, plan.fit.num_tokens


def _helps(before: Plan, after: Plan) -> bool:
    """Whether more requests run at once, or less is lacking until one does."""
    if before.problem is None or after.problem is None:
        return after.problem is None and after.num_requests > before.num_requests * (before.problem is None)
    return after.lacking < before.lacking or after.fit.longest > before.fit.longest


def _try(
    planner: Planner,
    plan: Plan,
    config: EngineConfig,
    changes: dict[str, Any],
    cost: str,
    request_len: int | None,
) -> Advice | None:
    """The plan with these changes; None where the model or the device doesn't take them."""
    settings = {name: value for name, value in changes.items() if name != "tensor_parallel_size"}
    layout = replace(plan.layout, tensor=changes.get("tensor_parallel_size", plan.layout.tensor))
    try:
        after = planner.plan(replace(config, **settings), plan.machine, layout, request_len)
    except ConfigError:
        return None
    return Advice(changes, after, cost)


def _candidates(planner: Planner, plan: Plan, config: EngineConfig) -> Iterator[tuple[dict[str, Any], str]]:
    machine: Machine = plan.machine
    layout: Layout = plan.layout
    gpu = machine.kind == "cuda"
    for setting in ("kv_cache_memory_bytes", "num_gpu_blocks_override"):
        if getattr(config, setting) is not None:
            yield {setting: None}, "the share of memory decides"
    if gpu and plan.max_num_batched_tokens > 2048:
        yield {"max_num_batched_tokens": 2048}, "longer prompts take more steps"
    if config.max_num_seqs > 16:
        fewer = max(16, min(config.max_num_seqs // 4, max(1, plan.fit.num_requests)))
        yield {"max_num_seqs": fewer}, "more requests wait"
    if gpu and config.gpu_memory_utilization < 0.95:
        yield {"gpu_memory_utilization": 0.95}, "less is left for other programs and recorded steps"
    if not gpu and config.cpu_memory_utilization < 0.6:
        yield {"cpu_memory_utilization": 0.6}, "less is left for other programs"
    if plan.kv_cache_dtype not in QUANTIZED:
        yield {"kv_cache_dtype": "fp8"}, "KV in 8 bits"
    if plan.fit.longest >= 2 and plan.fit.longest < plan.max_model_len:
        yield {"max_model_len": plan.fit.longest}, "longer requests are refused"
    elif not plan.fit.num_blocks and plan.max_model_len > 8192:
        yield {"max_model_len": 8192}, "longer requests are refused"
    if gpu:
        ranks = layout.tensor * 2
        while ranks <= _MOST_RANKS:
            changes = {"tensor_parallel_size": ranks}
            yield changes, f"{ranks * layout.pipeline * layout.data} devices"
            larger = _try(planner, plan, config, changes, "", None)
            if larger is not None and larger.plan.fit.num_blocks:
                break  # more would do as well
            ranks *= 2
    elif plan.quantization in (None, "half"):
        yield {"quantization": "int8"}, "weights in 8 bits"
    if plan.dtype == "float32":
        yield {"dtype": "bfloat16"}, "activations and KV in 16 bits"
