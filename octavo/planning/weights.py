"""Bytes of a model's weights as the loader will keep them, from its config and its files' headers alone."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from octavo.layers.embedding import LMHead, VocabEmbedding
from octavo.layers.latent_attention_linear import LatentUpProjection
from octavo.layers.layer import Layer, sibling
from octavo.layers.moe import Experts
from octavo.models.config import ModelConfig
from octavo.models.gguf_file import GGUFFile
from octavo.models.gguf_weights import named_tensors
from octavo.models.interface import CausalLM
from octavo.models.loading import load_targets
from octavo.models.locate import ModelSource
from octavo.quantization.embedding_method import embedding_method
from octavo.quantization.experts_method import experts_method
from octavo.quantization.gguf_blocks import ENCODINGS
from octavo.quantization.linear_method import (
    LinearMethod,
    ProductMemory,
    StoredRows,
    cpu_lacks,
    linear_method,
)
from octavo.quantization.scheme import QuantizationConfig, WeightScheme

Stored = dict[str, tuple[tuple[int, ...], str]]
"""Shape and stored type of a checkpoint's tensors, by Hugging Face's names."""

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)(?:\.|$)")


@dataclass
class WeightBytes:
    """Bytes of weights.

    Attributes:
        by_type: by the type that they are kept in: PyTorch's name of a dtype, or GGML's of an encoding,
            or "int8".
        by_part: by where they are: "embedding", "head", "other", and each decoder layer by its number.
        num_parameters: numbers that a checkpoint stores for this rank.
        products: what steps take for products with the layers' matrices: the most of any.
        gates: `gate_copies` of each product of a gate.
    """

    by_type: Counter[str] = field(default_factory=Counter)
    by_part: Counter[str] = field(default_factory=Counter)
    num_parameters: int = 0
    products: ProductMemory = ProductMemory()
    gates: list[int] = field(default_factory=list)

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.by_type.values())

    def add_product(self, memory: ProductMemory, of_gate: bool) -> None:
        """Count what products with a matrix take."""
        if of_gate:
            self.gates.append(memory.gate_copies)
        self.products = ProductMemory(
            gate_copies=max(self.gates, default=ProductMemory.gate_copies),
            codes=max(self.products.codes, memory.codes),
            joined_rows=min(self.products.joined_rows, memory.joined_rows),
        )

    def add(self, name: str, kind: str, nbytes: int) -> None:
        """Count the weights of the module `name`."""
        if nbytes:  # a tied head takes nothing of its own
            self.by_type[kind] += nbytes
        self.by_part[_part(name)] += nbytes


def stored_tensors(source: ModelSource, config: ModelConfig, load_format: str) -> Stored:
    """What a GGUF file stores, by its header; {} for other checkpoints, whose every tensor has the config's
    dtype as far as a plan is concerned."""
    if source.kind != "gguf" or load_format == "dummy":
        return {}
    tensors = named_tensors(GGUFFile(source.path), config)
    return {name: (tuple(tensor.shape), tensor.type_name) for name, tensor in tensors.items()}


def weight_bytes(
    shapes: CausalLM,
    stored: Stored,
    quantization: QuantizationConfig | None,
    dtype: torch.dtype,
    device: torch.device,
    given: str | None = None,
) -> WeightBytes:
    """Bytes of the weights of one rank.

    Args:
        shapes: the rank's model on the meta device, unquantized.
        stored: see `stored_tensors`.
        quantization: as `octavo.models.loading.build_model` takes it.
        dtype: of activations.
        device: where the model will run.
        given: the dtype of tensors that are not in `stored`; None: that of activations.
    """
    out = WeightBytes()
    seen: set[int] = set()
    stored = _by_target(shapes, stored)
    names = {module: name for name, module in shapes.named_modules()}
    for module, name in names.items():
        matrix = module._parameters.get("weight") if _has_method(module) else None
        source = module.tied_to if isinstance(module, LMHead) else None
        if matrix is not None or source is not None:
            assert isinstance(module, Layer)
            _add_matrix(
                out, name, module, source or module, names, stored, given, quantization, dtype, device
            )
        if isinstance(module, Experts) and quantization is not None:
            _add_experts(out, name, module, quantization, dtype, device)
            seen.update(map(id, module.parameters()))
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None or tensor is matrix or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            kind, nbytes = str(tensor.dtype).removeprefix("torch."), tensor.nbytes
            if name.endswith("._stored") and device.type == "cpu" and cpu_lacks(tensor.dtype):
                kind, nbytes = "float32", 4 * tensor.numel()  # see LatentUpProjection
            out.add(name, kind, nbytes)
            if tensor.is_floating_point() and not key.endswith("cos_sin"):
                out.num_parameters += tensor.numel()
    return out


def _add_experts(
    out: WeightBytes,
    name: str,
    layer: Experts,
    quantization: QuantizationConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    names = layer.first_names(name)
    method = experts_method(quantization, name, names)
    sizes = (len(layer.local), layer.hidden_size, layer.shard.size)
    scheme = next((found for n in names.values() if (found := quantization.scheme_for(n)) is not None), None)
    kind = str(dtype).removeprefix("torch.") if scheme is None else scheme.name
    out.add(name, kind, method.kept_bytes(*sizes, dtype, device))
    out.num_parameters += sum(parameter.numel() for parameter in layer.parameters())


def _has_method(module: nn.Module) -> bool:
    """Whether a `LinearMethod` keeps the module's matrix."""
    return isinstance(getattr(module, "method", None), LinearMethod) and not isinstance(
        module, LatentUpProjection
    )


