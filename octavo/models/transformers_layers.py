"""Octavo's layers in the shapes in which Transformers' code calls them: `[1, rows, size]`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from octavo.errors import ConfigError, ModelError, first_line
from octavo.kernels import ops
from octavo.layers.attention import QKV, AttentionMetadata
from octavo.layers.attention_layer import Attention
from octavo.layers.embedding import LMHead
from octavo.layers.layer import BuildContext, Layer, LoadTarget, copy_into
from octavo.layers.linear import MergedColumnParallelLinear, ReplicatedLinear
from octavo.layers.norm import RMSNorm
from octavo.models.transformers_rope import own_type
from octavo.models.transformers_trace import TracedAttention


class PlainLinear(ReplicatedLinear):
    """In place of an `nn.Linear`: `[…, in]` to `[…, out]`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


class TransposedLinear(PlainLinear):
    """In place of GPT-2's `Conv1D`, whose matrix lies in a checkpoint as `[in, out]`."""

    def load_targets(self, prefix: str) -> dict[str, LoadTarget]:
        targets = super().load_targets(prefix)
        weight = targets[f"{prefix}.weight"]

        def load(tensor: torch.Tensor) -> None:
            weight.load(tensor.t())

        return targets | {f"{prefix}.weight": LoadTarget((self.in_features, self.parts[""]), load)}


class PlainNorm(RMSNorm):
    """In place of an RMSNorm of Transformers: of each row of `[1, rows, size]`, or each head of
    `[1, rows, heads, size]` or `[1, heads, rows, size]`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(0, 1) if x.shape[0] > 1 else x[0]
        if x.ndim == 3 and x.stride(0) < x.stride(1):  # heads first, by a view of rows first
            return super().forward(as_rows(x.transpose(0, 1))).transpose(0, 1)[None]
        return super().forward(as_rows(x) if x.ndim == 3 else x)[None]


class SharedInput(MergedColumnParallelLinear):
    """Linear layers of one parent that read the same tensor, multiplied as one.

    The first of them that is called computes all their products, the others take theirs. Called with
    another tensor than the last, it computes anew.
    """

    def __init__(self, in_features: int, parts: dict[str, int], bias: bool = False):
        super().__init__(in_features, parts, bias)
        self._x: torch.Tensor | None = None
        self._products: list[torch.Tensor] = []
        self._left = 0

    def part(self, x: torch.Tensor, index: int) -> torch.Tensor:
        """`x [1, rows, in]` times the matrix of one part: a view of all parts' product."""
        if self._x is not x:
            product = self(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)
            self._x, self._left = x, len(self.parts)
            self._products = list(product.split(self.local_sizes, dim=-1))
        result = self._products[index]
        self._left -= 1
        if not self._left:  # the last has its part: let go of the memory
            self._x, self._products = None, []
        return result


class Part(nn.Module):
    """In place of one of the linear layers that a `SharedInput` multiplies."""

    def __init__(self, owner: SharedInput, index: int):
        super().__init__()
        self._owner = (owner,)  # in a tuple, so that it is not registered a second time
        self._index = index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._owner[0].part(x, self._index)


class Head(LMHead):
    """In place of the output head: `[1, rows, hidden_size]` to `[1, rows, vocab_size]`."""

    bias: torch.Tensor | None

    def __init__(self, vocab_size: int, hidden_size: int, tied_to: Any, bias: bool):
        super().__init__(vocab_size, hidden_size, tied_to)
        self.has_bias = bias

    def create_weights(self, build: BuildContext, prefix: str) -> None:
        super().create_weights(build, prefix)
        # A buffer: the parameters are the matrix's.
        bias = torch.empty(self.vocab_size, dtype=build.dtype, device=build.device) if self.has_bias else None
        self.register_buffer("bias", bias, persistent=False)

    def load_targets(self, prefix: str) -> dict[str, LoadTarget]:
        targets = super().load_targets(prefix)
        if self.bias is not None:
            targets[f"{prefix}.bias"] = LoadTarget((self.vocab_size,), copy_into(self.bias))
        return targets

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = super().forward(hidden.reshape(-1, hidden.shape[-1]))
        if self.bias is not None:
            logits = logits + self.bias
        return logits.view(*hidden.shape[:-1], -1)


