"""`octavo env --url`: what a running server tells of its memory and of its KV cache."""

from __future__ import annotations

import os
from typing import Any

from octavo.errors import ConfigError, OctavoError
from octavo.planning.ledger import KINDS, gib
from octavo.server.config import API_KEY_VARIABLE

_SECONDS = 10.0
# Metrics that are told, without their prefix: by the name in the report.
_TOLD = {
    "kv_cache_usage": "kv_cache_usage_perc",
    "num_running": "num_requests_running",
    "num_waiting": "num_requests_waiting",
    "preemptions": "num_preemptions_total",
    "prefix_cache_queries": "prefix_cache_queries_total",
    "prefix_cache_hits": "prefix_cache_hits_total",
    "prefix_cache_evictions": "prefix_cache_evictions_total",
    "host_cache_queries": "external_prefix_cache_queries_total",
    "host_cache_hits": "external_prefix_cache_hits_total",
    "kv_bytes_to_host": "kv_bytes_to_host_total",
    "kv_bytes_from_host": "kv_bytes_from_host_total",
}
# Metrics that there are once something has been drafted.
_DRAFTS = {
    "drafted": "spec_decode_num_draft_tokens_total",
    "accepted": "spec_decode_num_accepted_tokens_total",
}


def ask(url: str, api_key: str | None) -> dict[str, Any]:
    """The server's memory, KV cache and drafts as JSON values: bytes, tokens and requests.

    Raises:
        ConfigError: an address that is none, or a key that is not taken.
        OctavoError: nobody there, or not a server of ours.
    """
    import httpx
    from prometheus_client.parser import text_string_to_metric_families

    key = api_key or os.environ.get(API_KEY_VARIABLE)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        with httpx.Client(base_url=url, headers=headers, timeout=_SECONDS) as client:
            version, metrics = client.get("/version"), client.get("/metrics")
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise ConfigError(
            f"url={url!r} is no address ({error}): give one such as http://127.0.0.1:8000"
        ) from None
    except httpx.HTTPError as error:
        raise OctavoError(f"{url} does not answer ({error}): start the server, or give its address") from None
    if version.status_code == 401:
        raise ConfigError(f"{url} asks for a key: give --api-key, or set {API_KEY_VARIABLE}")
    try:
        told: dict[str, Any] = {"url": url, "octavo": version.json()["version"], "model": None}
        values: dict[str, float] = {}
        memory: dict[str, int] = {}
        for family in text_string_to_metric_families(metrics.text):
            for sample in family.samples:
                told["model"] = sample.labels.get("model_name", told["model"])
                name = sample.name.partition(":")[2]  # the prefix is the server's choice
                if name == "memory_bytes":
                    memory[sample.labels["kind"]] = int(sample.value)
                else:
                    values[name] = sample.value
        told["memory_bytes"] = memory
        told["kv"] = {name: values[metric] for name, metric in _TOLD.items()}
        told["speculation"] = {name: values.get(metric, 0.0) for name, metric in _DRAFTS.items()}
    except (ValueError, KeyError, TypeError):
        raise OctavoError(f"{url} is no server of this version of Octavo: give the address of one") from None
    return told


def render_server(told: dict[str, Any]) -> str:
    """The report as text for a person."""
    memory, kv = told["memory_bytes"], told["kv"]
    lines = [_row("server", f"{told['url']}, octavo {told['octavo']}, serving {told['model']}")]
    if "total" in memory:
        lines.append(_row("memory", gib(memory["total"])))
    lines += [
        _row(f"  {kind}", f"{gib(memory[kind]):>12}  {text}")
        for kind, text in KINDS.items()
        if kind in memory
    ]
    lines.append(
        _row("KV cache", f"{kv['kv_cache_usage']:.1%} in use; {kv['num_running']:.0f} requests run, "
             f"{kv['num_waiting']:.0f} wait, {kv['preemptions']:.0f} were preempted")
    )  # fmt: skip
    lines.append(_row("  prefix hits", _share(kv["prefix_cache_hits"], kv["prefix_cache_queries"])))
    lines.append(_row("  evictions", f"{kv['prefix_cache_evictions']:.0f} blocks"))
    if kv["host_cache_queries"] or "host_cache" in memory:
        lines.append(_row("  host hits", _share(kv["host_cache_hits"], kv["host_cache_queries"])))
        out, back = gib(kv["kv_bytes_to_host"]), gib(kv["kv_bytes_from_host"])
        lines.append(_row("  host copies", f"{out} out, {back} back"))
    drafts = told["speculation"]
    if drafts["drafted"]:
        lines.append(_row("drafts stood", _share(drafts["accepted"], drafts["drafted"])))
    return "\n".join(lines)


def _share(hits: float, queries: float) -> str:
    return f"{hits:.0f} of {queries:.0f} tokens" + (f" ({hits / queries:.1%})" if queries else "")


def _row(name: str, value: str) -> str:
    return f"{name:<16}{value}".rstrip()
