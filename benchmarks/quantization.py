"""What quantized checkpoints cost in quality: each scheme of `octavo quantize` against the weights before.

    python -m benchmarks.quantization --text english.txt --text chinese.txt
        [--tokens 25k]          scored of each text
        [--rows "W8A8; W4A16"]  some rows anew; the others stay as they were measured
        [--peer PYTHON]         an environment with llm-compressor, which then rounds to 4 bits as well

The model is the default one, its GGUF file expanded to bfloat16. Checkpoints lie in the cache folder and are
made once. FP8 is computed by the plain twins of a GPU's kernels, everything else by the CPU's own. Figures go
into `benchmarks/quantization.json` row by row, and from there into `benchmarks/quantization.md`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from octavo import QuantizationModifier, oneshot
from octavo.config import EngineConfig, parse_amount
from octavo.eval.evaluate import EvalOptions, evaluate
from octavo.eval.texts import read_texts
from octavo.models.loader import iterate_weights, load_model_config
from octavo.models.loading import targets_of
from octavo.models.locate import find_model
from octavo.models.pull import cache_folder, pull_default
from octavo.quantization.capability import Hardware
from octavo.quantization.local_hardware import assumed

FOLDER = Path(__file__).parent
GROUP = 64  # 128 does not divide 576 columns
FP8_GPU = Hardware("cuda", (9, 0), name="a GPU with FP8")
ROWS: dict[str, tuple[str, str]] = {
    "FP8_DYNAMIC": ("FP8 weights and activations", "0.5%"),
    "FP8_DYNAMIC, weights": ("FP8 weights", ""),
    "W8A8": ("int8 weights and activations", "1%"),
    "W8A16": ("int8 weights", ""),
    "W4A16": (f"int4 weights, groups of {GROUP}, searched scales", "no worse than llm-compressor"),
    "W4A16, plain": (f"int4 weights, groups of {GROUP}, by llm-compressor's round to nearest", ""),
}
PEER = """
import sys, torch
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
source, out, group = sys.argv[1], sys.argv[2], int(sys.argv[3])
weights = dict(num_bits=4, type="int", symmetric=True, strategy="group", group_size=group)
model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"[UNK]": 0}, "[UNK]")))
recipe = QuantizationModifier(
    config_groups={"group_0": {"targets": ["Linear"], "weights": weights}}, ignore=["lm_head"]
)
oneshot(model=model, recipe=recipe, processor=words)
model.save_pretrained(out, save_compressed=True)
"""


def export(folder: Path) -> Path:
    """The default model as a checkpoint in bfloat16."""
    if (folder / "config.json").exists():
        return folder
    source = find_model(str(pull_default()))
    config = load_model_config(source)
    targets = targets_of(config)
    read = iterate_weights(source, config, targets, "auto", torch.bfloat16, "cpu", progress=False)
    tensors = {name: tensor.to(torch.bfloat16).clone() for name, tensor in read}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert config.rope is not None
    raw = {
        "architectures": [config.architecture],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": config.tie_word_embeddings,
        "hidden_act": config.hidden_act,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
    }
    (folder / "config.json").write_text(json.dumps(raw, indent=1))
    return folder


def checkpoint(row: str, base: Path, folder: Path, peer: str | None) -> Path | None:
    """The quantized checkpoint of a row; None: there is no peer to make it."""
    scheme = row.partition(",")[0]
    out = folder / (f"peer-{scheme}" if row.endswith("plain") else scheme)
    if (out / "config.json").exists():
        return out
    if row.endswith("plain"):
        if peer is None:
            return None
        subprocess.run([peer, "-c", PEER, str(base), str(out), str(GROUP)], check=True)
        return out
    shutil.rmtree(out, ignore_errors=True)
    group = GROUP if scheme == "W4A16" else None
    return oneshot(base, QuantizationModifier(scheme=scheme, ignore=["lm_head"], group_size=group), out)


def measure(row: str, model: Path, base: Path, files: list[str], tokens: int) -> dict[str, Any]:
    """Figures of a row, of each text and of all."""
    common: dict[str, Any] = dict(
        tokenizer=str(pull_default()), dtype="float32", device="cpu", kv_cache_memory_bytes=256 << 20
    )
    computed = FP8_GPU if row == "FP8_DYNAMIC" else None
    found: dict[str, Any] = {"texts": {}}
    nll = before = count = 0.0
    for file in files:
        text = read_texts(file)
        begin = time.perf_counter()
        with assumed(computed) if computed is not None else contextlib.nullcontext():
            result = evaluate(
                EngineConfig(model=str(model), **common),
                text.texts,
                EvalOptions(max_tokens=tokens),
                baseline=EngineConfig(model=str(base), **common),
            )
        summary = result.summary
        found["texts"][Path(file).name] = {
            "sha256": text.sha256,
            "seconds": round(time.perf_counter() - begin),
            "ran": result.settings["model"]["ran"]["weights"],
            **{k: summary[k] for k in SHOWN},
        }
        n = summary["num_tokens"]
        nll, before, count = nll + summary["nll"] * n, before + summary["baseline_nll"] * n, count + n
    found |= {"tokens": int(count), "rise": torch.tensor((nll - before) / count).expm1().item()}
    return found


SHOWN = (
    "num_tokens", "perplexity", "baseline_perplexity", "perplexity_ratio", "perplexity_ratio_se", "kl_mean",
    "kl_p99", "top1_agreement",
)  # fmt: skip


def page(results: dict[str, Any]) -> str:
    """The page of what was measured."""
    lines = [
        "# Quality of quantized checkpoints",
        "",
        "SmolLM2-135M-Instruct: its Q4_1 file expanded to bfloat16, and that quantized by `octavo quantize`,",
        "with lm_head left alone; float32 arithmetic on a CPU. Written by",
        "`python -m benchmarks.quantization`; the baseline of every figure is the bfloat16 checkpoint,",
        "computed beside it.",
        "",
        "Perplexity's rise is that over all tokens, with its standard error; wanted rises are goals, and are",
        "met or not. Columns of this model (576) are no multiples of 128, so that groups of 4 bits have",
        f"{GROUP}. The goals are meant for 50,000 tokens and more; a row of fewer is a first look.",
        "",
        "| scheme | what | rise of perplexity | wanted | tokens |",
        "|---|---|---|---|---|",
    ]
    for row, (what, wanted) in ROWS.items():
        if row in results:
            found = results[row]
            verdict = f"{wanted}: {_verdict(row, results)}" if wanted else ""
            error = _error(found)
            lines.append(
                f"| {row} | {what} | {found['rise']:+.2%} ± {error:.2%} | {verdict} | {found['tokens']:,} |"
            )
    lines += [
        "",
        "By text (`ratio`: of perplexities, with its paired standard error; KL in nats):",
        "",
        "| scheme | text | bfloat16 | quantized | ratio | mean KL | 99th percentile | same likeliest token |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in (row for row in ROWS if row in results):
        for name, text in results[row]["texts"].items():
            lines.append(
                f"| {row} | {name} | {text['baseline_perplexity']:.3f} | {text['perplexity']:.3f} "
                f"| {text['perplexity_ratio']:.4f} ± {text['perplexity_ratio_se']:.4f} "
                f"| {text['kl_mean']:.4f} | {text['kl_p99']:.3f} | {text['top1_agreement']:.1%} |"
            )
    lines += ["", "What ran, by the engine's own account:", ""]
    lines += [
        f"- {row}: {next(iter(results[row]['texts'].values()))['ran']}" for row in ROWS if row in results
    ]
    return "\n".join(lines) + "\n"


def _error(found: dict[str, Any]) -> float:
    """The standard error of a row's rise, from those of its texts."""
    texts = found["texts"].values()
    errors = [
        text["perplexity_ratio_se"] / text["perplexity_ratio"] * text["num_tokens"] / found["tokens"]
        for text in texts
    ]
    return (1 + found["rise"]) * sum(error**2 for error in errors) ** 0.5


