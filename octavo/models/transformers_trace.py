"""What a Transformers model does, found by running it once on shapes alone (the "meta" device).

The run tells each attention layer's sizes, scale, window and cap, and which linear layers read the
same tensor. A model that asks for anything that paged attention does not do is refused with the reason,
and one that passes never waits for the device: on this device there are no values to wait for.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import types
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from octavo.errors import ModelError

ROWS = 6  # of the traced text
TRACED, SERVED = "octavo_traced", "octavo"  # names under which Transformers finds our attention
ROTATE = "apply_rotary_pos_emb"  # what Transformers' models call the rotation of queries and keys

# Arguments that reach an attention function and do not change what it computes.
_HARMLESS = re.compile(
    r"output_|use_cache|cache_position|position_ids|position_embeddings|logits_to_keep|return_dict|"
    r"num_items_in_batch|dropout|sliding_window"
)


_OWN_ATTENTION = "it computes attention itself, not by Transformers' attention interface"


class Refusal(Exception):
    """Why a model cannot run on paged attention."""


@dataclass(frozen=True)
class TracedAttention:
    """One attention layer: its module, and what it was called with (see `layers.attention_layer.Attention`).

    `rotates_own` says that values do not share memory with what was rotated, so that a rotation may
    overwrite its input.
    """

    module: nn.Module
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    softcap: float | None
    rotates_own: bool


@dataclass
class Trace:
    """What one run showed.

    Attributes:
        attentions: in the order of their calls.
        inputs: linear layers in the order of their calls, with what identifies the tensor that they read.
        read: ids of linear layers whose matrix other code than their own looks at, if only for its dtype.
        output: class of the base model's output.
    """

    attentions: list[TracedAttention] = field(default_factory=list)
    inputs: list[tuple[nn.Module, tuple[int, int]]] = field(default_factory=list)
    read: set[int] = field(default_factory=set)
    output: type[Any] = object
    rotated: dict[int, set[int]] = field(default_factory=dict)
    kept: list[torch.Tensor] = field(default_factory=list)  # else an address could be given out twice


@dataclass(frozen=True)
class _MaskOfModel:
    """Stands for a mask that a model asks Transformers for; `problem` says why attention may not have it."""

    window: int | None
    problem: str | None = None


_trace: ContextVar[Trace] = ContextVar("octavo_trace")


def trace_model(model: Any, linear_types: tuple[type[nn.Module], ...], max_positions: int) -> Trace:
    """Run a causal model of Transformers, built on the meta device, once.

    Args:
        model: the model with its head, `use_cache` and dynamic rope switched off by the caller.
        linear_types: exact classes of the linear layers to watch.
        max_positions: tokens of the longest text; a window as long as this is none.

    Raises:
        ModelError: it cannot run on paged attention; one line says why.
    """
    name = type(model).__name__
    try:
        _check_kind(model)
        found = _run(model, linear_types, max_positions)
        _check_layers(model, found)
        found.kept.clear()
    except Refusal as refusal:
        reason = str(refusal)
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        reason = f"its code needs more than the shapes of tensors ({type(error).__name__}: {first})"
        if _MaskOfModel.__name__ in first:
            reason = _OWN_ATTENTION
    else:
        return found
    raise ModelError(
        f"{name} cannot run on paged attention through transformers: {reason}: use another model"
    )


def _check_kind(model: Any) -> None:
    if getattr(model, "_is_stateful", False):
        raise Refusal("it keeps a recurrent state, which has no place in a KV cache")
    kinds = set(getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ())
    if others := sorted(kinds - {"full_attention", "sliding_attention", "attention"}):
        raise Refusal(f"it has layers of the kind {', '.join(others)}, which paged attention does not do")
    base = model.base_model
    if base is model:
        raise Refusal("it has no base model apart from its head")
    if "position_ids" not in inspect.signature(base.forward).parameters:
        raise Refusal(
            "it counts positions itself instead of taking position_ids (ALiBi or learned in the model)"
        )


def _run(model: Any, linear_types: tuple[type[nn.Module], ...], max_positions: int) -> Trace:
    found = Trace()
    register()
    token = _trace.set(found)
    hooks = [
        module.register_forward_pre_hook(_see_input)
        for module in model.modules()
        if type(module) in linear_types
    ]
    ids = torch.zeros(1, ROWS, dtype=torch.int32, device="meta")
    positions = torch.arange(ROWS, device="meta")[None]
    with contextlib.ExitStack() as stack:
        stack.callback(_trace.reset, token)
        for hook in hooks:
            stack.callback(hook.remove)
        for module in model.modules():
            stack.enter_context(_watch_rotation(module, found))
            if type(module) in linear_types:
                stack.enter_context(_watch_matrix(module, found))
        stack.enter_context(torch.no_grad())
        model.config._attn_implementation = TRACED
        _positions.set(max_positions)
        # A two-dimensional mask of ones keeps Transformers from looking at positions for packed texts.
        mask = torch.ones(1, ROWS, dtype=torch.int64, device="meta")
        output = model.base_model(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False)
    found.output = type(output)
    hidden = getattr(output, "last_hidden_state", None)
    if not isinstance(hidden, torch.Tensor) or hidden.shape[:2] != (1, ROWS):
        raise Refusal("its base model returns no hidden state per token")
    return found


def _check_layers(model: Any, found: Trace) -> None:
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    if not found.attentions:
        raise Refusal(_OWN_ATTENTION)
    if len(found.attentions) != layers:
        raise Refusal(
            f"{len(found.attentions)} of its {layers} layers have attention by Transformers' interface; "
            "others keep a state of another kind"
        )


def _see_input(module: nn.Module, args: tuple[Any, ...]) -> None:
    found, x = _trace.get(), args[0]
    found.kept.append(x)
    found.inputs.append((module, (id(x), x._version)))


@contextlib.contextmanager
def _watch_matrix(module: nn.Module, found: Trace) -> Iterator[None]:
    """Note whether anything but a linear layer's own forward looks at its matrix."""
    kind: Any = type(module)
    own = False

    class Watched(kind):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            nonlocal own
            own = True
            try:
                return super().forward(*args, **kwargs)
            finally:
                own = False

        def __getattr__(self, name: str) -> Any:
            if name == "weight" and not own:
                found.read.add(id(self))
            return super().__getattr__(name)

    module.__class__ = Watched
    try:
        yield
    finally:
        module.__class__ = kind


