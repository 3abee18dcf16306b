"""A memory plan: the ledger of a model on a device under given settings, before anything is loaded."""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import torch

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.kv.capacity import blocks_of
from octavo.kv.draft_pages import draft_pages
from octavo.kv.format import KVGroup
from octavo.kv.groups import group_layers, page_bytes, stage_groups
from octavo.models.config import ModelConfig
from octavo.models.interface import CausalLM
from octavo.models.loader import load_model_config
from octavo.models.loading import build_model
from octavo.models.locate import ModelSource, configured_model
from octavo.models.pooling_config import pooling_settings
from octavo.models.stage import step_tokens, token_bytes
from octavo.models.transformers_config import ENCODER
from octavo.parallel.stages import divide_layers, read_partition
from octavo.parallel.state import TensorParallelGroup, use_group
from octavo.planning import budget
from octavo.planning.activations import StepSize
from octavo.planning.cards import Card
from octavo.planning.ledger import KVFit, Ledger, gib, kv_fit
from octavo.planning.weights import Stored, WeightBytes, stored_tensors, weight_bytes
from octavo.quantization.capability import Hardware
from octavo.quantization.checkpoint_method import mode_of
from octavo.quantization.local_hardware import assumed, hardware_of
from octavo.quantization.scheme import QuantizationConfig
from octavo.speculative_config import WHOLE_MODELS
from octavo.worker.device import DTYPES, choose_dtype, choose_kv_dtype, choose_quantization
from octavo.worker.draft_loading import draft_settings
from octavo.worker.graphs import graph_sizes
from octavo.worker.recorded_steps import MOST_ROWS
from octavo.worker.sizes import most_step_rows, wanted_length

# What a CUDA context and PyTorch's libraries take of a card before anything is loaded.
_CONTEXT = 600 * budget.MIB
# What a recorded step takes beside its tensors: the driver's copy of some hundred launches.
_GRAPH = 6 * budget.MIB


@dataclass(frozen=True)
class Machine:
    """Where the model is to run.

    Attributes:
        kind: "cuda" or "cpu".
        name: for people.
        total: bytes of its memory; on a CPU, of the host's.
        other: bytes that are held by others, or will be by the driver, before the model comes.
        card: the card's figures, if it is one of the table's.
        capability: a GPU's compute capability.
    """

    kind: str
    name: str
    total: int
    other: int
    card: Card | None = None
    capability: tuple[int, int] | None = None

    @property
    def device(self) -> torch.device:
        """As PyTorch names it; it needs not be here."""
        return torch.device(self.kind)

    def assumed(self) -> AbstractContextManager[None]:
        """While it lasts, what asks for a GPU's capabilities is told this one's."""
        if self.kind != "cuda" or self.capability is None:
            return nullcontext()
        return assumed(Hardware("cuda", self.capability, name=self.name))


def machine_of(card: Card) -> Machine:
    """A card that is not here, with nothing else running on it."""
    return Machine("cuda", card.name, card.memory, _CONTEXT, card, card.capability)


