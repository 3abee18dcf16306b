"""The OpenAPI 3.1 document, generated from the table of operations and their structs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from octavo.server.errors import ErrorResponse
from octavo.version import __version__

if TYPE_CHECKING:
    from octavo.server.endpoints import Operation

_ERRORS = {
    "400": "The request cannot be served as asked; `param` names the field at fault.",
    "401": "The API key is missing or wrong.",
    "403": "A web page of another site sent it, whose origin is not allowed.",
    "404": "The model is not served here, or what the path names is not there.",
    "408": "The body arrived too slowly.",
    "413": "The body is too large.",
    "415": "The body is not declared to be JSON.",
    "500": "Internal error.",
    "503": "The server shuts down, or its engine has stopped.",
    "504": "It was not finished within --request-timeout.",
}


def openapi_document(
    operations: Sequence[Operation], needs_key: bool, root_path: str | None = None
) -> dict[str, Any]:
    """The document as JSON values.

    Args:
        needs_key: whether the server asks for an API key.
        root_path: what stands before all paths, where a proxy offers the server.
    """
    structs: list[Any] = [ErrorResponse]
    operations = [operation for operation in operations if not operation.hidden]
    for operation in operations:
        structs += [s for s in (operation.request, operation.response, operation.chunk) if s is not None]
    unique = list(dict.fromkeys(structs))
    schemas, components = msgspec.json.schema_components(unique, ref_template="#/components/schemas/{name}")
    refs = dict(zip(unique, schemas, strict=True))
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "Octavo",
            "version": __version__,
            "description": "OpenAI-compatible inference server. Unknown request fields are ignored with a "
            "warning in the log; fields of features that this version lacks are refused with 400.",
        },
        "paths": {},
        "components": {"schemas": components},
    }
    if root_path is not None:
        document["servers"] = [{"url": root_path}]
    if needs_key:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for operation in operations:
        methods = document["paths"].setdefault(operation.path, {})
        methods[operation.method.lower()] = _describe(operation, refs, needs_key)
    return document


def _describe(operation: Operation, refs: dict[Any, dict[str, Any]], needs_key: bool) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": operation.method.lower() + operation.path.translate(str.maketrans("/.{}", "____")),
        "summary": operation.summary,
        "responses": {"200": _success(operation, refs)},
    }
    if operation.query:
        described["parameters"] = [
            {"name": name, "in": "query", "description": text, "schema": schema}
            for name, (text, schema) in (
                (name, _query_schema(value)) for name, value in operation.query.items()
            )
        ]
    if names := re.findall(r"{(\w+)}", operation.path):
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if operation.request is not None:
        described["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": refs[operation.request]}},
        }
    for status in _possible_errors(operation, needs_key):
        described["responses"][status] = {
            "description": _ERRORS[status],
            "content": {"application/json": {"schema": refs[ErrorResponse]}},
        }
    if needs_key and not operation.open:
        described["security"] = [{"key": []}]
    return described


def _query_schema(value: str | tuple[str, tuple[str, ...]]) -> tuple[str, dict[str, Any]]:
    """What a value of the address means, and its schema."""
    if isinstance(value, str):
        return value, {"type": "integer"}
    return value[0], {"enum": list(value[1])}


def _success(operation: Operation, refs: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    if operation.response is None:
        kind = "application/json" if operation.path.endswith(".json") else operation.media_type
        schema = {"type": "object"} if kind == "application/json" else {"type": "string"}
        return {"description": operation.summary, "content": {kind: {"schema": schema}}}
    content: dict[str, Any] = {"application/json": {"schema": refs[operation.response]}}
    description = operation.summary
    if operation.chunk is not None:
        description += (
            " With stream=true: server-sent events whose data are chunks of the schema given for "
            "text/event-stream" + (", then `[DONE]`." if operation.done else ".")
        )
        content["text/event-stream"] = {"schema": refs[operation.chunk]}
    return {"description": description, "content": content}


def _possible_errors(operation: Operation, needs_key: bool) -> list[str]:
    errors = []
    if operation.request is not None:
        errors += ["400", "404", "408", "413", "415"]
    elif operation.query:
        errors.append("400")
    elif "{" in operation.path:
        errors.append("404")
    if needs_key and not operation.open:
        errors.append("401")
    if operation.method != "GET":
        errors.append("403")
    errors.append("500")
    if operation.generates or operation.path in ("/health", "/ready", "/ping"):
        errors.append("503")
    if operation.generates:
        errors.append("504")
    return sorted(errors)
