"""Words of a command line as vLLM's users write them, in the way that `argparse` takes."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any


def normalized(words: Sequence[str], options: Collection[str]) -> list[str]:
    """`--max_model_len 8` as `--max-model-len 8`, and `--some-config.field value` as part of its JSON.

    Args:
        words: of the command line.
        options: those that exist, with their dashes; words that name no such option stay as they are.
    """
    out: list[str] = []
    objects: dict[str, int] = {}  # where the JSON of an option written in parts lies in `out`
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "--":
            return [*out, word, *rest]
        name, equals, value = word.partition("=")
        if not name.startswith("--") or name in options:
            out.append(word)
            continue
        option, _, path = name.partition(".")
        option = option.replace("_", "-")
        if option not in options:
            out.append(word)
        elif not path:
            out.append(option + equals + value)
        else:
            if not equals:
                value = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
            if option not in objects:
                objects[option] = len(out) + 1
                out += [option, "{}"]
            place = objects[option]
            out[place] = json.dumps(_with(json.loads(out[place]), path.split("."), _value(value)))
    return out


def _with(fields: dict[str, Any], path: list[str], value: Any) -> dict[str, Any]:
    inner = fields.get(path[0])
    if len(path) > 1:
        value = _with(inner if isinstance(inner, dict) else {}, path[1:], value)
    return {**fields, path[0]: value}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
