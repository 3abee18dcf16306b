"""What quantized checkpoints cost in quality: each scheme of `octavo quantize` against the weights before.

    python -m benchmarks.quantization --text english.txt --text chinese.txt
        [--model FILE]          a GGUF file, or a folder with safetensors; without: the default model
        [--tokens 25k]          scored of each text
        [--rows "W8A8; W4A16"]  some rows; "reference" for those by Transformers and compressed-tensors
        [--peer PYTHON]         an environment with llm-compressor, which then rounds to 4 bits as well
        [--threads N]

Checkpoints lie in the cache folder and are made once. FP8 is computed by the plain twins of a GPU's kernels,
weights alone are expanded, and int8 is computed by the CPU's own kernels. Figures of single tokens are kept
beside the checkpoints after every batch: a run that was cut short, or is asked for more tokens, goes on. From
them come `benchmarks/quantization.json` and `benchmarks/quantization.md`.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks.quantization_page import REFERENCES, ROWS, page
from benchmarks.quantization_runs import (
    FP8_GPU,
    WINDOW,
    Engine,
    Figures,
    Reference,
    Run,
    Runs,
    batches_of,
    measure,
    subject,
    summary_of,
)
from benchmarks.quantization_runs import ROWS as TOGETHER
from octavo import QuantizationModifier, oneshot
from octavo.config import parse_amount
from octavo.eval.texts import read_texts
from octavo.kernels.cache_folder import cache_folder
from octavo.models.loader import iterate_weights, load_model_config
from octavo.models.loading import targets_of
from octavo.models.locate import find_model
from octavo.models.pull import pull_default
from octavo.models.safetensors_file import list_files, read_header
from octavo.quantization.rounding import round_matrix, spread
from octavo.quantization.scheme import WeightScheme

FOLDER = Path(__file__).parent
EXPORTED = ("llama", "mistral", "qwen2", "qwen3")  # families whose config `export` can write
SHOWN = (
    "num_tokens", "perplexity", "baseline_perplexity", "perplexity_ratio", "perplexity_ratio_se", "kl_mean",
    "kl_p99", "top1_agreement",
)  # fmt: skip
ERRORS = {
    "fp8, rows": WeightScheme("fp8", "channel"),
    "fp8, groups": WeightScheme("fp8", "group", 32),
    "int8, rows": WeightScheme("int8", "channel"),
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


def export(model: Path, folder: Path) -> Path:
    """A GGUF file as a checkpoint in bfloat16; a folder is one."""
    source = find_model(str(model))
    if source.kind == "folder" or (folder / "config.json").exists():
        return source.path if source.kind == "folder" else folder
    config = load_model_config(source)
    kind = config.architecture.removesuffix("ForCausalLM").lower()
    if kind not in EXPORTED:
        raise SystemExit(f"{model}: {config.architecture}: name a folder, or a file of {', '.join(EXPORTED)}")
    targets = targets_of(config)
    read = iterate_weights(source, config, targets, "auto", torch.bfloat16, "cpu", progress=False)
    tensors = {name: tensor.to(torch.bfloat16).clone() for name, tensor in read}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    raw = {
        "architectures": [config.architecture],
        "model_type": kind,
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


def located(model: str | None) -> tuple[Path, str, Path, Path, int]:
    """Of a model (None: the default one) its file or folder, its name, the folder of what is made of it, the
    checkpoint in bfloat16, and columns of groups of 4 bits."""
    given = Path(model) if model else pull_default()
    name = re.sub(r"[.-]q\d\w*$", "", given.stem, flags=re.I) if given.is_file() else given.name
    folder = cache_folder("bench") / "quantization" / name
    base = export(given, folder / "bfloat16")
    config = load_model_config(find_model(str(base)))
    group = math.gcd(128, config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim)
    return given, name, folder, base, group


def checkpoint(row: str, base: Path, folder: Path, group: int, peer: str | None) -> Path | None:
    """The quantized checkpoint of a row; None: there is no peer to make it."""
    scheme = row.partition(",")[0]
    plain = row.endswith("plain")
    out = folder / (f"peer-{scheme}" if plain else scheme)
    if (out / "config.json").exists():
        return out
    if plain:
        if peer is not None:
            subprocess.run([peer, "-c", PEER, str(base), str(out), str(group)], check=True)
        return None if peer is None else out
    shutil.rmtree(out, ignore_errors=True)
    size = group if scheme == "W4A16" else None
    return oneshot(base, QuantizationModifier(scheme=scheme, ignore=["lm_head"], group_size=size), out)


def maker(row: str, model: Path, base: Path, tokenizer: Path) -> Callable[[], Runs]:
    """What makes the engine of a row."""
    if row in REFERENCES:
        parts = REFERENCES[row]
        return partial(Reference, base, model, parts != "activations alone", parts != "weights alone")
    if row == "FP8_DYNAMIC":
        return lambda: Engine(subject(model, tokenizer), FP8_GPU)
    return lambda: Engine(subject(model, tokenizer, dequantize=row != "W8A8"))


def weight_errors(base: Path) -> dict[str, float]:
    """The root mean square of what rounding changes, over that of the weights, of all matrices of layers."""
    names = list(ERRORS)
    wrong, whole = dict.fromkeys(names, 0.0), 0.0
    for path in sorted(base.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for key in file.keys():
                if not key.endswith("_proj.weight"):
                    continue
                weight = file.get_tensor(key).float()
                whole += float(weight.square().sum(dtype=torch.float64))
                for name, scheme in ERRORS.items():
                    made = round_matrix(key, weight, scheme, packed=False, device=weight.device)
                    scale = spread(made["weight_scale"], scheme, *weight.shape)
                    difference = made["weight"].float() * scale - weight
                    wrong[name] += float(difference.square().sum(dtype=torch.float64))
    return {name: math.sqrt(wrong[name] / whole) for name in names}


def shown(summary: dict[str, float]) -> dict[str, float]:
    return {name: summary[name] for name in SHOWN}


def report(
    model: dict[str, Any], runs: dict[str, Run], names: dict[str, str], errors: Callable[[], dict[str, float]]
) -> None:
    """Put into a model's results what its runs have so far; `names` are the texts' SHA-256 by their names."""
    for row, run in runs.items():
        done = {text: found for text, found in run.figures.items() if found.batches}
        if not done or row in REFERENCES:
            continue
        whole = shown(summary_of(list(done.values())))
        if row in model["rows"] and model["rows"][row]["all"]["num_tokens"] > whole["num_tokens"]:
            continue  # what was measured before stands on more
        model["rows"][row] = {
            "ran": next(iter(done.values())).ran,
            "all": whole,
            "texts": {t: {"sha256": names[t], **shown(summary_of([f]))} for t, f in done.items()},
        }
    ours = runs.get("FP8_DYNAMIC")
    compared = [run for row, run in runs.items() if row in REFERENCES]
    if ours is None or not compared:
        return
    compared.append(ours)
    batches = min(found.batches for run in compared for found in run.figures.values())
    if batches:
        rows = {row: run for row, run in runs.items() if run in compared}
        model["reference"] = {
            "rows": {row: shown(summary_of(list(r.figures.values()), batches)) for row, r in rows.items()},
            "errors": model.get("reference", {}).get("errors") or errors(),
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", action="append", required=True, metavar="FILE")
    parser.add_argument("--model", metavar="FILE")
    parser.add_argument("--tokens", default="25k")
    parser.add_argument("--rows", default="", metavar="NAMES", help="Separated by ';'.")
    parser.add_argument("--peer", metavar="PYTHON")
    parser.add_argument("--threads", type=int, metavar="N")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    tokens = parse_amount(args.tokens, "tokens")
    assert isinstance(tokens, int)
    given, name, folder, base, group = located(args.model)
    asked = [row.strip() for row in args.rows.split(";") if row.strip()] or list(ROWS)
    asked = [one for row in asked for one in (("FP8_DYNAMIC", *REFERENCES) if row == "reference" else [row])]
    for row in asked:
        if row not in ROWS and row not in REFERENCES:
            parser.error(f"no row {row!r}: there are {'; '.join((*ROWS, 'reference'))}")
    files = {Path(file).name: read_texts(file) for file in args.text}
    hashes = {text: file.sha256 for text, file in files.items()}
    plain = subject(base, given)
    texts = {text: batches_of(file.texts, plain, tokens) for text, file in files.items()}
    runs = {}
    for row in (*ROWS, *REFERENCES):
        model = checkpoint(row, base, folder, group, args.peer) if row in asked else None
        if model is None:
            if row in asked:
                print(f"{row}: no --peer, left out")
            continue
        run = Run(maker(row, model, base, given))
        weights = [path / "model.safetensors" for path in (base, model)]
        stamp = " ".join(f"{w.stat().st_size}.{w.stat().st_mtime_ns}" for w in weights)
        for text, sha256 in hashes.items():
            saved = folder / "figures" / f"{row} of {sha256[:8]}.npz"
            run.figures[text] = Figures(saved, f"{sha256} {stamp} {TOGETHER} {WINDOW}")
        runs[row] = run

    saved = FOLDER / "quantization.json"
    results: dict[str, Any] = json.loads(saved.read_text())
    headers = [read_header(path) for path in list_files(base)]
    parameters = sum(math.prod(t.shape) for header in headers for t in header.tensors.values())
    origin = f"expanded from {given.name}" if given.is_file() else "as they are"
    about = f"{parameters / 1e6:.0f} million parameters, {origin}."
    found = results["models"].setdefault(name, {"rows": {}}) | {"about": about, "group": group}
    results["models"][name] = found
    results["texts"] |= {sha: {"name": text, "sha256": sha} for text, sha in hashes.items()}

    def write() -> None:
        report(found, runs, hashes, lambda: weight_errors(base))
        saved.write_text(json.dumps(results, indent=1) + "\n")
        (FOLDER / "quantization.md").write_text(page(results))
        for row, run in runs.items():
            print(row, {t: int(f.lengths.sum()) for t, f in run.figures.items()}, flush=True)

    measure(Run(lambda: Engine(plain)), [runs[row] for row in runs if row in asked], texts, write)
    write()


if __name__ == "__main__":
    main()