@dataclass(frozen=True)
class Layout:
    """Parallel sizes: ranks that share each layer, stages that share the layers in turn, replicas."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ConfigError(f"{name}_parallel_size={value} is out of range: give at least 1")

    @property
    def is_served(self) -> bool:
        """Whether an engine of this version runs so."""
        return self.data == 1

    @property
    def num_devices(self) -> int:
        """Devices that it takes."""
        return self.tensor * self.pipeline * self.data


@dataclass(frozen=True)
class DraftPlan:
    """A draft model's part of a plan, on one device.

    Attributes:
        name: what the user called it.
        weights: its bytes by type and by part.
        groups: its KV groups.
        request_bytes: of the KV cache, that a request of the planned length takes for it while it is drafted
            for; 0: there is no room.
    """

    name: str
    weights: WeightBytes
    groups: list[KVGroup]
    request_bytes: int = 0


@dataclass(frozen=True)
class Plan:
    """What was found for one device of the layout (the fullest one).

    Attributes:
        ledger: predicted bytes by kind; where the KV cache gets nothing, what is lacking is told in
            `problem`.
        weights: those of the ledger by type and by part, the draft model's apart.
        fit: what the KV cache holds.
        dtype, quantization, kv_cache_dtype: as the loader will choose them.
        max_model_len: the context that is asked for.
        max_num_batched_tokens: rows of the largest step.
        step: what steps' tensors depend on beside their rows.
        step_seconds: least time of a decode step, in which all weights are read once at the card's
            bandwidth; None where that is not known.
        lacking: bytes that are lacking before there is any KV cache.
        problem: why it does not fit, in one line; None: it does.
        draft: the draft model's part of weights, tables and KV cache, if there is one.
    """

    machine: Machine
    layout: Layout
    ledger: Ledger
    weights: WeightBytes
    fit: KVFit
    dtype: str
    quantization: str | None
    kv_cache_dtype: str
    max_model_len: int
    max_num_batched_tokens: int
    step: StepSize
    step_seconds: float | None = None
    lacking: int = 0
    problem: str | None = None
    draft: DraftPlan | None = None

    @property
    def num_requests(self) -> int:
        """Requests of the planned length that run at once, on all replicas."""
        return self.fit.num_requests * self.layout.data


@dataclass
class Planner:
    """Plans one model, under changing settings. Reads its config, and a GGUF file's header, once.

    Attributes:
        draft_source: where the draft model is that the settings may name; None: found by its name.

    Raises (on construction):
        ModelError: a config that is missing or not supported.
        ConfigError: a model that has no KV cache.
    """

    source: ModelSource
    model_impl: str = "auto"
    draft_source: ModelSource | None = None
    model: ModelConfig = field(init=False)
    _shapes: dict[tuple[object, ...], CausalLM] = field(default_factory=dict)
    _stored: dict[str, Stored] = field(default_factory=dict)
    _draft_planner: Planner | None = None

    def __post_init__(self) -> None:
        self.model = load_model_config(self.source, self.model_impl)
        if self.model.implementation == ENCODER:
            raise ConfigError(
                f"{self.source.name} is an encoder ({self.model.architecture}) and keeps no KV cache: "
                "there is nothing to plan"
            )

    def plan(
        self,
        config: EngineConfig,
        machine: Machine,
        layout: Layout | None = None,
        request_len: int | None = None,
    ) -> Plan:
        """The plan under these settings.

        Args:
            config: the engine's settings; its device and parallel sizes don't matter here.
            request_len: tokens of the requests that are counted; None: the whole context.

        Raises:
            ConfigError: settings that don't fit the model or the device.
        """
        layout = layout or Layout()
        device = machine.device
        dtype = choose_dtype(config.dtype, self.model, device, machine.capability)
        with machine.assumed():
            quantization = choose_quantization(
                config.quantization,
                self.source,
                config.load_format,
                device,
                self.model,
                dtype,
                config.quantization_strict,
            )
        if quantization is not None and not quantization.rules and machine.kind != "cpu":
            raise ConfigError(
                f"quantization={quantization.format!r} runs on a CPU, not on {machine.name}: leave it out"
            )
        wanted = self._length(config)
        if request_len is not None and request_len > wanted:
            raise ConfigError(f"request_len={request_len} is beyond max_model_len={wanted}: lower it")
        rows = most_step_rows(config, machine.kind)
        kv_dtype = choose_kv_dtype(config, self.model, quantization)
        shapes = self._build(config, dtype, wanted, layout.tensor, kv_dtype)
        with machine.assumed():
            weights = self._weights(shapes, config, quantization, dtype, device)
            expands = _expands(quantization, machine.device)
        draft = self._draft(config, dtype, machine, wanted)
        bounds = _stage_bounds(config, weights, shapes, layout.pipeline, wanted)
        groups = _stage_groups(shapes, bounds)
        stage = _stage_weights(weights, bounds)
        held = {"weights": stage + (draft.weights.total if draft else 0), "other": machine.other}
        tables = budget.table_bytes(groups, config.max_num_seqs, wanted, rows)
        if draft is not None:
            tables += budget.draft_table_bytes(draft.groups, config.max_num_seqs, wanted, rows)
        size = StepSize(
            self.model,
            DTYPES[dtype].itemsize,
            layout.tensor,
            config.enable_expert_parallel,
            weights.products,
            machine.kind == "cpu",
        )
        step = size.step_bytes(rows, min(config.max_num_seqs, rows))
        if expands:
            step += size.expanded_bytes()
        sharing = layout.num_devices if machine.kind == "cpu" else 1  # ranks that share the memory
        held["other"] += (sharing - 1) * held["weights"]
        free = machine.total - held["other"] - held["weights"]
        kv, reserved = _kv_bytes(config, machine, free, tables + step, page_bytes(groups), sharing)
        most = budget.most_blocks(config, groups, [] if draft is None else draft.groups, wanted)
        blocks = budget.affordable_blocks(groups, kv, most)
        limit = self.model.context_length
        fit = kv_fit(groups, blocks, request_len or wanted, limit)
        held |= {
            "tables": tables,
            "activations": max(step, reserved - tables),
            "kv_cache": blocks * page_bytes(groups),
        }
        if not config.enforce_eager:
            held["graphs"] = self._recorded_bytes(config, size, None if draft is None else draft.weights)
        held["free"] = machine.total - sum(held.values())
        if config.swap_space:
            held["host_cache"] = int(config.swap_space * budget.GIB)
        problem = _problem(config, held["weights"], free, kv, groups, fit, wanted)
        left = free - sharing * held["kv_cache"]
        if problem is None and machine.kind == "cpu" and sharing * held.get("host_cache", 0) > left:
            each = f" on each of {sharing} ranks" if sharing > 1 else ""
            problem = f"swap_space={config.swap_space:g} GiB{each} is more than the {gib(left)} that are left"
        if draft is not None:
            draft = _with_room(draft, groups, blocks, fit.request_len)
            if problem is None and not draft.request_bytes:
                problem = (
                    f"the KV cache of {gib(kv)} has no room for that of the draft model {draft.name}, of "
                    f"which one block needs {gib(page_bytes(draft.groups))}"
                )
        bandwidth = machine.card.bandwidth if machine.card is not None else None
        return Plan(
            machine=machine,
            layout=layout,
            ledger=Ledger(machine.total, held),
            weights=weights,
            fit=fit,
            dtype=dtype,
            quantization=None if quantization is None else quantization.title,
            kv_cache_dtype=groups[0].format.dtype,
            max_model_len=wanted,
            max_num_batched_tokens=rows,
            step=size,
            step_seconds=stage / bandwidth if bandwidth else None,
            lacking=max(0, -kv),
            problem=problem,
            draft=draft,
        )

    def _draft(self, config: EngineConfig, dtype: str, machine: Machine, wanted: int) -> DraftPlan | None:
        """The draft model that the settings name, still without room for KV. Every rank holds it whole."""
        speculative = config.speculative
        if speculative is None or speculative.model is None:
            return None
        if speculative.method not in WHOLE_MODELS:
            raise ConfigError(
                f"method={speculative.method!r} is not planned, only {' and '.join(WHOLE_MODELS)} are: plan "
                "without it, and leave room for the head"
            )
        own = draft_settings(config, speculative)
        if self._draft_planner is None or self._draft_planner.source.name != speculative.model:
            source = self.draft_source or configured_model(own)
            self._draft_planner = Planner(source, config.model_impl)
        planner = self._draft_planner
        with machine.assumed():
            quantization = choose_quantization(
                own.quantization,
                planner.source,
                own.load_format,
                machine.device,
                planner.model,
                dtype,
                own.quantization_strict,
            )
            length = min(wanted, planner.model.context_length)
            shapes = planner._build(own, dtype, length, 1, own.kv_cache_dtype)
            weights = planner._weights(shapes, own, quantization, dtype, machine.device)
        return DraftPlan(planner.source.name, weights, shapes.kv_groups())

    def _length(self, config: EngineConfig) -> int:
        """The context to build for, as the worker chooses it."""
        return wanted_length(config, self.model, pooling_settings(config, self.source, self.model))

    def _build(self, config: EngineConfig, dtype: str, length: int, ranks: int, kv_dtype: str) -> CausalLM:
        """The model's shapes on one rank; unquantized, since weights are counted by their methods."""
        whole_experts = config.enable_expert_parallel
        key = (dtype, length, config.block_size, kv_dtype, ranks, whole_experts)
        if key not in self._shapes:
            with use_group(TensorParallelGroup(0, ranks)):
                self._shapes[key] = build_model(
                    self.model,
                    dtype=DTYPES[dtype],
                    device="meta",
                    attention_backend="torch",
                    max_model_len=length,
                    block_size=config.block_size,
                    kv_dtype=kv_dtype,
                    with_head=pooling_settings(config, self.source, self.model) is None,
                    expert_parallel=whole_experts,
                )
        return self._shapes[key]

    def _weights(
        self,
        shapes: CausalLM,
        config: EngineConfig,
        quantization: QuantizationConfig | None,
        dtype: str,
        device: torch.device,
    ) -> WeightBytes:
        if config.load_format not in self._stored:
            self._stored[config.load_format] = stored_tensors(self.source, self.model, config.load_format)
        half = quantization is not None and "half" in (quantization.format, quantization.dense)
        given = self.model.dtype if half else None
        return weight_bytes(
            shapes, self._stored[config.load_format], quantization, DTYPES[dtype], device, given
        )

    def _recorded_bytes(self, config: EngineConfig, size: StepSize, draft: WeightBytes | None) -> int:
        """Of recorded decode steps: CUDA graphs, or on a CPU of one rank what is run again."""
        if not size.on_cpu:
            return self._graph_bytes(config, size)
        if size.ranks > 1:
            return 0
        rows = MOST_ROWS if config.speculative is not None else min(config.max_num_seqs, MOST_ROWS)
        nbytes = size.recorded_bytes(rows)
        if draft is not None and self._draft_planner is not None:
            of_draft = replace(size, model=self._draft_planner.model, products=draft.products)
            nbytes += of_draft.recorded_bytes(rows)
        return nbytes

    def _graph_bytes(self, config: EngineConfig, size: StepSize) -> int:
        sizes = graph_sizes(config.max_num_seqs)
        logits = sum(sizes) * self.model.vocab_size * size.itemsize
        return logits + size.step_bytes(sizes[-1], 0) + len(sizes) * _GRAPH


