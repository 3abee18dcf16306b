"""`LLM.from_transformers` against Transformers' `generate`, both with and without an assistant, on a CPU.

    python benchmarks/assisted.py [--layers 20] [--rounds 3] [--tokens 128] [--threads N] [--json FILE]

The target is the embedded default model in float32 (as a module of Transformers), the assistant its first
`--layers` layers with the target's own norm and head, whose drafts are right as often as that makes
them. Prompts one by one, greedy, ends of text ignored; both sides compute with the same number of threads and
take turns. The tokens must be equal; printed are tokens per second, the medians of all rounds.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from cpu_decode import transformers_model

from octavo import LLM, SamplingParams
from octavo.models.locate import find_model
from octavo.tokenization.tokenizer import load_tokenizer

PROMPTS = (
    "Write a story about the sea.",
    "List ten facts about bees.",
    "Explain to a child why it rains.",
    "def get_alpha(self):\n    return self._values['alpha']\n\ndef get_beta(self):\n",
)


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
    model: Any, prompts: list[list[int]], tokens: int, **assistant: Any
) -> tuple[list[list[int]], float]:
    """Transformers' tokens, and seconds."""
    out, begin = [], time.perf_counter()
    for prompt in prompts:
        ids = torch.tensor([prompt])
        lengths = dict(max_new_tokens=tokens, min_new_tokens=tokens)
        done = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, **lengths, **assistant
        )
        out.append(done[0, len(prompt) :].tolist())
    return out, time.perf_counter() - begin


def ours(llm: LLM, prompts: list[list[int]], tokens: int) -> tuple[list[list[int]], float]:
    """Octavo's tokens, and seconds."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, min_tokens=tokens, detokenize=False)
    out, begin = [], time.perf_counter()
    for prompt in prompts:
        out.append(llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids)
    return out, time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=psutil.cpu_count(logical=False))
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, tokenizer = transformers_model(torch.float32), load_tokenizer(find_model(None).path)
    draft = first_layers(model, args.layers)
    prompts = [tokenizer.encode(text) for text in PROMPTS[: args.prompts]]
    settings: dict[str, Any] = dict(
        dtype="float32", num_threads=args.threads, max_model_len=1024, enable_prefix_caching=False
    )
    plain = LLM.from_transformers(model, **settings)
    assisted = LLM.from_transformers(model, assistant_model=draft, **settings)
    sides = {
        "Transformers": lambda: theirs(model, prompts, args.tokens),
        "Transformers, assisted": lambda: theirs(model, prompts, args.tokens, assistant_model=draft),
        "Octavo": lambda: ours(plain, prompts, args.tokens),
        "Octavo, assisted": lambda: ours(assisted, prompts, args.tokens),
    }
    rates: dict[str, list[float]] = {name: [] for name in sides}
    answers: dict[str, list[list[int]]] = {}
    for round_ in range(args.rounds + 1):  # the first warms up
        for name, run in sides.items():
            answers[name], seconds = run()
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
