"""`octavo quantize`: write a quantized checkpoint."""

from __future__ import annotations

import argparse

SUMMARY = "write a model as a quantized checkpoint (compressed-tensors)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from octavo.quantization.compress.modifiers import SCHEMES

    parser.add_argument("model", metavar="MODEL", help="A folder with safetensors, or a hub id.")
    parser.add_argument(
        "--scheme", metavar="SCHEME", help=f"How weights and activations are rounded: {', '.join(SCHEMES)}."
    )
    parser.add_argument(
        "--recipe", metavar="FILE", help="A recipe in YAML instead, which says scheme, targets and ignore."
    )
    parser.add_argument(
        "--ignore",
        nargs="*",
        metavar="LAYER",
        help='Layers that stay as they are: full names, or "re:" patterns. Default: lm_head.',
    )
    parser.add_argument(
        "--targets",
        nargs="+",
        metavar="LAYER",
        help="Layers that are quantized. Default: Linear, which means all linear ones.",
    )
    parser.add_argument(
        "--group-size", type=int, metavar="N", help="Columns that share a scale (W4A16). Default: 128."
    )
    parser.add_argument(
        "-o",
        "--output-dir",
        required=True,
        metavar="DIR",
        help="An empty folder, or that of an unfinished run.",
    )
    parser.add_argument(
        "--device",
        metavar="NAME",
        default="auto",
        help="Where numbers are rounded: cpu, cuda, cuda:1. Default: on a GPU if there is one.",
    )
    parser.add_argument("--revision", metavar="REV", help="Branch, tag or commit of a model from the hub.")
    parser.add_argument("--download-dir", metavar="DIR", help="Where models of the hub are kept.")
    parser.add_argument("--hf-token", metavar="TOKEN", help="Token of the hub.")
    parser.add_argument("--disable-tqdm", action="store_true", help="Show no progress.")


def run(args: argparse.Namespace) -> int:
    from octavo.errors import ConfigError
    from octavo.quantization.compress.modifiers import SCHEMES, QuantizationModifier
    from octavo.quantization.compress.recipe import Recipe

    given = {
        name: value
        for name in ("scheme", "ignore", "targets", "group_size")
        if (value := getattr(args, name)) is not None
    }
    recipe: Recipe
    if args.recipe is not None:
        if given:
            name = next(iter(given)).replace("_", "-")
            raise ConfigError(f"--{name} beside --recipe: write it into the recipe, or leave --recipe out")
        from pathlib import Path

        recipe = Path(args.recipe)
    elif args.scheme is None:
        raise ConfigError(f"no --scheme: choose {', '.join(SCHEMES)}, or give a --recipe")
    else:
        recipe = QuantizationModifier(**{"ignore": ["lm_head"], **given})

    from octavo.quantization.compress.oneshot import oneshot

    folder = oneshot(
        args.model,
        recipe,
        args.output_dir,
        revision=args.revision,
        download_dir=args.download_dir,
        hf_token=args.hf_token,
        device=args.device,
        progress=not args.disable_tqdm,
    )
    print(folder)
    return 0