class Step:
    """What the layers of one model read of the step under way."""

    def __init__(self) -> None:
        self.caches: list[torch.Tensor] = []
        self.meta: Sequence[AttentionMetadata] = ()
        self._angles: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def start(self, caches: list[torch.Tensor], meta: Sequence[AttentionMetadata]) -> None:
        """A forward pass begins."""
        self.caches, self.meta = caches, meta
        self._angles.clear()

    def angles(self, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of all rows as `ops.rotary` takes them, and the rows' places in that table.

        Made once per step for each of the model's tables: they are recognised by identity.
        """
        for seen, table, rows in self._angles:
            if seen is cos:
                return table, rows
        half = cos.shape[-1] // 2
        table = torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1).float()
        rows = torch.arange(table.shape[0], device=table.device)
        self._angles.append((cos, table, rows))
        return table, rows

    def rotate(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Transformers' `apply_rotary_pos_emb`: `q`, `k` are `[1, heads, rows, head_dim]`, or with
        `unsqueeze_dim` 2 `[1, rows, heads, head_dim]`, and may be overwritten; `cos`, `sin`
        `[1, rows, head_dim]`."""
        table, places = self.angles(cos, sin)
        swap = unsqueeze_dim == 1
        new_q, new_k = (as_rows(x[0].transpose(0, 1) if swap else x[0]) for x in (q, k))
        ops.rotary(new_q, new_k, table, places)
        if swap:
            new_q, new_k = new_q.transpose(0, 1), new_k.transpose(0, 1)
        return new_q[None], new_k[None]


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """`[rows, heads, head_dim]` with the heads of a row side by side; a copy only where they are not."""
    if x.stride(2) == 1 and x.stride(1) == x.shape[2]:
        return x
    return x.contiguous()


class PagedAttention(Attention):
    """Attention over the paged cache in place of Transformers' own, after the model's own rotation."""

    index: int  # of its cache

    def __init__(self, traced: TracedAttention, step: Step):
        super().__init__(
            traced.num_heads,
            traced.num_kv_heads,
            traced.head_dim,
            None,  # type: ignore[arg-type]
            sliding_window=traced.window,
            scale=traced.scale,
            softcap=traced.softcap,
        )
        self._step = step

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """`q [1, heads, rows, head_dim]` over the context, this step's `k` and `v` included:
        `[1, rows, heads, head_dim]`."""
        q, k, v = (as_rows(x[0].transpose(0, 1)) for x in (q, k, v))
        batch, cache = self._step.meta[self.kv_group], self._step.caches[self.index]
        self.backend.write_kv(k, v, cache, batch)
        return self.backend.attend(q, cache, batch)[None]

    def rotate_and_attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        norms: tuple[PlainNorm, PlainNorm] | None,
    ) -> torch.Tensor:
        """The same of `[rows, heads, head_dim]` before norms and rotation, to `[rows, heads * head_dim]`.

        Args:
            q, k, v: may be views of one product, and are overwritten.
            angles: as `Step.angles` returns them.
            norms: of each head of queries and keys, or None.
        """
        table, places = angles
        batch, cache = self._step.meta[self.kv_group], self._step.caches[self.index]
        weights: tuple[Any, ...] = ()
        if norms is not None:
            weights = (norms[0].weight, norms[1].weight, norms[0].eps)
        return self.backend.rotate_and_attend(QKV(q, k, v, table, places, *weights), cache, batch).flatten(1)


def served_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    """What Transformers' models call for attention while they run here."""
    return module.octavo_attention.attend(query, key, value), None


