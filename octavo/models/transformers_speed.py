"""Parts of Transformers models that are recognised by their code and replaced by Octavo's kernels.

Transformers repeats the same few classes in every model's file. A class whose `forward` reads exactly
as that of a known one (same syntax tree, comments and annotations aside) computes the same.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import threading
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from octavo.errors import ModelError
from octavo.layers.activation import gated_activation
from octavo.models.transformers_layers import PagedAttention, Part, PlainLinear, PlainNorm, SharedInput, Step
from octavo.models.transformers_trace import ROTATE, rotates, with_global

_PARSING = threading.Lock()
"""CPython 3.11 counts an interpreter's depth of syntax trees once for all threads: two at a time fail."""


def _parse(function: Any) -> ast.Module:
    source = textwrap.dedent(inspect.getsource(function))
    with _PARSING:
        return ast.parse(source)


@functools.cache
def syntax(function: Any) -> str | None:
    """A function's syntax tree as text, less annotations, decorators and docstring; None without source."""
    try:
        tree = _parse(inspect.unwrap(function)).body[0]
    except (OSError, TypeError, SyntaxError):
        return None
    if not isinstance(tree, ast.FunctionDef):
        return None
    tree.decorator_list, tree.returns = [], None
    for argument in ast.walk(tree.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    if ast.get_docstring(tree) is not None:
        tree.body = tree.body[1:]
    return ast.dump(tree)


def _known(path: str) -> Any:
    """A function of Transformers by module, class and name, or None in a version that lacks it."""
    module, _, names = path.partition(":")
    try:
        found: Any = __import__(f"transformers.models.{module}", fromlist=["_"])
        return functools.reduce(getattr, names.split("."), found)
    except (ImportError, AttributeError):
        return None


def _reads_as(function: Any, *paths: str) -> bool:
    text = syntax(function)
    return text is not None and any(
        (known := _known(path)) is not None and syntax(known) == text for path in paths
    )


def our_norm(module: nn.Module) -> PlainNorm | None:
    """Octavo's norm in place of an RMSNorm of Transformers, or None for any other module."""
    weight, kind = module._parameters.get("weight"), type(module)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if weight is None or weight.ndim != 1 or not isinstance(eps, float) or len(module._parameters) > 1:
        return None
    if _reads_as(
        kind.forward, "llama.modeling_llama:LlamaRMSNorm.forward", "olmo2.modeling_olmo2:Olmo2RMSNorm.forward"
    ):
        return PlainNorm(weight.shape[0], eps)
    gemma = "gemma2.modeling_gemma2:Gemma2RMSNorm"
    if _reads_as(kind.forward, f"{gemma}.forward") and _reads_as(
        getattr(kind, "_norm", None), f"{gemma}._norm"
    ):
        return PlainNorm(weight.shape[0], eps, offset=1.0)
    return None


def fuse_feed_forward(module: nn.Module, shared: SharedInput | None) -> None:
    """Let a gated feed-forward multiply once for gate and up, and gate in one kernel."""
    config = getattr(module, "config", None)
    name = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
    down = getattr(module, "down_proj", None)
    if (
        shared is None
        or list(shared.parts) != ["gate_proj", "up_proj"]
        or not isinstance(down, (PlainLinear, Part))
        or not isinstance(name, str)
        or not _reads_as(type(module).forward, "llama.modeling_llama:LlamaMLP.forward")
        or not _is_activation(getattr(module, "act_fn", None), name)
    ):
        return
    try:
        gate = gated_activation(name)
    except ModelError:
        return

    def forward(x: torch.Tensor) -> torch.Tensor:
        product = shared(x.reshape(-1, x.shape[-1]))
        return down(gate(product).view(*x.shape[:-1], -1))

    module.forward = forward


def _is_activation(function: Any, name: str) -> bool:
    """Whether a module's activation is what its config names."""
    from transformers.activations import ACT2FN

    return name in ACT2FN and type(ACT2FN[name]) is type(function)


# Attention of these files, and whether they normalize the heads of queries and keys.
_ATTENTION = {
    "llama.modeling_llama:LlamaAttention.forward": False,
    "mistral.modeling_mistral:MistralAttention.forward": False,
    "qwen2.modeling_qwen2:Qwen2Attention.forward": False,
    "gemma2.modeling_gemma2:Gemma2Attention.forward": False,
    "qwen3.modeling_qwen3:Qwen3Attention.forward": True,
}


def fuse_attention(module: nn.Module, shared: SharedInput | None, step: Step) -> bool:
    """Let an attention module of the usual code project once, then normalize, rotate and store in one
    kernel; returns whether it does."""
    forward = type(module).forward
    path = next((path for path in _ATTENTION if _reads_as(forward, path)), None)
    paged, out = getattr(module, "octavo_attention", None), getattr(module, "o_proj", None)
    if (
        path is None
        or shared is None
        or list(shared.parts) != ["q_proj", "k_proj", "v_proj"]
        or not isinstance(paged, PagedAttention)
        or not isinstance(out, PlainLinear)
        or not _rotates_as_usual(forward)
    ):
        return False
    norms: tuple[PlainNorm, PlainNorm] | None = None
    if _ATTENTION[path]:
        q_norm, k_norm = getattr(module, "q_norm", None), getattr(module, "k_norm", None)
        if not isinstance(q_norm, PlainNorm) or not isinstance(k_norm, PlainNorm) or q_norm.eps != k_norm.eps:
            return False
        norms = q_norm, k_norm
    heads = [paged.num_heads, paged.num_kv_heads, paged.num_kv_heads]

    def attend(
        hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], **_: Any
    ) -> tuple[torch.Tensor, None]:
        q, k, v = shared(hidden_states[0]).unflatten(-1, (-1, paged.head_dim)).split(heads, dim=1)
        mixed = paged.rotate_and_attend(q, k, v, step.angles(*position_embeddings), norms)
        return out(mixed[None]), None

    module.forward = attend
    return True


