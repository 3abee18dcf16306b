"""Any decoder of Transformers that uses its attention interface, on Octavo's paged attention.

The model is Transformers' own class, built on the meta device from the config. One traced run
(`transformers_trace`) shows its attention layers; then its linear layers, embedding and head give way to
ours, which own how weights are stored, and what remains of its tensors is loaded under its own names.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from octavo.errors import ModelError, first_line
from octavo.layers.attention import AttentionMetadata
from octavo.layers.embedding import VocabEmbedding
from octavo.layers.layer import LoadTarget
from octavo.models import transformers_trace
from octavo.models.absent import replace_module
from octavo.models.aliases import AliasTargets
from octavo.models.config import ModelConfig
from octavo.models.interface import CausalLM
from octavo.models.targets import Targets
from octavo.models.transformers_config import causal_class, hf_config
from octavo.models.transformers_layers import (
    Head,
    PagedAttention,
    Part,
    PlainLinear,
    Remainder,
    SharedInput,
    Step,
    TransposedLinear,
    served_attention,
)
from octavo.models.transformers_names import conversions, expert_targets, renaming
from octavo.models.transformers_rope import FixedRope, stop_updates
from octavo.models.transformers_speed import fuse_attention, fuse_feed_forward, fuse_rotation, our_norm

logger = logging.getLogger(__name__)

_GROUP_NAMES = {("q_proj", "k_proj", "v_proj"): "qkv_proj", ("gate_proj", "up_proj"): "gate_up_proj"}


class TransformersForCausalLM(CausalLM):
    """A decoder of Transformers with its output head.

    Its children are those of Transformers' model, so that its tensors' names are Transformers' too.

    Raises (on construction):
        ModelError: the model cannot run on paged attention; one line says why.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self._step = Step()
        model = _build(config)
        experts = _choose_experts(model, "batched_mm")
        ropes = stop_updates(model)
        linear: tuple[type[nn.Module], ...] = (nn.Linear, *_conv1d())
        trace = transformers_trace.trace_model(model, linear, config.context_length)
        prefix = model.base_model_prefix
        tail = _Tail(trace.output, hasattr(model.base_model, "decoder"))
        _check_tail(model, prefix, tail, config)
        transformers_trace.register(served_attention)
        model.config._attn_implementation = transformers_trace.SERVED
        if experts:
            _choose_experts(model, experts)
        self.has_experts = bool(experts)
        renamings, converters = conversions(model)
        self._rename = renaming(model, renamings)
        self._replace(model, trace)
        # Children in place of the model itself, which would put its name before theirs.
        self._model = (model,)
        self._base = (getattr(model, prefix),)
        for name, child in model.named_children():
            self.add_module(name, child)
        stacks = partial(expert_targets, converters=converters)
        self.add_module("octavo_remainder", Remainder(model, stacks, ropes))
        self.add_module("octavo_fixed_rope", FixedRope(ropes))  # after what it corrects
        self._tail = tail
        self._model_for_logits = (_with_tail(model, prefix, self._tail),)
        for index, layer in enumerate(self.attention_layers()):
            assert isinstance(layer, PagedAttention)
            layer.index = index

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: list[torch.Tensor],
        meta: Sequence[AttentionMetadata],
    ) -> torch.Tensor:
        self._step.start(kv_caches, meta)
        output = self._base[0](input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
        return output.last_hidden_state[0]

    def local_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The model's own forward, from the base model's output on: head, scales and caps."""
        self._tail.hidden = hidden[None]
        return self._model_for_logits[0](inputs_embeds=hidden[None], use_cache=False).logits[0]

    def checkpoint_targets(self, targets: dict[str, LoadTarget]) -> Targets:
        return AliasTargets(targets, self._rename)

    def why_no_graphs(self, dtype: torch.dtype, device: torch.device) -> str | None:
        if self.has_experts and not _grouped_products_stay_on_device(dtype, device):
            return f"the experts of transformers wait for the device in {dtype}"
        return super().why_no_graphs(dtype, device)

    # ---- construction ---------------------------------------------------------------------------

    def _replace(self, model: Any, trace: transformers_trace.Trace) -> None:
        """Put our layers in the places of Transformers'."""
        for attention in trace.attentions:
            attention.module.octavo_attention = PagedAttention(attention, self._step)
        for name, module in list(model.named_modules()):
            if (norm := our_norm(module)) is not None:
                replace_module(model, name, norm)
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        tied = self._tied(model)
        names = {id(module): name for name, module in model.named_modules()}
        if type(embedding) is nn.Embedding:
            ours = VocabEmbedding(embedding.num_embeddings, embedding.embedding_dim)
            replace_module(model, names[id(embedding)], ours)
            embedding = ours
        if type(head) is not nn.Linear:
            raise ModelError(f"{type(model).__name__}: its output head is no linear layer: use another model")
        # Code that looks at a matrix finds none in a layer of ours, which may hold it in any form.
        keep = {name for number, name in names.items() if number in trace.read}
        skip = {names[id(head)], *keep}
        replace_module(
            model,
            names[id(head)],
            Head(head.out_features, head.in_features, embedding if tied else None, head.bias is not None),
        )
        shared = self._share(model, trace, names, skip)
        for name, module in list(model.named_modules()):
            if name in keep:
                continue
            if type(module) is nn.Linear:
                replace_module(
                    model, name, PlainLinear(module.in_features, module.out_features, module.bias is not None)
                )
            elif type(module) in _conv1d():
                replace_module(model, name, TransposedLinear(module.nx, module.nf, bias=True))
        owns = {id(attention.module): attention.rotates_own for attention in trace.attentions}
        for name, module in model.named_modules():
            fuse_feed_forward(module, shared.get(f"{name}.gate_up_proj"))
            if owns.get(id(module)) and not fuse_attention(
                module, shared.get(f"{name}.qkv_proj"), self._step
            ):
                fuse_rotation(module, self._step)

    def _share(
        self, model: Any, trace: transformers_trace.Trace, names: dict[int, str], skip: set[str]
    ) -> dict[str, SharedInput]:
        """Multiply linear layers that read the same tensor as one; returns these by name."""
        found: dict[str, SharedInput] = {}
        for group in transformers_trace.sharing(trace, names):
            modules = {name: model.get_submodule(name) for name in group if name not in skip}
            if len(modules) < 2 or any(type(m) is not nn.Linear for m in modules.values()):
                continue
            biases = {m.bias is not None for m in modules.values()}
            parent = group[0].rpartition(".")[0]
            parts = {name.rpartition(".")[2]: m.out_features for name, m in modules.items()}
            if len(biases) > 1 or not parent:
                continue
            owner = SharedInput(next(iter(modules.values())).in_features, parts, biases.pop())
            own_name = _GROUP_NAMES.get(tuple(parts), "_".join(parts))
            for index, name in enumerate(modules):
                replace_module(model, name, Part(owner, index))
            model.get_submodule(parent).add_module(own_name, owner)
            found[f"{parent}.{own_name}"] = owner
        return found

    def _tied(self, model: Any) -> bool:
        """Whether the head's matrix is the embedding's.

        Raises:
            ModelError: the model ties other tensors.
        """
        config = model.config
        tied = bool(getattr(config.get_text_config(decoder=True), "tie_word_embeddings", False))
        tied = tied or bool(getattr(config, "tie_word_embeddings", False))
        names = {id(module): name for name, module in model.named_modules()}
        head = names.get(id(model.get_output_embeddings()))
        keys = getattr(model, "_tied_weights_keys", None) or {}
        others = [key for key in keys if not key.startswith(f"{head}.")]
        if others:
            raise ModelError(
                f"{type(model).__name__} shares {others[0]} with another tensor: use another model"
            )
        return tied


def _build(config: ModelConfig) -> Any:
    """Transformers' model on the meta device."""
    hf = hf_config(config.extra)
    cls = causal_class(config.architecture, hf)
    if cls is None:
        raise ModelError(
            f"{config.architecture} has no causal output head in transformers: use it for embeddings "
            "(runner='pooling'), or use another model"
        )
    try:
        with torch.device("meta"):
            model = cls._from_config(hf, attn_implementation="eager", dtype=torch.float32)
    except Exception as error:
        raise ModelError(
            f"{config.architecture} cannot be built by transformers: {first_line(error)}"
        ) from None
    model.config.use_cache = False
    return model.eval()


def _conv1d() -> tuple[type[nn.Module], ...]:
    """GPT-2's linear layer."""
    from transformers.pytorch_utils import Conv1D

    kind: type[nn.Module] = Conv1D
    return (kind,)


def _choose_experts(model: Any, implementation: str) -> str | None:
    """Let a mixture of experts compute by `implementation`; returns what it used, None without experts."""
    if not type(model)._can_set_experts_implementation():
        return None
    before = model.config._experts_implementation
    model.set_experts_implementation(implementation)
    return before or "eager"


def _grouped_products_stay_on_device(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether PyTorch's grouped product runs without asking the device for the groups' sizes."""
    if device.type != "cuda":
        return False
    return dtype is torch.bfloat16 and torch.cuda.get_device_capability(device) >= (9, 0)


class _Tail(nn.Module):
    """In place of the base model where only what follows it is wanted: returns given hidden states."""

    hidden: torch.Tensor

    def __init__(self, output: type[Any], has_decoder: bool):
        super().__init__()
        self._output = output
        if has_decoder:  # a head that calls its base's only part
            self.__dict__["decoder"] = self

    def forward(self, *_: Any, **__: Any) -> Any:
        return self._output(last_hidden_state=self.hidden)


def _with_tail(model: Any, prefix: str, tail: _Tail) -> Any:
    """A shallow copy of a model whose base is `tail`; it shares every other module."""
    copy = object.__new__(type(model))
    copy.__dict__ = {**model.__dict__, "_modules": {**model._modules, prefix: tail}}
    return copy


def _check_tail(model: Any, prefix: str, tail: _Tail, config: ModelConfig) -> None:
    """Whether the model's own forward makes logits of given hidden states.

    Raises:
        ModelError: it needs more than these.
    """
    tail.hidden = torch.empty(1, 2, config.hidden_size, device="meta")
    try:
        with torch.no_grad():
            logits = _with_tail(model, prefix, tail)(inputs_embeds=tail.hidden, use_cache=False).logits
    except Exception as error:
        raise ModelError(
            f"{config.architecture}: its logits need more than hidden states ({first_line(error)}): use "
            "another model"
        ) from None
    if logits.shape != (1, 2, config.vocab_size):
        raise ModelError(
            f"{config.architecture} makes logits of shape {list(logits.shape)}, not one row per token: use "
            "another model"
        )
