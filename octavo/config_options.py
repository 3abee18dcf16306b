"""Settings as options of a command line: made from their declarations, and read back."""

from __future__ import annotations

import argparse
import json
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields
from functools import partial
from typing import Any

from octavo.config import foreign_settings, make_config
from octavo.errors import ConfigError
from octavo.setting_values import listing, members_of, parse_amount
from octavo.vllm_names import LISTS, SHORT, Foreign

_FOREIGN = "vllm_"  # begins the names that parsed options of vLLM's have


def add_config_arguments(
    parser: argparse.ArgumentParser, cls: type, title: str, skip: tuple[str, ...] = ()
) -> None:
    """Add an option for every field of a settings dataclass (`--[no-]flag` for booleans)."""
    group = parser.add_argument_group(title)
    hints = typing.get_type_hints(cls)
    for spec in fields(cls):
        if spec.name in skip:
            continue
        short = [SHORT[spec.name]] if spec.name in SHORT else []
        meta, members = spec.metadata, members_of(hints[spec.name])
        default = spec.default if spec.default is not MISSING else None
        text = meta["help"].replace("%", "%%")
        text += "" if default in (None, False) else f" Default: {default}."
        text += "" if meta["only"] is None else f" {only_note(meta['only'])}"
        options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": text}
        if bool in members:
            group.add_argument(
                _flag(spec.name), dest=spec.name, action=argparse.BooleanOptionalAction, **options
            )
            continue
        if meta["choices"]:
            options["choices"] = [choice for choice in meta["choices"] if choice is not None]
        options["type"] = _parser_of(members, meta["unit"])
        if meta["aliases"]:
            options["type"] = partial(_resolved, meta["aliases"])
        if list in members:
            options["nargs"] = "+"
        if meta["positional"]:
            options["default"] = None
            parser.add_argument(spec.name, nargs="?", **options)
            group.add_argument(_flag(spec.name), dest=f"{spec.name}_option", metavar="MODEL", default=None,
                               help=f"The same as the positional {spec.name}.")  # fmt: skip
        else:
            metavar = None if meta["choices"] else _metavar(members, meta["unit"])
            group.add_argument(_flag(spec.name), *short, dest=spec.name, metavar=metavar, **options)
    for name, foreign in foreign_settings(cls).items():
        if foreign.option:
            _add_foreign(group, name, foreign)


def _add_foreign(group: argparse._ArgumentGroup, name: str, foreign: Foreign) -> None:
    """Take an option of vLLM's, which `--help` doesn't show."""
    options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    if foreign.flag:
        options["action"] = argparse.BooleanOptionalAction
    elif name in LISTS:
        options["nargs"] = "+"
    short = [SHORT[name]] if name in SHORT else []
    group.add_argument(_flag(name), *short, dest=_FOREIGN + name, **options)


def _resolved(aliases: Mapping[str, str], text: str) -> str:
    return aliases.get(text, text)


def only_note(only: tuple[Any, ...]) -> str:
    """What is told about a setting whose other values this version refuses."""
    return "Not in this version." if not only[0] else f"In this version only {listing(only)}."


def token_count(text: str) -> int:
    """At least 1 token, in the forms of `parse_amount`: the type of other options."""
    try:
        value = parse_amount(text, "tokens")
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not isinstance(value, int) or value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1 token")
    return value


def config_from_args(args: argparse.Namespace, cls: type, **defaults: Any) -> Any:
    """The settings that a parsed command line holds; `defaults` fill what it leaves out.

    Raises:
        ConfigError: a bad value.
    """
    values = dict(defaults)
    for spec in fields(cls):
        given = getattr(args, spec.name, None)
        if spec.metadata["positional"]:
            other = getattr(args, f"{spec.name}_option", None)
            if given is not None and other is not None and given != other:
                raise ConfigError(f"{spec.name} is named twice, as {given!r} and as {other!r}: leave one out")
            given = given if given is not None else other
        if given is not None:
            values[spec.name] = given
    for name in foreign_settings(cls):
        if (given := getattr(args, _FOREIGN + name, None)) is not None:
            values[name] = given
    return make_config(cls, values)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _metavar(members: tuple[Any, ...], unit: str | None) -> str:
    if unit:
        return unit.upper()
    return "JSON" if dict in members else "N" if (int in members or float in members) else "TEXT"


def _parser_of(members: tuple[Any, ...], unit: str | None) -> Any:
    def parse(text: str) -> Any:
        try:
            if unit:
                return parse_amount(text, unit)
            if dict in members and (str not in members or text.lstrip().startswith("{")):
                return json.loads(text)
            if list in members or (str in members and int not in members):
                return text
            if float in members:
                return float(text)
            return int(text)
        except (ConfigError, ValueError, RecursionError) as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse
