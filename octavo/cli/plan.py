"""`octavo plan`: what memory a model takes on a device, and how much fits, before anything is loaded."""

from __future__ import annotations

import argparse
import contextlib
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from octavo.config import EngineConfig
from octavo.config_options import add_config_arguments, config_from_args, token_count
from octavo.server.config import ServerConfig
from octavo.speculative_config import WHOLE_MODELS
from octavo.vllm_names import SHORT

if TYPE_CHECKING:
    from octavo.planning.advice import Advice
    from octavo.planning.plan import Machine, Plan, Planner

SUMMARY = "plan a model's memory on a device, without loading it"

# The server's own options are taken too, so that a command line of `octavo serve` can be planned as it is.


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        help="Plan for a card that is not here: A100-40G, H100-SXM, H200, L4, RTX-4090, T4… (`list` "
        "prints all).",
    )
    parser.add_argument(
        "--request-len",
        metavar="TOKENS",
        type=token_count,
        help="Length of the requests that are counted, prompt and output together. Default: max_model_len.",
    )
    parser.add_argument("--json", action="store_true", help="Print one JSON object (memory in bytes).")
    parser.add_argument(
        "--data-parallel-size",
        SHORT["data_parallel_size"],
        type=int,
        default=1,
        metavar="N",
        help="Replicas, which are planned for though `octavo serve` of this version runs one. Default: 1.",
    )
    add_config_arguments(parser, EngineConfig, "engine", skip=("data_parallel_size",))
    add_config_arguments(parser, ServerConfig, "server (taken as `octavo serve` takes them, and not used)")


def run(args: argparse.Namespace) -> int:
    if args.gpu == "list":
        from octavo.planning.cards import CARDS

        print("\n".join(f"{card.name:12}{card.memory / 2**30:7.2f} GiB" for card in CARDS))
        return 0
    replicas = args.data_parallel_size
    del args.data_parallel_size  # the engine's settings don't take it yet
    config = config_from_args(args, EngineConfig)

    from octavo.models.hub_header import described_model
    from octavo.planning.advice import advise
    from octavo.planning.machines import planned_machine
    from octavo.planning.plan import Layout, Planner
    from octavo.worker.draft_loading import draft_settings

    machine = planned_machine(config.device, args.gpu)
    layout = Layout(config.tensor_parallel_size, config.pipeline_parallel_size, replicas)
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(described_model(config))
        speculative, draft = config.speculative, None
        if speculative is not None and speculative.method in WHOLE_MODELS:
            draft = stack.enter_context(described_model(draft_settings(config, speculative)))
        planner = Planner(source, config.model_impl, draft)
        plan = planner.plan(config, machine, layout, args.request_len)
        advice: list[Advice] = []
        if plan.problem is not None or plan.fit.num_requests < config.max_num_seqs:
            advice = advise(planner, plan, config, args.request_len)
    report = as_json(planner, plan, advice)
    print(json.dumps(report, indent=2) if args.json else render(planner, plan, advice))
    return 0 if plan.problem is None else 1


def as_json(planner: Planner, plan: Plan, advice: list[Advice]) -> dict[str, Any]:
    """The plan as JSON values; memory in bytes."""
    return {
        "model": planner.source.name,
        "architecture": planner.model.architecture,
        "num_parameters": plan.weights.num_parameters,
        "dtype": plan.dtype,
        "quantization": plan.quantization,
        "kv_cache_dtype": plan.kv_cache_dtype,
        "machine": _machine(plan.machine),
        "parallel": {**asdict(plan.layout), "served_by_this_version": plan.layout.is_served},
        "memory_bytes": {"total": plan.ledger.total, **plan.ledger.held},
        "weights_by_type": dict(plan.weights.by_type),
        "draft": plan.draft
        and {
            "model": plan.draft.name,
            "num_parameters": plan.draft.weights.num_parameters,
            "weights_bytes": plan.draft.weights.total,
            "weights_by_type": dict(plan.draft.weights.by_type),
            "kv_cache_bytes_per_request": plan.draft.request_bytes,
        },
        "kv": {**asdict(plan.fit), "num_requests_on_all_replicas": plan.num_requests},
        "max_model_len": plan.max_model_len,
        "max_num_batched_tokens": plan.max_num_batched_tokens,
        "least_step_seconds": plan.step_seconds,
        "fits": plan.problem is None,
        "problem": plan.problem,
        "advice": [
            {
                "change": item.changes,
                "cost": item.cost,
                "fits": item.fits,
                "num_tokens": item.plan.fit.num_tokens,
                "num_requests": item.plan.num_requests,
                "longest": item.plan.fit.longest,
                "request_len": item.plan.fit.request_len,
            }
            for item in advice
        ],
    }


