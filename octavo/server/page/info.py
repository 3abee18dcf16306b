"""`GET /server_info.json`: what does not change while the server runs."""

from __future__ import annotations

import re
from dataclasses import Field, fields
from typing import Any, Literal

import msgspec
from starlette.responses import Response
from starlette.types import Scope

from octavo.server.service import Service
from octavo.version import __version__

LONGEST = 200
"""Characters of a setting's value that are shown; a chat template may be a whole program."""

_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


class SettingInfo(msgspec.Struct):
    """One setting in force; `value` and `default` as JSON writes them, `value` None where it is secret."""

    name: str
    section: Literal["engine", "server"]
    value: str | None
    default: str
    changed: bool
    secret: bool


class ServerInfo(msgspec.Struct):
    """What is served.

    Attributes:
        models: the names that clients may use.
        started: when the server came up, seconds since 1970.
        interface: what the model can be asked for: conversations, texts, embeddings, or token ids alone.
        sampling: the settings of a request that brings none.
        facts: what the engine found at start, as its log says it.
        settings: those of the engine and the server.
    """

    version: str
    models: list[str]
    started: int
    max_model_len: int
    interface: Literal["chat", "completion", "embedding", "tokens"]
    sampling: dict[str, float]
    facts: dict[str, str]
    settings: list[SettingInfo]


async def server_info(service: Service, scope: Scope, body: None) -> Response:
    """The handler."""
    engine = service.engine
    defaults = engine.default_params()
    # Settings that the engine chooses where the user leaves them open.
    chosen: dict[str, Any] = {
        "max_model_len": engine.max_model_len,
        "max_num_batched_tokens": engine.facts.max_num_batched_tokens,
        "served_model_name": service.names,
    }
    info = ServerInfo(
        version=__version__,
        models=service.names,
        started=service.created,
        max_model_len=engine.max_model_len,
        interface=_interface(service),
        sampling={name: getattr(defaults, name) for name in _SAMPLING},
        facts=dict(engine.facts.summary),
        settings=[
            *(_setting("engine", engine.config, spec, chosen) for spec in fields(engine.config)),
            *(_setting("server", service.config, spec, chosen) for spec in fields(service.config)),
        ],
    )
    return Response(
        msgspec.json.encode(info), media_type="application/json", headers={"cache-control": "no-store"}
    )


def _interface(service: Service) -> Literal["chat", "completion", "embedding", "tokens"]:
    if service.engine.facts.pooling_type is not None:
        return "embedding"
    if not service.text.has_tokenizer:
        return "tokens"
    return "chat" if service.text.has_chat_template else "completion"


def _setting(
    section: Literal["engine", "server"], config: Any, spec: Field[Any], chosen: dict[str, Any]
) -> SettingInfo:
    """A setting as it is shown."""
    given = getattr(config, spec.name)
    default = getattr(type(config)(), spec.name)
    secret = not spec.repr
    value = given if given is not None else chosen.get(spec.name)
    return SettingInfo(
        spec.name,
        section,
        None if secret and given is not None else _shown(value),
        _shown(default),
        given != default,
        secret,
    )


def _shown(value: Any) -> str:
    """A value as JSON, cut where it is long, without the passwords that an address may hold."""
    text = re.sub(r"://[^/@\s\"]*@", "://…@", msgspec.json.encode(value).decode())
    return text if len(text) <= LONGEST else text[:LONGEST] + "…"
