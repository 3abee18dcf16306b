"""What a worker says of itself in the log when it has loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from octavo.kv.groups import describe_pool
from octavo.quantization.checkpoint_method import describe_modes
from octavo.quantization.checkpoint_runners import dequantized_instead
from octavo.quantization.local_hardware import hardware_of
from octavo.quantization.quantized_method import num_plain

if TYPE_CHECKING:
    from octavo.worker.worker import Worker


def describe(worker: Worker, threads: int) -> dict[str, str]:
    """What was loaded, and how it will run, by name (for `ModelFacts.summary`)."""
    model, speculative, draft = worker.model_config, worker.config.speculative, worker.draft
    implementation = "" if model.implementation == "octavo" else " through transformers"
    summary = {
        "architecture": model.architecture + implementation,
        "device": _device(worker, threads),
        "dtype": worker.dtype,
        "weights": _weights(worker),
        "attention": worker.model.attention_layers()[0].backend.name,
        "kv cache": _cache(worker),
    }
    if worker.group.size > 1:
        summary["sums over ranks"] = worker.group.transport
    if worker.part is not None:
        summary["stages"] = worker.part.stage.describe()
    if worker.tiers is not None:
        summary |= {**worker.tiers.describe(), "prefill": f"{worker.facts.prefill_rate:.0f} tokens/s"}
    summary["decode steps"] = _decoding(worker)
    if speculative is not None:
        summary["speculation"] = speculative.describe(None if draft is None else draft.name)
    return summary


def _device(worker: Worker, threads: int) -> str:
    if worker.device.type == "cuda":
        return f"{worker.device} ({torch.cuda.get_device_name(worker.device)})"
    return f"cpu ({threads} threads)"


def _weights(worker: Worker) -> str:
    found = worker.quantization
    if found is None:
        return "as dtype"
    tensors = (*worker.model.parameters(), *worker.model.buffers())
    nbytes = sum({t.data_ptr(): t.nbytes for t in tensors}.values())
    described = {"gguf": "as the GGUF file encodes them", "half": "16-bit floats as the checkpoint's"}
    if found.rules:
        modes = describe_modes(found, hardware_of(worker.device))
        for reason, count in dequantized_instead(worker.model).items():
            modes.append(f"{count} of the matrices dequantized, since {reason}")
        kept = f"{found.title}: {'; '.join(modes)}"
    else:
        kept = described.get(found.format, found.format)
        if plain := num_plain(worker.model):
            kept += f", {plain} of the matrices in {worker.dtype}"
    return f"{kept} ({nbytes / 1e6:.0f} MB)"


def _cache(worker: Worker) -> str:
    fmt, scales = worker.groups[0].format, worker.kv_scales
    pool = describe_pool(worker.groups, worker.facts.num_blocks)
    kind = fmt.dtype + (" with offsets" if fmt.offset else "")
    return f"{kind}, {pool}" if scales is None else f"{kind}, {scales.origin}, {pool}"


def _decoding(worker: Worker) -> str:
    if worker.runner.recorded is not None:
        return "recorded at first use"
    return "CUDA graphs, recorded at first use" if worker.runner.graphs else "eager"