def _kv_bytes(
    config: EngineConfig, machine: Machine, free: int, step: int, block_bytes: int, sharing: int
) -> tuple[int, int]:
    """Bytes of the KV cache (negative if nothing is left), and those that are kept for a step.

    Args:
        sharing: ranks that share a CPU's memory.
    """
    reserved = budget.with_slack(step) if machine.kind == "cuda" else 0
    stated = budget.stated_kv_bytes(config, block_bytes)
    if stated is not None:
        left, asked = free - reserved, stated[1]
        return (asked if asked * sharing <= left else left - asked * sharing), reserved
    if machine.kind == "cpu":
        return budget.cpu_kv_bytes(free, config.cpu_memory_utilization / sharing), reserved
    left = budget.gpu_kv_bytes(machine.total, free, config.gpu_memory_utilization, reserved)
    return left, reserved


def _with_room(draft: DraftPlan, groups: list[KVGroup], num_blocks: int, request_len: int) -> DraftPlan:
    """The same with what a request of so many tokens takes for it of a pool of so many blocks."""
    pages = draft_pages(groups, draft.groups, num_blocks)
    if not pages.blocks or num_blocks < len(groups) + pages.run:
        return draft
    blocks = blocks_of(request_len, draft.groups[0].format.block_size) * len(draft.groups)
    return replace(draft, request_bytes=pages.pages_for(blocks) * page_bytes(groups))