class Remainder(Layer):
    """Owns the parameters and buffers of a Transformers model that no layer of ours has taken.

    Args:
        model: the model as built on the meta device, our layers in their places.
        stacks: from a parameter's name and tensor to the targets of its pieces, {} where it is whole.
        ropes: rotary modules that no longer update themselves, with the types that they had.
    """

    def __init__(
        self,
        model: Any,
        stacks: Callable[[str, torch.Tensor], dict[str, LoadTarget]],
        ropes: dict[nn.Module, Any],
    ):
        super().__init__()
        self._model = (model,)
        self._stacks = stacks
        self._ropes = (ropes,)

    def _modules_left(self) -> list[tuple[str, nn.Module]]:
        found = self._model[0].named_modules()
        return [(name, module) for name, module in found if not isinstance(module, Layer)]

    def create_weights(self, build: BuildContext, prefix: str) -> None:
        if build.group.size > 1:
            raise ConfigError(
                f"tensor_parallel_size={build.group.size} is not supported for models that run through "
                "transformers: use 1, or a model of a built-in family"
            )
        exact = self._kept_exact(build.dtype)
        for name, module in self._modules_left():
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    dtype = torch.float32 if exact(f"{name}.{key}") else build.dtype
                    dtype = dtype if parameter.is_floating_point() else parameter.dtype
                    empty = torch.empty(parameter.shape, dtype=dtype, device=build.device)
                    module._parameters[key] = nn.Parameter(empty, requires_grad=False)
            computed = False
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    fill = float("nan") if buffer.is_floating_point() else 0
                    module._buffers[key] = torch.full_like(buffer, fill, device=build.device)
                    computed |= key in module._non_persistent_buffers_set
            if computed and build.device.type != "meta":
                self._compute(name, module)

    def _kept_exact(self, dtype: torch.dtype) -> Any:
        """Which parameters Transformers keeps in float32."""
        model = self._model[0]
        parts = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
        if dtype is torch.float16:
            parts |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
        return lambda name: any(part in name.split(".") for part in parts)

    def _compute(self, name: str, module: nn.Module) -> None:
        """Let the model compute the buffers that a checkpoint doesn't hold, as it does after loading."""
        try:
            with own_type(module, self._ropes[0]):
                self._part_of(name)._init_weights(module)
        except Exception as error:
            raise ModelError(
                f"{type(self._model[0]).__name__} cannot compute the buffers of its {name} "
                f"({first_line(error)}): use another model"
            ) from None
        for key in module._non_persistent_buffers_set:
            buffer = module._buffers.get(key)
            if buffer is not None and buffer.is_floating_point() and not bool(torch.isfinite(buffer).all()):
                raise ConfigError(
                    f"{type(self._model[0]).__name__} does not say how its buffer {name}.{key} is computed: "
                    "use another model"
                )

    def _part_of(self, name: str) -> Any:
        """The innermost of Transformers' models that a module lies in: it knows how to initialize it."""
        part = found = self._model[0]
        for step in name.split("."):
            part = getattr(part, step)
            found = part if hasattr(part, "_init_weights") else found
        return found

    def load_targets(self, prefix: str) -> dict[str, LoadTarget]:
        targets: dict[str, LoadTarget] = {}
        for name, module in self._modules_left():
            dot = f"{name}." if name else ""
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    pieces = self._stacks(dot + key, parameter)
                    plain = {dot + key: LoadTarget(tuple(parameter.shape), copy_into(parameter))}
                    targets |= pieces or plain
            for key, buffer in module._buffers.items():
                if buffer is not None and key not in module._non_persistent_buffers_set:
                    load = partial(_fill, module, key)
                    targets[dot + key] = LoadTarget(tuple(buffer.shape), load)
        return targets


def _fill(module: nn.Module, key: str, tensor: torch.Tensor) -> None:
    buffer = module._buffers[key]
    assert buffer is not None
    buffer.copy_(tensor)
