"""Where traces are sent: checked with the other settings, before a model is loaded. Imports nothing heavy."""

from __future__ import annotations

import importlib.util
from urllib.parse import urlsplit

from octavo.errors import ConfigError


def check_endpoint(endpoint: str) -> str:
    """The address that spans are sent to; the standard path is put behind a bare host.

    Raises:
        ConfigError: no HTTP address, or OpenTelemetry isn't installed.
    """
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"otlp_traces_endpoint={endpoint!r} is no HTTP address: give one such as "
            "http://127.0.0.1:4318/v1/traces (OTLP over gRPC is not spoken)"
        )
    try:
        found = importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http")
        found = found and importlib.util.find_spec("opentelemetry.sdk")
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise ConfigError("otlp_traces_endpoint needs OpenTelemetry: pip install 'octavo[otel]'")
    return endpoint if parts.path.strip("/") else parts._replace(path="/v1/traces").geturl()