def _expands(quantization: QuantizationConfig | None, device: torch.device) -> bool:
    """Whether a device multiplies many rows with matrices that it expands (`octavo.kernels.triton`)."""
    if quantization is None or device.type != "cuda":
        return False
    modes = [mode_of(quantization, scheme, hardware_of(device)).mode for scheme in quantization.schemes]
    return "W8A16" in modes or "W4A16" in modes


def _stage_bounds(
    config: EngineConfig, weights: WeightBytes, shapes: CausalLM, stages: int, wanted: int
) -> tuple[int, ...]:
    """How the layers are divided among a pipeline's stages (`octavo.parallel.stages.Stage.bounds`), as
    `octavo.models.stage.stage_part` does it."""
    layers = shapes.attention_layers()
    if config.pp_layer_partition is not None and stages > 1:
        return read_partition(config.pp_layer_partition, len(layers), stages)
    parts, tokens = weights.by_part, step_tokens(config.max_num_seqs, stages, wanted)
    costs = [parts[str(number)] + tokens * token_bytes(layer) for number, layer in enumerate(layers)]
    return divide_layers(costs, parts["head"] or parts["embedding"], stages)


def _stage_groups(shapes: CausalLM, bounds: tuple[int, ...]) -> list[KVGroup]:
    """The KV groups of that of the pipeline's stages whose blocks take most."""
    layers = [(layer.sliding_window, layer.fmt) for layer in shapes.attention_layers()]
    groups = group_layers(layers, bounds)
    return max((stage_groups(groups, range(*pair)) for pair in itertools.pairwise(bounds)), key=page_bytes)


def _stage_weights(weights: WeightBytes, bounds: tuple[int, ...]) -> int:
    """Bytes of the heaviest of the pipeline's stages: the first has the embedding too, the last the head."""
    if len(bounds) == 2:
        return weights.total
    parts, totals = weights.by_part, []
    for first, stop in itertools.pairwise(bounds):
        stage = sum(parts[str(layer)] for layer in range(first, stop)) + parts["other"]
        stage += parts["embedding"] if first == 0 else 0
        if stop == bounds[-1]:
            stage += parts["head"] or parts["embedding"]  # a tied head is a copy there
        totals.append(stage)
    return max(totals)


def _problem(
    config: EngineConfig,
    weights: int,
    free: int,
    kv: int,
    groups: list[KVGroup],
    fit: KVFit,
    wanted: int,
) -> str | None:
    """Why a plan does not fit, in one line."""
    if free < 0:
        return f"the weights need {gib(weights)} and {gib(weights + free)} are free"
    if not fit.num_blocks:
        if kv <= 0:
            return f"nothing is left for the KV cache: {gib(-kv)} are lacking"
        return f"the KV cache gets {gib(kv)}, less than one block of {gib(page_bytes(groups))} for each group"
    if not fit.num_requests:
        return f"no request of {fit.request_len} tokens fits: the KV cache holds one of {fit.longest} at most"
    if config.max_model_len != "auto" and fit.longest < wanted:
        return f"the KV cache holds a context of {fit.longest} tokens, not of {wanted}"
    return None