def storage_of(x: torch.Tensor) -> int:
    """What identifies the memory that a tensor is a view of."""
    return x.untyped_storage()._cdata


# ---- attention and masks as Transformers calls them ---------------------------------------------

_positions: ContextVar[int] = ContextVar("octavo_trace_positions", default=1 << 20)


def register(served: Callable[..., Any] | None = None) -> None:
    """Tell Transformers our attention functions: the traced one with its masks, and the served one, which
    needs none."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(TRACED, _traced_attention)
    AttentionMaskInterface.register(TRACED, _traced_mask)
    if served is not None:
        AttentionInterface.register(SERVED, served)


def _traced_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
    scaling: Any = None,
    softcap: Any = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    found = _trace.get()
    heads, rows, dim = query.shape[1:]
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise Refusal("a row's attention sees what comes after it")
    if key.shape[2] != rows or value.shape[2] != rows:
        raise Refusal("it attends to another text (cross attention)")
    if value.shape != key.shape or key.shape[-1] != dim:
        raise Refusal(
            f"heads of queries, keys and values differ in size ({dim}, {key.shape[-1]}, {value.shape[-1]})"
        )
    if heads % key.shape[1]:
        raise Refusal(f"{heads} query heads over {key.shape[1]} KV heads")
    if not isinstance(attention_mask, _MaskOfModel):
        raise Refusal("it makes its attention mask itself, or adds a bias to the scores")
    if attention_mask.problem is not None:
        raise Refusal(attention_mask.problem)
    for name, argument in others.items():
        if argument is not None and not _HARMLESS.match(name):
            raise Refusal(f"its attention takes {name}, which paged attention does not have")
    if any(module is seen.module for seen in found.attentions):
        raise Refusal("one attention module runs twice per token")
    window = others.get("sliding_window")
    if window is not None and attention_mask.window is None and window < _positions.get():
        raise Refusal(f"its attention has a window of {window} tokens that its mask does not have")
    found.attentions.append(
        TracedAttention(
            module=module,
            num_heads=heads,
            num_kv_heads=key.shape[1],
            head_dim=dim,
            scale=_as_float(scaling, "scaling", dim**-0.5),
            window=attention_mask.window,
            softcap=None if softcap is None else _as_float(softcap, "softcap", 0.0),
            rotates_own=storage_of(value) not in found.rotated.get(id(module), ()),
        )
    )
    return value.new_empty(1, rows, heads, dim), None


def _as_float(value: Any, name: str, default: float) -> float:
    if value is None:
        return default
    if isinstance(value, (int, float)):
        return float(value)
    raise Refusal(f"{name} of its attention is no number")


def _traced_mask(*args: Any, mask_function: Callable[..., torch.Tensor], **others: Any) -> _MaskOfModel:
    """The window of a mask, by asking it about some rows: what each sees must be its last tokens."""
    n = _positions.get()
    columns = torch.arange(n + 1)
    zero = torch.zeros((), dtype=torch.int64)
    window: int | None = None
    for row in sorted({0, 1, 2, 3, 5, 63, n // 2, n // 2 + 1, n - 2, n - 1} & set(range(n)), reverse=True):
        seen = mask_function(zero, zero, torch.tensor(row), columns)
        seen = torch.as_tensor(seen).expand(n + 1)
        first, count = int(seen.int().argmax()), int(seen.sum())
        if row == n - 1 and count < n:
            window = count
        expected = max(0, row + 1 - window) if window is not None else 0
        if not count or first != expected or count != row + 1 - expected or not bool(seen[row]):
            return _MaskOfModel(None, "its attention mask is neither causal nor a sliding window")
    return _MaskOfModel(window)


# ---- the rotation of queries and keys -----------------------------------------------------------


def with_global(function: Any, name: str, value: Any) -> Any:
    """A copy of a function in whose body the module's global `name` is `value`."""
    copy = types.FunctionType(
        function.__code__,
        {**function.__globals__, name: value},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def rotates(module: nn.Module) -> bool:
    """Whether a module's own forward calls the usual function that rotates queries and keys."""
    forward = type(module).forward
    return isinstance(forward, types.FunctionType) and ROTATE in forward.__code__.co_names


@contextlib.contextmanager
def _watch_rotation(module: nn.Module, found: Trace) -> Iterator[None]:
    """Note what memory a module rotates."""
    if not rotates(module) or not callable(original := type(module).forward.__globals__.get(ROTATE)):
        yield
        return

    def watched(q: torch.Tensor, k: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found.kept.extend((q, k))
        found.rotated.setdefault(id(module), set()).update((storage_of(q), storage_of(k)))
        return original(q, k, *args, **kwargs)

    module.forward = types.MethodType(with_global(type(module).forward, ROTATE, watched), module)
    try:
        yield
    finally:
        del module.__dict__["forward"]


def sharing(found: Trace, names: Mapping[int, str]) -> list[list[str]]:
    """Names of linear layers beside each other that read the same tensor, two or more at a time.

    Args:
        names: of modules by `id`.
    """
    groups: dict[tuple[str, tuple[int, int]], list[str]] = {}
    calls: dict[str, int] = {}
    for module, tensor in found.inputs:
        name = names[id(module)]
        calls[name] = calls.get(name, 0) + 1
        groups.setdefault((name.rpartition(".")[0], tensor), []).append(name)
    return [group for group in groups.values() if len(group) > 1 and all(calls[n] == 1 for n in group)]
