"""A GPU that is only pretended: code for CUDA tensors runs on shapes alone, on a machine with or without one.

Tensors are PyTorch's on its `meta` device, which have no memory, and say that they lie on the GPU. What they
are computed to is not: only shapes and dtypes, by rules of this module where PyTorch's own are slow to come
by (its element-wise ones for `meta` import its compiler: seconds).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_BOOLEAN = frozenset("eq ne lt le gt ge isnan isinf isfinite signbit".split())
_REDUCTIONS = frozenset("sum mean amax amin argmax argmin any all logsumexp prod max min".split())
_LIKE = frozenset("empty_like zeros_like ones_like full_like rand_like".split())
_RESHAPING = frozenset("t_ transpose_ squeeze_ unsqueeze_ resize_ set_ as_strided_".split())
_ALONG = frozenset("cumsum cumprod softmax log_softmax _softmax _log_softmax flip".split())
# Made of views and conversions, which PyTorch knows for `meta` without importing anything.
_PLAIN = frozenset(
    "flatten unflatten reshape contiguous to split chunk expand_as view_as narrow unbind".split()
)


def gpu_facts(device: torch.device) -> dict[str, Any]:
    """What PyTorch tells about a GPU, as plain data: what `pretended_gpu` takes."""
    properties = torch.cuda.get_device_properties(device)
    found = {name: getattr(properties, name) for name in dir(properties) if not name.startswith("_")}
    plain = {name: value for name, value in found.items() if isinstance(value, (int, float, str))}
    return {**plain, "index": device.index or 0}


@contextlib.contextmanager
def pretended_gpu(facts: dict[str, Any], place: str = "meta") -> Iterator[torch.device]:
    """In this context, on this thread, what is made on CUDA devices has no memory and is not computed.

    What asks `torch.cuda` for a GPU's properties is told `facts`.

    Args:
        facts: of `gpu_facts`, of a GPU here or elsewhere: name, major, minor, multi_processor_count, …
        place: where such tensors are in truth; on "cpu" they are computed, for tests.

    Yields:
        The device.
    """
    device = torch.device("cuda", facts["index"])
    answers: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: device.index + 1,
        "current_device": lambda: device.index,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "get_device_properties": lambda device=None: SimpleNamespace(**facts),
        "get_device_capability": lambda device=None: (facts["major"], facts["minor"]),
        "get_device_name": lambda device=None: facts["name"],
        "Event": _Event,
    }
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        if place == "meta":
            stack.enter_context(_ShapesOnly())
        stack.enter_context(_OnDevice(device, place))
        yield device


class _Event:
    """Stands for a CUDA event: everything has happened already."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class _OnDevice(TorchFunctionMode):
    """Makes in another place what is asked for on the GPU, and says that tensors in that place lie on it."""

    def __init__(self, device: torch.device, place: str):
        super().__init__()
        self._place = place

        def there(tensor: Tensor) -> bool:
            return tensor.device.type == place

        def copy(target: Tensor, source: Any, *args: Any, **kwargs: Any) -> Tensor:
            if isinstance(source, Tensor) and source.is_meta and not target.is_meta:
                return target  # to the host, where nobody looks
            return target.copy_(source, *args, **kwargs)

        self._answers: dict[Any, Callable[..., Any]] = {
            Tensor.device.__get__: lambda t, *_: device if there(t) else t.device,
            Tensor.is_cuda.__get__: lambda t, *_: there(t),  # type: ignore[attr-defined]
            Tensor.is_cpu.__get__: lambda t, *_: t.is_cpu and not there(t),  # type: ignore[attr-defined]
            Tensor.get_device: lambda t: device.index if there(t) else t.get_device(),
            Tensor.pin_memory: lambda t, *_, **__: t,
            Tensor.copy_: copy,
        }

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        answer = self._answers.get(func)
        if answer is not None:
            return answer(*args, **(kwargs or {}))
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        kwargs = {key: self._there(value) for key, value in (kwargs or {}).items() if key != "pin_memory"}
        return func(*map(self._there, args), **kwargs)

    def _there(self, value: Any) -> Any:
        named = isinstance(value, str) and value.partition(":")[0] == "cuda"
        return self._place if named or (isinstance(value, torch.device) and value.type == "cuda") else value