def _add_matrix(
    out: WeightBytes,
    name: str,
    layer: Layer,
    source: Layer,
    names: dict[nn.Module, str],
    stored: Stored,
    given: str | None,
    quantization: QuantizationConfig | None,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    source_parts = getattr(source, "parts", {})
    apart = source_parts if quantization is not None and quantization.rules else {}
    method = linear_method(quantization, name, [sibling(name, part) for part in apart if part])
    if isinstance(layer, (VocabEmbedding, LMHead)):
        method = embedding_method(method)
    rows, columns = source.get_parameter("weight").shape
    kind = str(dtype).removeprefix("torch.")
    parts = _parts(names[source], source, rows, stored, kind if given is None else given)
    if len(apart) > 1:
        parts = [(n, kind) for n in source.local_sizes]  # type: ignore[union-attr]
    if quantization is not None and quantization.format == "half":  # what is encoded otherwise comes expanded
        parts = [(n, kind if type_name in ENCODINGS else type_name) for n, type_name in parts]
    tied = source is not layer
    kept = method.kept_columns(columns, getattr(source, "in_features", columns), device)
    nbytes = (method.tied_bytes if tied else method.kept_bytes)(parts, kept, dtype, device)
    if not isinstance(layer, (VocabEmbedding, LMHead)):
        out.add_product(method.product_memory(parts, kept, dtype, device), "gate_proj" in source_parts)
    if quantization is not None and quantization.format == "int8":
        kind = "int8"
    elif quantization is not None and (scheme := _scheme(quantization, name, apart)) is not None:
        kind = scheme.name
    elif nbytes != rows * columns * dtype.itemsize:
        kind = "+".join(sorted({type_name for _, type_name in parts}))
    out.add(name, kind, nbytes)
    if not tied:
        out.num_parameters += rows * columns


def _scheme(quantization: QuantizationConfig, name: str, apart: Mapping[str, int]) -> WeightScheme | None:
    """The scheme of a layer, that of the first of its matrices."""
    return next(
        (
            found
            for part in (*(sibling(name, part) for part in apart if part), name)
            if (found := quantization.scheme_for(part)) is not None
        ),
        None,
    )


def _by_target(shapes: CausalLM, stored: Stored) -> Stored:
    """The same under the names of the model's own targets, whatever the checkpoint calls them."""
    targets = load_targets(shapes)
    keys = {id(target): key for key, target in targets.items()}
    return {keys[id(targets[name])]: entry for name, entry in stored.items() if name in targets}


def _parts(name: str, layer: Layer, rows: int, stored: Stored, kind: str) -> list[StoredRows]:
    """This rank's rows of each checkpoint tensor that fills the layer's matrix of `rows` rows."""
    found = [stored[key] for key in layer.load_targets(name) if key in stored and len(stored[key][0]) == 2]
    whole = sum(shape[0] for shape, _ in found)
    if not whole:
        return [(rows, kind)]
    return [(shape[0] * rows // whole, type_name) for shape, type_name in found]


def _part(name: str) -> str:
    """The part of a model that a module belongs to."""
    match = _LAYER.search(name)
    if match:
        return match[1]
    last = name.rpartition(".")[2]
    return {"embed_tokens": "embedding", "lm_head": "head"}.get(last, "other")