def _verdict(row: str, results: dict[str, Any]) -> str:
    rise = results[row]["rise"]
    if row == "W4A16":
        if "W4A16, plain" not in results:
            return "not compared"
        return "met" if rise <= results["W4A16, plain"]["rise"] else "missed"
    return "met" if rise <= float(ROWS[row][1].rstrip("%")) / 100 else "missed"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", action="append", required=True, metavar="FILE")
    parser.add_argument("--tokens", default="25k")
    parser.add_argument("--rows", default="", metavar="NAMES", help="Separated by ';'.")
    parser.add_argument("--peer", metavar="PYTHON")
    args = parser.parse_args()
    folder = cache_folder().parent / "bench" / "quantization"
    base = export(folder / "bfloat16")
    saved = FOLDER / "quantization.json"
    results: dict[str, Any] = json.loads(saved.read_text()) if saved.exists() else {}
    tokens = parse_amount(args.tokens, "tokens")
    assert isinstance(tokens, int)
    for row in [name.strip() for name in args.rows.split(";") if name.strip()] or list(ROWS):
        model = checkpoint(row, base, folder, args.peer)
        if model is None:
            print(f"{row}: no --peer, left out")
            continue
        results[row] = measure(row, model, base, args.text, tokens)
        saved.write_text(json.dumps(results, indent=1) + "\n")
        (FOLDER / "quantization.md").write_text(page(results))
        print(f"{row}: perplexity {results[row]['rise']:+.3%}", flush=True)


if __name__ == "__main__":
    main()