def fuse_rotation(module: nn.Module, step: Step) -> None:
    """Let an attention module rotate queries and keys in one kernel, in place.

    Only where its file's function is the usual one, and its result takes the place of the arguments:
    `q, k = apply_rotary_pos_emb(q, k, …)`.
    """
    forward = type(module).forward
    if rotates(module) and _rotates_as_usual(forward) and _rebinds(forward):
        module.forward = types.MethodType(with_global(forward, ROTATE, step.rotate), module)


def _rotates_as_usual(forward: Any) -> bool:
    """Whether the function that a forward calls to rotate is Llama's: dimension i turns with i + half."""
    known = "llama.modeling_llama:"
    apply = forward.__globals__.get(ROTATE)
    half = getattr(inspect.unwrap(apply), "__globals__", {}).get("rotate_half") if callable(apply) else None
    return callable(half) and _reads_as(apply, known + ROTATE) and _reads_as(half, known + "rotate_half")


@functools.cache
def _rebinds(forward: Callable[..., Any]) -> bool:
    """Whether every rotated tensor's name is given to the result, and to nothing else's use before."""
    try:
        tree = _parse(forward)
    except (OSError, TypeError, SyntaxError):
        return False
    names: set[str] = set()
    calls = good = 0
    for node in ast.walk(tree):
        calls += isinstance(node, ast.Call) and _called(node) == ROTATE
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Call)
            and _called(node.value) == ROTATE
        ):
            targets, given = node.targets[0], node.value.args[:2]
            pair = targets.elts if isinstance(targets, ast.Tuple) else []
            if len(given) == 2 and [_name(x) for x in pair] == [_name(x) for x in given]:
                good += 1
                names.update(x for x in map(_name, given) if x)
    copies = any(isinstance(node, ast.Assign) and _name(node.value) in names for node in ast.walk(tree))
    return bool(calls) and calls == good and len(names) >= 2 and not copies


def _called(node: ast.Call) -> str | None:
    return _name(node.func)


def _name(node: ast.AST) -> str | None:
    return node.id if isinstance(node, ast.Name) else None
