"""Settings of the HTTP server, declared like the engine's."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from octavo.config import setting, validate
from octavo.errors import ConfigError
from octavo.server.otlp import check_endpoint
from octavo.server.reasoning import REASONING_FORMATS
from octavo.server.tools.registry import TOOL_PARSERS
from octavo.vllm_names import SERVER, Foreign

API_KEY_VARIABLE = "OCTAVO_API_KEY"


@dataclass
class ServerConfig:
    """Settings of one server. Field names are vLLM's where vLLM has them.

    Attributes:
        foreign: what becomes of vLLM's others.
    """

    foreign: ClassVar[Mapping[str, Foreign]] = SERVER

    host: str = setting(
        "127.0.0.1", "Address to listen on; 0.0.0.0 takes requests from other machines (then set --api-key)."
    )
    port: int = setting(8000, "Port to listen on; 0 takes a free one.", low=0, high=65535)
    uds: str | None = setting(
        None,
        "Path of a Unix domain socket to listen on; then host and port mean nothing. Who may connect is said "
        "by the rights of the file and its folder.",
    )
    root_path: str | None = setting(
        None,
        "Path under which a proxy offers the server, such as /octavo, whether the proxy takes it off or not.",
    )
    served_model_name: list[str] | None = setting(
        None,
        "Names that clients may use for the model; answers carry the first. By default the model as given.",
    )
    api_key: list[str] | None = setting(
        None,
        f"Keys of which clients must send one as `Authorization: Bearer KEY`; {API_KEY_VARIABLE} adds one. "
        "/health, /ready, /ping and the page without its figures stay open.",
        secret=True,
    )
    api_key_file: str | None = setting(
        None,
        "File of further keys, one a line (# begins a comment). SIGHUP makes the server read it again.",
    )
    allowed_origins: list[str] | None = setting(
        None, "Web origins whose pages may call the server (CORS), `*` for all. By default none."
    )
    max_request_bytes: int = setting(
        16 * 2**20, "Largest request body; larger ones are refused with 413.", low=1024, unit="bytes"
    )
    max_prompts_per_request: int = setting(1024, "Most prompts in one completion request.", low=1)
    response_store_bytes: int = setting(
        64 * 2**20,
        "Memory for responses of /v1/responses that later requests may name; the one used least recently "
        "gives way. 0: none are stored.",
        low=0,
        unit="bytes",
    )
    max_num_queued_reqs: int | None = setting(
        None,
        "Most choices that may wait for a place in the batch; further requests are refused with 503 and "
        "Retry-After. By default any number.",
        low=0,
    )
    timeout_keep_alive: int = setting(
        75,
        "Seconds that a connection is kept open between requests. Longer than clients and proxies keep "
        "theirs, so that none sends a request on one that is being closed.",
        low=1,
        high=86400,
    )
    request_timeout: float | None = setting(
        None,
        "Seconds that a request may take from its arrival to the end of its answer; then it is ended, with "
        "504 or, in a stream, an error event. By default any time.",
        low=0.001,
        high=86400.0,
    )
    restart_engine: bool = setting(
        False,
        "Start the engine's process again if it ends by itself, at most 3 times in 10 minutes. Requests of "
        "which nothing has been sent are run again then, once; others end with an error.",
    )
    engine_timeout: float = setting(
        120.0,
        "Seconds without progress, while requests wait, after which the engine counts as hung: its process "
        "is ended, requests get an error, and /health and /ready tell it. What it does for the first time "
        "(it may compile kernels) gets ten times as long; every step, ten times the longest of its kind so "
        "far on top. Loading doesn't count. 0: it may take any time.",
        low=0.0,
        high=86400.0,
    )
    strict_fields: bool = setting(
        False,
        "Refuse requests with unknown fields (400) instead of ignoring these with a line in the log.",
    )
    trust_request_chat_template: bool = setting(
        False, "Let requests bring their own chat template, which is a program that this server then runs."
    )
    default_chat_template_kwargs: dict[str, Any] | None = setting(
        None,
        "Names for the chat template, as JSON, where a request doesn't give them: for example "
        '`{"enable_thinking": false}`.',
    )
    enable_auto_tool_choice: bool = setting(
        False, "Let the model choose by itself to call tools that a request offers; needs a tool_call_parser."
    )
    tool_call_parser: str | None = setting(
        None, "Format in which the model writes calls of tools.", choices=(None, *TOOL_PARSERS)
    )
    exclude_tools_when_tool_choice_none: bool = setting(
        False, "Leave tools out of the prompt of requests that forbid calls (tool_choice none)."
    )
    reasoning_parser: str | None = setting(
        None,
        "How the model marks its reasoning, which answers then carry apart.",
        choices=(None, *REASONING_FORMATS),
    )
    enable_force_include_usage: bool = setting(
        False, "Tell the usage at the end of every stream, whether its request asks for it or not."
    )
    return_tokens_as_token_ids: bool = setting(
        False, "Name tokens as `token_id:N` in log-probabilities, unless a request says otherwise."
    )
    tokenizer_threads: int = setting(2, "Threads that tokenize and render chat templates.", low=1, high=256)
    drain_timeout: float = setting(
        60.0, "Seconds that running requests get to finish after SIGTERM or SIGINT.", low=0.0, high=86400.0
    )
    enable_dev_endpoints: bool = setting(
        False,
        "Offer /reset_prefix_cache, /sleep, /wake_up and /is_sleeping: for development, not for the world.",
    )
    enable_kv_debug: bool = setting(
        False,
        "GET /debug/kv draws the pool of KV blocks as a map, and /debug/kv.json tells it: for development.",
    )
    metrics_prefix: str = setting(
        "octavo", "What stands before the colon of every metric's name; `vllm` fits boards made for vLLM."
    )
    disable_page: bool = setting(
        False, "Do not serve the page at / that shows the running server, nor the figures it asks for."
    )
    page_show_texts: bool = setting(
        False,
        "Show on the page the last words of what running requests ask and are answered: whoever may open its "
        "figures then reads everybody's texts.",
    )
    otlp_traces_endpoint: str | None = setting(
        None,
        "Address of an OTLP/HTTP receiver, such as http://127.0.0.1:4318/v1/traces, that gets a span per "
        "request. Needs `pip install 'octavo[otel]'`.",
    )
    enable_request_id_headers: bool = setting(
        False,
        "Tell the request's id, the client's or a new one, in the header X-Request-Id of every answer, of "
        "errors too.",
    )
    access_log: str | None = setting(
        None,
        "File to which a line of JSON is written per request, with its id and without its contents; - for "
        "standard output. SIGHUP makes the server open it again.",
    )
    ssl_keyfile: str | None = setting(None, "Private key file, to serve HTTPS.")
    ssl_certfile: str | None = setting(None, "Certificate file, to serve HTTPS.")

    def __post_init__(self) -> None:
        self.allowed_origins = _words(self.allowed_origins)
        validate(self)
        if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", self.metrics_prefix):
            raise ConfigError(
                f"metrics_prefix={self.metrics_prefix!r} is no beginning of a metric's name: give letters, "
                "digits and _, with no digit first"
            )
        self.root_path = _path_prefix(self.root_path)
        if self.uds is not None and (not self.uds or "\0" in self.uds):
            raise ConfigError(f"uds={self.uds!r} is no path: give one, such as /run/octavo.sock")
        if self.enable_auto_tool_choice and self.tool_call_parser is None:
            raise ConfigError("enable_auto_tool_choice needs a tool_call_parser: name the model's")

        if self.otlp_traces_endpoint is not None:
            check_endpoint(self.otlp_traces_endpoint)  # before a model is loaded


def _path_prefix(given: str | None) -> str | None:
    """A path without the slash at its end; None for that of no prefix.

    Raises:
        ConfigError: it is no path.
    """
    if given is None:
        return None
    if not re.fullmatch(r"(/[!-~]*)?", given) or set(given) & set("?#%"):
        raise ConfigError(f"root_path={given!r} is not valid: give a path, such as /octavo")
    return given.rstrip("/") or None


def _words(given: list[str] | None) -> list[str] | None:
    """Words; one that is a JSON list, as vLLM writes them, is its members.

    Raises:
        ConfigError: it is no list of words.
    """
    if not isinstance(given, list) or len(given) != 1 or not str(given[0]).startswith("["):
        return given
    try:
        words = json.loads(given[0])
    except ValueError:
        words = None
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ConfigError(
            f"allowed_origins={given[0]!r} is not valid: give origins, such as https://a.example"
        )
    return words