class _Rules:
    """Results of operations on `meta` tensors, by rules that import nothing; PyTorch's own for the others.

    Apart from its mode, since PyTorch wraps a mode's own function in another, which imports its compiler.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        rule = _rule(func)
        there = any(t.is_meta for t in _tensors(args)) or str(kwargs.get("device")) == "meta"
        if not there:
            return func(*args, **kwargs)
        if rule is not None:
            return kwargs["out"] if "out" in kwargs else rule(*args, **kwargs)
        parts = NotImplemented
        if func.overloadpacket.__name__ not in _PLAIN:
            with self:  # type: ignore[attr-defined]
                parts = func.decompose(*args, **kwargs)
        return func(*args, **kwargs) if parts is NotImplemented else parts


class _ShapesOnly(_Rules, TorchDispatchMode):
    """The mode that goes by the rules."""


@functools.cache
def _rule(func: Any) -> Callable[..., Any] | None:
    """How the result of an operation is made; None: PyTorch knows."""
    name = func._schema.name.removeprefix("aten::")
    if name.endswith("_") and not name.endswith("__") and name not in _RESHAPING:
        return lambda target, *_, **__: target
    if torch.Tag.pointwise in func.tags or name == "where":
        return functools.partial(_pointwise, name)
    if name in _LIKE:
        return lambda x, *_, dtype=None, **__: _empty(x.shape, dtype or x.dtype)
    if name in _ALONG:
        return lambda x, *_, dtype=None, **__: _empty(x.shape, dtype or x.dtype)
    if name in _REDUCTIONS:
        return functools.partial(_reduced, name)
    return _RULES.get(name)


def _tensors(args: Sequence[Any]) -> Iterator[Tensor]:
    for arg in args:
        if isinstance(arg, Tensor):
            yield arg
        elif isinstance(arg, (list, tuple)):
            yield from _tensors(arg)


def _empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _broadcast(shapes: Sequence[Sequence[int]]) -> list[int]:
    widest = max(map(len, shapes))
    result = [1] * widest
    for shape in shapes:
        for axis, size in enumerate(shape, widest - len(shape)):
            result[axis] = size if result[axis] == 1 else result[axis]
    return result


def _range(*args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor:
    numbers = range(*args) if all(isinstance(arg, int) for arg in args) else torch.arange(*args)
    found = torch.int64 if isinstance(numbers, range) else numbers.dtype
    return _empty((len(numbers),), dtype or found)


def _pointwise(name: str, *args: Any, **kwargs: Any) -> Tensor:
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    shape = _broadcast([t.shape for t in tensors])
    if name in _BOOLEAN or name.startswith("logical_"):
        return _empty(shape, torch.bool)
    values = [arg for arg in args if isinstance(arg, (Tensor, bool, int, float))]
    values = values[1:] if name == "where" else values
    dtype = tensors[0].dtype if len(values) < 2 else torch.result_type(values[0], values[1])
    if name == "div" and not kwargs.get("rounding_mode") and not dtype.is_floating_point:
        dtype = torch.get_default_dtype()
    return _empty(shape, dtype)


def _reduced(name: str, x: Tensor, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
    if isinstance(dim, Tensor):  # the larger of two
        return _pointwise(name, x, dim)
    axes = range(x.dim()) if dim is None or dim == [] else dim if isinstance(dim, (list, tuple)) else [dim]
    gone = {axis % max(x.dim(), 1) for axis in axes}
    kept = [1 if i in gone else n for i, n in enumerate(x.shape) if keepdim or i not in gone]
    dtype = {"any": torch.bool, "all": torch.bool, "argmax": torch.int64, "argmin": torch.int64}.get(name)
    if name in ("sum", "prod") and not x.dtype.is_floating_point:
        dtype = torch.int64
    values = _empty(kept, kwargs.get("dtype") or dtype or x.dtype)
    return (values, _empty(kept, torch.int64)) if name in ("max", "min") and dim is not None else values


def _matmul(a: Tensor, columns: int) -> Tensor:
    return _empty((*a.shape[:-1], columns), a.dtype)


def _sorted(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    return _empty(x.shape, x.dtype), _empty(x.shape, torch.int64)


def _top(x: Tensor, k: int, dim: int = -1, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    shape = [k if axis == dim % x.dim() else size for axis, size in enumerate(x.shape)]
    return _empty(shape, x.dtype), _empty(shape, torch.int64)


def _cat(tensors: Sequence[Tensor], dim: int = 0, **kwargs: Any) -> Tensor:
    shape = list(tensors[0].shape)
    shape[dim] = sum(t.shape[dim] for t in tensors)
    return _empty(shape, tensors[0].dtype)


def _index(x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    given = [i for i in indices if i is not None]
    if any(i.dtype == torch.bool for i in given):
        raise NotImplementedError("a mask picks elements: their number is not known without their values")
    first = next(n for n, i in enumerate(indices) if i is not None)
    last = first + len(given)
    picked = _broadcast([i.shape for i in given])
    if None in indices[first:last]:
        raise NotImplementedError("indices with a gap between them")
    return _empty((*x.shape[:first], *picked, *x.shape[last:]), x.dtype)


_RULES: dict[str, Callable[..., Any]] = {
    "mm": lambda a, b, **_: _matmul(a, b.shape[-1]),
    "bmm": lambda a, b, **_: _matmul(a, b.shape[-1]),
    "matmul": lambda a, b, **_: _matmul(a, b.shape[-1]),
    "addmm": lambda c, a, b, **_: _matmul(a, b.shape[-1]),
    "linear": lambda x, weight, *_: _matmul(x, weight.shape[0]),
    "_scaled_mm": lambda a, b, scale_a, scale_b, bias=None, scale_result=None, out_dtype=None, *_, **__: (
        _empty((a.shape[0], b.shape[1]), out_dtype or a.dtype)
    ),
    "_int_mm": lambda a, b, **_: _empty((a.shape[0], b.shape[1]), torch.int32),
    "embedding": lambda weight, indices, *_: _empty((*indices.shape, weight.shape[1]), weight.dtype),
    "gather": lambda x, dim, index, **_: _empty(index.shape, x.dtype),
    "arange": _range,
    "cat": _cat,
    "index": _index,
    "sort": _sorted,
    "topk": _top,
}
