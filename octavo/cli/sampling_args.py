"""Command-line options of a request, generated from `SamplingParams`."""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import types
import typing
from typing import Any

import msgspec

from octavo.sampling_params import SamplingParams

# What the program that calls the engine decides, not the person at the command line.
INTERNAL = frozenset({"output_kind", "detokenize"})


def add_sampling_arguments(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """Add an option for each field of `SamplingParams`; `defaults` are the command's own, told in the help.

    An option that is not given leaves no attribute, so that the model's own defaults apply.
    """
    group = parser.add_argument_group(
        "sampling", "What is not given comes from the model's generation_config.json, then from the defaults."
    )
    hints = typing.get_type_hints(SamplingParams)
    helps = field_docs(SamplingParams)
    for field in msgspec.structs.fields(SamplingParams):
        if field.name in INTERNAL:
            continue
        default = defaults.get(field.name, field.default)
        text = helps.get(field.name, "").replace("%", "%%")
        if default is not None and default is not False:
            text = f"{text} Default: {default}.".strip()
        options: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS, "help": text or None}
        options |= _argument(hints[field.name])
        group.add_argument("--" + field.name.replace("_", "-"), **options)


def sampling_values(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of `SamplingParams` that a parsed command line names."""
    names = (field.name for field in msgspec.structs.fields(SamplingParams))
    return {name: getattr(args, name) for name in names if name not in INTERNAL and hasattr(args, name)}


def _argument(hint: Any) -> dict[str, Any]:
    """argparse's options for a field's type."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    members = [m for m in (typing.get_args(hint) if union else (hint,)) if m is not type(None)]
    for member in members:
        if typing.get_origin(member) is list:
            (item,) = typing.get_args(member)
            if item is int:
                return {"type": int, "nargs": "+", "metavar": "ID"}
            return {"action": "append", "metavar": "TEXT"}
    if members == [bool]:
        return {"action": argparse.BooleanOptionalAction}
    if members in ([int], [float]):
        return {"type": members[0], "metavar": "N"}
    return {"type": _json, "metavar": "JSON"}


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None


def field_docs(cls: type) -> dict[str, str]:
    """The strings that stand beneath a class's fields: documentation that Python itself doesn't keep."""
    try:
        tree = ast.parse(inspect.getsource(cls))
    except (OSError, SyntaxError):  # installed without its source
        return {}
    docs: dict[str, str] = {}
    last = None
    for node in typing.cast(ast.ClassDef, tree.body[0]).body:
        if last and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docs[last] = str(node.value.value)
        last = None
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            last = node.target.id
    return docs
