"""Decode on the CPU: our share of a step outside the model, and 32 requests against Transformers.

    python benchmarks/cpu_decode.py [--dtype float32] [--rounds 3]

Both engines run the embedded default model in one process, in turn, with the same number of threads; the
ratio of medians counts. Transformers loads the weights that Octavo read from the GGUF file.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from octavo.bench.workloads import random_requests
from octavo.config import EngineConfig
from octavo.engine.core import EngineCore
from octavo.messages import CoreRequest
from octavo.models.loader import iterate_weights, load_model_config
from octavo.models.loading import targets_of
from octavo.models.locate import find_model
from octavo.sampling_params import SamplingParams

PROMPT, OUTPUT, BATCH = 64, 64, 32


def requests(count: int, output: int, seed: int) -> list[CoreRequest]:
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    return [
        CoreRequest(request_id=f"{seed}-{i}", prompt_token_ids=item.prompt_token_ids, params=params, seed=0)
        for i, item in enumerate(random_requests(count, (PROMPT, PROMPT), (output, output), seed))
    ]


def host_share(core: EngineCore, count: int, steps: int) -> tuple[float, float]:
    """Median microseconds of a decode step outside the model's forward, and of the whole step."""
    for request in requests(count, steps + 2, seed=1000 + count):
        core.add(request)
    runner = core.executor._worker.runner  # type: ignore[attr-defined]
    shares, totals = [], []
    while core.has_work:
        before, begin = runner.forward_seconds, time.perf_counter()
        core.step()
        total = time.perf_counter() - begin
        rows = core.scheduler.current_stats().num_running
        if rows == count:
            totals.append(total * 1e6)
            shares.append((total - (runner.forward_seconds - before)) * 1e6)
    return statistics.median(shares[4:]), statistics.median(totals[4:])


def ours(core: EngineCore, seed: int, output: int = OUTPUT) -> float:
    for request in requests(BATCH, output, seed):
        core.add(request)
    begin = time.perf_counter()
    while core.has_work:
        core.step()
    return time.perf_counter() - begin


def transformers_model(dtype: torch.dtype):  # type: ignore[no-untyped-def]
    import transformers

    source = find_model(None)
    config = load_model_config(source)
    theirs = transformers.LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
    )
    model = transformers.LlamaForCausalLM(theirs).to(dtype).eval()
    weights = dict(iterate_weights(source, config, targets_of(config), "auto", dtype, "cpu", progress=False))
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert missing in ([], ["lm_head.weight"]) and not unexpected, (missing, unexpected)
    model.tie_weights()
    return model


@torch.inference_mode()
def theirs(model, seed: int, output: int = OUTPUT) -> float:  # type: ignore[no-untyped-def]
    ids = torch.tensor([r.prompt_token_ids for r in requests(BATCH, output, seed)])
    begin = time.perf_counter()
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=output,
        min_new_tokens=output,
        do_sample=False,
        pad_token_id=0,
    )
    seconds = time.perf_counter() - begin
    assert out.shape[1] == PROMPT + output
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    config = EngineConfig(
        dtype=args.dtype, device="cpu", enable_prefix_caching=False, kv_cache_memory_bytes=1 << 30
    )
    core = EngineCore(config)
    print(
        f"threads {torch.get_num_threads()}, dtype {args.dtype}, attention {core.facts.summary['attention']}"
    )
    for count, limit in ((1, 300), (64, 1000)):
        share, total = host_share(core, count, 60)
        print(f"host share of a step, batch {count:2}: {share:6.0f} µs of {total:7.0f} µs (limit {limit})")
    model = transformers_model(getattr(torch, args.dtype))
    pairs = []
    for round_ in range(args.rounds + 1):
        a, b = ours(core, round_), theirs(model, round_)
        prefill_a, prefill_b = ours(core, 100 + round_, 1), theirs(model, 100 + round_, 1)
        pairs.append((a, b, a - prefill_a, b - prefill_b))
    pairs = pairs[1:]
    whole = statistics.median(b / a for a, b, _, _ in pairs)
    decode = statistics.median(b / a for _, _, a, b in pairs)
    tokens = BATCH * OUTPUT
    print(
        f"32 requests: Octavo {statistics.median(tokens / p[0] for p in pairs):.0f} tokens/s, "
        f"Transformers {statistics.median(tokens / p[1] for p in pairs):.0f}"
    )
    print(f"ratio {whole:.2f} with prefill, {decode:.2f} decode alone (to reach 1.5)")


if __name__ == "__main__":
    main()
