"""`LLM.from_transformers` against Transformers' `generate`, both with and without an assistant, on a CPU.

    python benchmarks/assisted.py [--layers 4] [--damp 0.005] [--rounds 3] [--tokens 128] [--threads N]

The target is the embedded default model in float32 (as a module of Transformers), the assistant its first
`--layers` layers with the target's own norm and head. There is no smaller model of that family, and layers
alone draft badly; so what the layers behind say is multiplied by `--damp` in the target, which then agrees
with its assistant as often as one with a good draft does, at the same cost. Prompts one by one, greedy, ends
of text ignored; both sides compute with the same number of threads and take turns. The tokens must be equal;
printed are tokens per second, the medians of all rounds (with --cpu-time per second of processor time, which
other work on the machine changes less).
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from cpu_decode import transformers_model

from octavo import LLM, SamplingParams
from octavo.models.locate import find_model
from octavo.tokenization.tokenizer import load_tokenizer

Clock = Callable[[], float]
PROMPTS = (
    "Write a story about the sea.",
    "List ten facts about bees.",
    "Explain to a child why it rains.",
    "def get_alpha(self):\n    return self._values['alpha']\n\ndef get_beta(self):\n",
)


@torch.no_grad()
def damp(model: Any, first: int, factor: float) -> None:
    """Multiply what the layers from `first` on add to the stream."""
    for layer in model.model.layers[first:]:
        layer.self_attn.o_proj.weight.mul_(factor)
        layer.mlp.down_proj.weight.mul_(factor)


def first_layers(model: Any, count: int) -> Any:
    """A model of the target's first layers, which shares their weights, and its embedding, norm and head."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = count
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:count]
    draft = copy.copy(model)
    draft.config = config
    draft.__dict__["_modules"] = dict(model._modules)
    decoder = copy.copy(model.model)
    decoder.config = config
    decoder.__dict__["_modules"] = {**model.model._modules, "layers": model.model.layers[:count]}
    draft.model = decoder
    return draft


def theirs(
    model: Any, prompts: list[list[int]], tokens: int, clock: Clock, **assistant: Any
) -> tuple[list[list[int]], float]:
    """Transformers' tokens, and seconds."""
    out, begin = [], clock()
    for prompt in prompts:
        ids = torch.tensor([prompt])
        lengths = dict(max_new_tokens=tokens, min_new_tokens=tokens)
        done = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, **lengths, **assistant
        )
        out.append(done[0, len(prompt) :].tolist())
    return out, clock() - begin


def ours(llm: LLM, prompts: list[list[int]], tokens: int, clock: Clock) -> tuple[list[list[int]], float]:
    """Octavo's tokens, and seconds."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, min_tokens=tokens, detokenize=False)
    out, begin = [], clock()
    for prompt in prompts:
        out.append(llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids)
    return out, clock() - begin


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--damp", type=float, default=0.005)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=psutil.cpu_count(logical=False))
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    clock = time.process_time if args.cpu_time else time.perf_counter
    model, tokenizer = transformers_model(torch.float32), load_tokenizer(find_model(None).path)
    damp(model, args.layers, args.damp)
    draft = first_layers(model, args.layers)
    prompts = [tokenizer.encode(text) for text in PROMPTS[: args.prompts]]
    settings: dict[str, Any] = dict(
        dtype="float32", num_threads=args.threads, max_model_len=1024, enable_prefix_caching=False
    )
    plain = LLM.from_transformers(model, **settings)
    assisted = LLM.from_transformers(model, assistant_model=draft, **settings)
    sides = {
        "Transformers": lambda: theirs(model, prompts, args.tokens, clock),
        "Transformers, assisted": lambda: theirs(model, prompts, args.tokens, clock, assistant_model=draft),
        "Octavo": lambda: ours(plain, prompts, args.tokens, clock),
        "Octavo, assisted": lambda: ours(assisted, prompts, args.tokens, clock),
    }
    rates: dict[str, list[float]] = {name: [] for name in sides}
    answers: dict[str, list[list[int]]] = {}
    for round_ in range(args.rounds + 1):  # the first warms up
        for name, run in sides.items():
            answers[name], seconds = run()
            print(f"round {round_}: {name}: {seconds:.2f} s", file=sys.stderr, flush=True)
            if round_:
                rates[name].append(len(prompts) * args.tokens / seconds)
    equal = all(answer == answers["Transformers"] for answer in answers.values())
    stats = assisted.stats()
    figures = {name: round(statistics.median(values), 1) for name, values in rates.items()}
    report = {
        "tokens_per_second": figures,
        "tokens_equal": equal,
        "threads": args.threads,
        "assistant_layers": args.layers,
        "damp": args.damp,
        "drafted": stats.spec_draft_tokens,
        "accepted": stats.spec_accepted_tokens,
    }
    print(json.dumps(report, indent=2))
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    plain.close()
    assisted.close()


if __name__ == "__main__":
    main()
