"""The model card of a checkpoint that was made here."""

from __future__ import annotations

from importlib.metadata import version

from octavo.models.locate import ModelSource
from octavo.quantization.compress.plan import Work
from octavo.version import __version__


def model_card(source: ModelSource, work: Work, recipe: str) -> str:
    """README.md: what was made of what, how, by which versions.

    Args:
        recipe: its YAML.
    """
    before = sum(t.nbytes for header in work.headers for t in header.tensors.values())
    after = sum(entry.nbytes for names in work.written.values() for entry in names.values())
    schemes = ", ".join(scheme.name for scheme in work.config.schemes)
    base = source.name if source.revision is not None else source.path.name
    lines = [
        "---",
        f"base_model: {base}",
        "base_model_relation: quantized",
        "tags:",
        "- compressed-tensors",
        "- octavo",
        "---",
        "",
        f"# {base}, quantized: {schemes}",
        "",
        f"{len(work.layers)} matrices of {base} rounded to nearest; linear layers as they were: "
        f"{len(work.ignore)}. {before / 1e6:.1f} MB became {after / 1e6:.1f} MB.",
        *([f"Made of revision `{source.revision}`."] if source.revision is not None else []),
        "",
        "## Recipe",
        "",
        "```yaml",
        recipe.rstrip(),
        "```",
        "",
        "## Versions",
        "",
        f"octavo {__version__}, torch {version('torch')}, safetensors {version('safetensors')}",
        "",
    ]
    return "\n".join(lines)