def _machine(machine: Machine) -> dict[str, Any]:
    card = machine.card
    return {
        "kind": machine.kind,
        "name": machine.name,
        "total_bytes": machine.total,
        "compute_capability": machine.capability and "{}.{}".format(*machine.capability),
        "source": card and card.source,
        "bandwidth_bytes_per_s": card and card.bandwidth,
        "flops": card and card.flops,
    }


def render(planner: Planner, plan: Plan, advice: list[Advice]) -> str:
    """The plan as text for a person."""
    from octavo.planning.ledger import KINDS, gib

    fit, held, layout = plan.fit, plan.ledger.held, plan.layout
    billions = plan.weights.num_parameters / 1e9
    lines = [
        _row(
            "model",
            f"{planner.source.name} ({planner.model.architecture}), {billions:.2f} billion parameters",
        ),
        _row("device", f"{plan.machine.name}, {gib(plan.ledger.total)}" + _each(plan)),
    ]
    if layout.num_devices > 1:
        lines.append(
            _row(
                "parallel",
                f"tensor {layout.tensor}, pipeline {layout.pipeline}, data {layout.data}"
                + ("" if layout.is_served else ": planned by formula, not served by this version"),
            )
        )
    types = ", ".join(f"{kind} {gib(n)}" for kind, n in plan.weights.by_type.most_common())
    notes = {
        "weights": types if layout.pipeline == 1 else f"of the heaviest stage; in all {types}",
        "kv_cache": f"{fit.num_blocks} blocks of {fit.block_tokens} tokens, {plan.kv_cache_dtype}",
        "tables": "of running requests",
        "activations": f"a step of {plan.max_num_batched_tokens} tokens"
        + ("" if plan.machine.kind == "cuda" else ", out of what is left"),
        "graphs": "recorded steps, out of what is left",
        "other": "the driver's and other programs'",
        "free": "",
        "host_cache": "in host memory",
    }
    for kind in KINDS:
        if kind in held:
            lines.append(_row(kind, f"{gib(held[kind]):>12}  {notes[kind]}"))
    if (draft := plan.draft) is not None:
        of_it = f"weights {gib(draft.weights.total)}, kv_cache {gib(draft.request_bytes)} of a request"
        lines.append(_row("draft model", f"{draft.name}, of the above {of_it} while it is drafted for"))
    window = f", {gib(fit.window_bytes)} more for windows" if fit.window_bytes else ""
    lines += [
        _row("KV per token", f"{gib(fit.bytes_per_token)}{window}; a block is {gib(fit.block_bytes)}"),
        _row("KV holds", f"{fit.num_tokens} tokens"),
        _row("requests", f"{plan.num_requests} of {fit.request_len} tokens at once" + _replicas(plan)),
        _row("longest context", f"{fit.longest} tokens (the model's: {planner.model.context_length})"),
    ]
    if plan.step_seconds is not None:
        lines.append(
            _row(
                "a decode step", f"at least {plan.step_seconds * 1e3:.2f} ms: weights, read once from memory"
            )
        )
    lines.append(_row("fits", "yes" if plan.problem is None else f"no: {plan.problem}"))
    if advice:
        lines.append("what would help" if plan.problem is not None else "for more requests at once")
        lines += [_advice(item) for item in advice]
    return "\n".join(lines)


def _advice(item: Advice) -> str:
    flags = " ".join(
        f"(no --{name.replace('_', '-')})" if value is None else f"--{name.replace('_', '-')} {value}"
        for name, value in item.changes.items()
    )
    fit, fits = item.plan.fit, "" if item.fits else "does not fit by itself; "
    effect = f"{item.plan.num_requests} requests of {fit.request_len} tokens, longest {fit.longest}"
    return f"  {flags}: {fits}{effect} ({item.cost})"


def _each(plan: Plan) -> str:
    return f" each of {plan.layout.num_devices}" if plan.layout.num_devices > 1 else ""


def _replicas(plan: Plan) -> str:
    return f", {plan.fit.num_requests} on each replica" if plan.layout.data > 1 else ""


def _row(name: str, value: str) -> str:
    return f"{name:<16}{value}".rstrip()
