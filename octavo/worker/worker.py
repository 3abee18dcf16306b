"""A worker: loads its part of the model onto its device, sizes the KV cache, runs steps."""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from octavo.config import EngineConfig
from octavo.errors import ConfigError, RequestError, first_line
from octavo.kernels.cpu import ops as cpu_kernels
from octavo.kv.capacity import token_capacity
from octavo.kv.draft_pages import DraftPages
from octavo.kv.format import KVGroup
from octavo.kv.groups import page_bytes
from octavo.models.eagle3 import Eagle3Head
from octavo.models.interface import CausalLM
from octavo.models.loader import iterate_weights, load_model_config
from octavo.models.loading import build_model, load_targets, load_weights
from octavo.models.locate import ModelSource, configured_model, configured_tokenizer
from octavo.models.mapped_file import release_freed
from octavo.models.pooling_config import pooling_settings
from octavo.models.stage import StagePart, stage_part
from octavo.parallel.stages import StageGroup
from octavo.parallel.state import TensorParallelGroup, tensor_parallel_group, use_group
from octavo.planning.budget import most_blocks, with_slack
from octavo.planning.ledger import Ledger
from octavo.sampling_params import SamplingParams
from octavo.speculative_config import SpeculativeConfig
from octavo.step_messages import ModelFacts, StepPlan
from octavo.tokenization.tokenizer import load_tokenizer
from octavo.worker import kv_scales
from octavo.worker.batch_invariance import check_batch_invariant
from octavo.worker.cache_root import cache_root
from octavo.worker.device import (
    DTYPES,
    check_strictly_kept,
    choose_device,
    choose_dtype,
    choose_kv_dtype,
    choose_quantization,
    set_threads,
)
from octavo.worker.device_errors import noticing_death
from octavo.worker.draft_loading import LoadedDraft, load_draft
from octavo.worker.draft_runner import DraftRunner, attach_draft
from octavo.worker.expert_parallel import expert_parallel
from octavo.worker.first_step import first_step
from octavo.worker.head_loading import load_head
from octavo.worker.head_runner import HeadRunner, attach_head
from octavo.worker.kernel_compiler import KernelCompiler
from octavo.worker.kv_cache import allocate_caches
from octavo.worker.kv_tiers import KVTiers, Launched, prefill_rate
from octavo.worker.memory import kv_budget, measured_ledger, num_blocks
from octavo.worker.model_runner import ModelRunner
from octavo.worker.parking import ParkedTensors
from octavo.worker.pooling_runner import PoolingRunner
from octavo.worker.pretended_gpu import gpu_facts
from octavo.worker.sizes import check_size, most_step_rows, wanted_length
from octavo.worker.stage_link import StageLink
from octavo.worker.stage_runner import StageRunner
from octavo.worker.summary import describe
from octavo.worker.weight_bytes import kept_weight_bytes, step_weight_bytes, weight_tensors

logger = logging.getLogger(__name__)

_PROBE_ROWS = 32  # of a prompt, computed on a CPU to find its rate


class Worker:
    """Owns one device. `facts` says what was loaded and how much fits.

    Raises (on construction):
        ConfigError, ModelError: what cannot be loaded or served, in one line.
    """

    facts: ModelFacts
    group: TensorParallelGroup = tensor_parallel_group()
    stages: StageGroup = StageGroup()
    part: StagePart | None = None  # what this stage has of the model, where there are several
    tiers: KVTiers | None = None
    draft: LoadedDraft | None = None
    draft_runner: DraftRunner | HeadRunner | None = None
    _draft_pages: DraftPages | None = None  # once the cache's size is known
    _parked: ParkedTensors | None = None  # the weights, while a GPU's engine sleeps
    _prefill_rate = 0.0  # tokens per second; measured if there is a host tier

    def __init__(
        self,
        config: EngineConfig,
        compiler: KernelCompiler | None = None,
        group: TensorParallelGroup | None = None,
        stages: StageGroup | None = None,
    ):
        """Load.

        Args:
            group: the ranks that this one shares its layers with; None: there are no others.
            stages: the pipeline stages; None: this one has all layers.
        """
        begin = time.perf_counter()
        if group is not None:
            self.group = group
        if stages is not None:
            self.stages = stages
        device = choose_device(config.device)
        hashing: threading.Thread | None = None
        if device.type == "cuda":
            hashing = threading.Thread(target=_prepare_triton, name="octavo-triton")
            hashing.start()
            if compiler is not None:
                compiler.begin(gpu_facts(device))
        elif compiler is not None:
            compiler.close()
        with use_group(self.group):
            source, wanted, build = self._settle(config, device)
        build = self._take_part(build, wanted)
        threads = set_threads(config, self.device)
        check_size(build, self.group, self.device, config.num_ranks)
        self._load = partial(self._load_model, source, build)
        self._load()
        loaded = time.perf_counter()
        if hashing is not None:
            hashing.join()
            if compiler is not None:
                compiler.wait()
            self.group.minimum(0)  # the first rank's kernels are all ranks'
        compiled = time.perf_counter()
        self._calibrate = partial(self._calibration_tokens, source, wanted)
        ranks = (self.group, self.stages)
        self.kv_scales = kv_scales.settle(self.model, DTYPES[self.dtype], self._calibrate, *ranks)
        self.groups: list[KVGroup] = self.model.kv_groups()
        speculative = config.speculative
        if speculative is not None and speculative.model is not None:
            self.draft = self._load_draft(speculative, source, wanted)
        self._size_cache(wanted)
        root = cache_root(self, source, wanted)
        if self.tiers is not None:
            self.tiers.open_store(root)
        memory = self._measure_memory()
        ready = time.perf_counter()
        self.facts = replace(
            self.facts,
            cache_root=root,
            memory={"total": memory.total, **memory.held},
            step_weight_bytes=step_weight_bytes(self.model),
            summary={
                "model": source.name,
                **describe(self, threads),
                "memory": memory.line(),
                "loading": f"{loaded - begin:.2f} s",
                **({} if compiler is None else {"kernels": f"{compiled - loaded:.2f} s"}),
                "profile and cache": f"{ready - compiled:.2f} s",
            },
        )

    def _settle(
        self, config: EngineConfig, device: torch.device
    ) -> tuple[ModelSource, int, Callable[..., CausalLM]]:
        """Find out what is to be built: the model's files, the context to build for, and what builds it."""
        self.config = config
        self.device = device
        source = configured_model(config)
        self.model_config = load_model_config(source, config.model_impl)
        self.pooling = pooling_settings(config, source, self.model_config)
        if self.pooling is not None and self.stages.size > 1:
            raise ConfigError(
                f"{source.name} makes embeddings, which pipeline_parallel_size={self.stages.size} does not "
                "serve: leave it out, or use tensor_parallel_size"
            )
        if self.pooling is not None and config.speculative is not None:
            raise ConfigError(
                f"speculative_config drafts for models that generate, and {source.name} makes embeddings: "
                "leave it out"
            )
        check_batch_invariant(config, self.device, self.model_config, self.pooling is not None)
        self.dtype = choose_dtype(config.dtype, self.model_config, self.device)
        self.quantization = choose_quantization(
            config.quantization,
            source,
            config.load_format,
            self.device,
            self.model_config,
            self.dtype,
            config.quantization_strict,
        )
        wanted = wanted_length(config, self.model_config, self.pooling)
        self.max_num_batched_tokens = most_step_rows(config, self.device.type)
        build = partial(
            build_model,
            self.model_config,
            dtype=DTYPES[self.dtype],
            attention_backend=config.attention_backend,
            max_model_len=wanted,
            block_size=config.block_size,
            kv_dtype=choose_kv_dtype(config, self.model_config, self.quantization),
            quantization=self.quantization,
            batch_invariant=config.batch_invariant,
            with_head=self.pooling is None,
            expert_parallel=expert_parallel(config, self.model_config),
        )
        return source, wanted, build

    def _take_part(self, build: Callable[..., CausalLM], wanted: int) -> Callable[..., CausalLM]:
        """What builds this stage's part of the model, for a context of `wanted` tokens."""
        if self.stages.size == 1:
            return build
        with use_group(self.group):
            whole = build(device="meta", attention_backend="torch")
        config, place = self.config, (self.stages.stage, self.stages.size)
        self.part = stage_part(whole, *place, config.pp_layer_partition, config.max_num_seqs, wanted)
        return partial(build, part=self.part)

    def _minimum(self, value: int) -> int:
        """The least of all ranks'."""
        return self.stages.minimum(self.group.minimum(value))

    def _load_model(self, source: ModelSource, build: Callable[..., CausalLM]) -> None:
        """Build the model and read its weights."""
        config = self.config
        try:
            with use_group(self.group):
                model = build(device=self.device)
            weights = iterate_weights(
                source,
                self.model_config,
                load_targets(model),
                config.load_format,
                DTYPES[self._given_dtype()],
                self.device,
                progress=self.group.rank == 0 and self.stages.is_last,
                seed=config.seed,
            )
            load_weights(model, weights)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"the weights of {source.name} do not fit on {self.device}: {first_line(error)}"
            ) from None
        if config.quantization_strict:
            check_strictly_kept(model)
        self.model = model

    def _load_draft(self, speculative: SpeculativeConfig, source: ModelSource, wanted: int) -> LoadedDraft:
        sizes = (self.dtype, self.device, wanted)
        if speculative.method == "eagle3":
            return load_head(self.config, speculative, source, self.model_config, self.model, *sizes)
        return load_draft(self.config, speculative, source, self.model_config, *sizes)

    def _given_dtype(self) -> str:
        """The name of the dtype in which weights that are made (random, or decoded) come."""
        random = self.config.load_format == "dummy"
        half = self.quantization is not None and self.quantization.format == "half"
        return self.model_config.dtype if random and half else self.dtype

    def _calibration_tokens(self, source: ModelSource, most: int) -> kv_scales.CalibrationTokens:
        """What the scales of an FP8 cache are calibrated on; there may be models without a tokenizer."""
        vocab = self.model_config.vocab_size
        if self.config.skip_tokenizer_init:
            return kv_scales.random_tokens(vocab, most)
        return kv_scales.text_tokens(load_tokenizer(configured_tokenizer(self.config, source)), vocab, most)

    def execute(self, plan: StepPlan) -> Launched:
        """Launch a step, and the copies of blocks that go with it.

        Raises:
            EngineDeadError: the device can run nothing more.
        """
        with noticing_death():
            if self.tiers is not None:
                return self.tiers.execute(plan, self.runner.execute)
            return self.runner.execute(plan)

    def sleep(self, level: int) -> int:
        """Give back the KV cache, and the weights: at level 1 a GPU's, into host memory (on a CPU they are
        there already, and stay), at level 2 all. Returns the bytes that were freed.

        Raises:
            RequestError: there is a host tier, whose copies are tied to the cache's memory, or a draft model.
        """
        if self.draft is not None:
            raise RequestError("an engine with a draft model cannot sleep: start it without")
        if self.tiers is not None:
            raise RequestError("an engine with swap_space cannot sleep: start it without")
        freed = self.facts.num_blocks * page_bytes(self.groups)
        if level == 1 and self.device.type == "cuda":
            self._parked = ParkedTensors(weight_tensors(self.model))
            freed += self._parked.num_bytes
        self._drain(self.runner)
        del self.runner
        if level == 2:
            freed += sum(kept_weight_bytes(self.model).values())
            del self.model
        self._give_back()
        return freed

    def wake_up(self) -> None:
        """Take the memory again, with an empty KV cache; may be called again if it fails.

        Raises:
            OctavoError, RuntimeError: too little memory, or a checkpoint that cannot be read any more.
        """
        if self._parked is not None:
            self._parked.restore()
            self._parked = None
        if not hasattr(self, "model"):
            self._load()
            ranks = (self.group, self.stages)
            scales = kv_scales.settle(self.model, DTYPES[self.dtype], self._calibrate, *ranks)
            if not kv_scales.restore(self.model, self.kv_scales, scales):
                del self.model
                raise ConfigError("the checkpoint is not what it was at the start: start the engine again")
        if not hasattr(self, "runner"):
            self.runner = self._make_runner(self.facts.num_blocks, self.facts.max_model_len)

    def settle(self) -> None:
        """Let all that passes between pipeline stages arrive; every stage does, after the same steps."""
        if hasattr(self, "runner"):  # awake
            self._drain(self.runner)
        self.stages.flush()

    def _drain(self, runner: ModelRunner | StageRunner | PoolingRunner) -> None:
        """Take in what other stages have sent, before a runner goes or its steps begin anew."""
        if not isinstance(runner, PoolingRunner) and runner.link is not None:
            runner.link.drain()

    def _give_back(self) -> None:
        gc.collect()
        release_freed()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @property
    def graph_bytes(self) -> int:
        """Device memory that recorded steps hold now."""
        if not hasattr(self, "runner"):  # asleep
            return 0
        recorded = [self.runner.graphs, self.runner.recorded]
        if isinstance(self.draft_runner, DraftRunner):
            recorded.append(self.draft_runner.recorded)
        return sum(steps.num_bytes for steps in recorded if steps is not None)

    def close(self) -> None:
        """Free model and cache."""
        if self.tiers is not None:
            self.tiers.close()
        self.draft = self.draft_runner = None
        for name in ("runner", "model"):  # not there while asleep
            self.__dict__.pop(name, None)
        self._give_back()

    # ---- sizes ----------------------------------------------------------------------------------

    def _size_cache(self, wanted: int) -> None:
        """Profile the largest step, allocate the cache, settle `max_model_len`."""
        config = self.config
        self._activations = self._profile(wanted) if self.device.type == "cuda" else 0
        block_bytes = page_bytes(self.groups)
        budget = kv_budget(config, self.device, self._activations, block_bytes, config.num_ranks)
        drafts = [] if self.draft is None else self.draft.groups
        blocks = self._minimum(
            num_blocks(budget, self.groups, most_blocks(config, self.groups, drafts, wanted))
        )
        self._draft_pages = None if self.draft is None else self.draft.pages(self.groups, blocks)
        length = wanted
        capacity = token_capacity(self.groups, blocks, wanted)
        if capacity < wanted:
            if config.max_model_len == "auto":
                length = capacity
                if length < 2:
                    raise ConfigError(f"the KV cache holds {length} tokens: give it more memory")
            else:
                logger.warning(
                    "the KV cache holds %d tokens, fewer than max_model_len=%d: longer requests will be "
                    "refused (give it more memory, or set max_model_len)",
                    capacity,
                    wanted,
                )
        self.facts = ModelFacts(
            max_model_len=length,
            vocab_size=self.model_config.vocab_size,
            groups=self.groups if self.part is None else self.part.groups,
            num_blocks=blocks,
            cache_root=b"",
            overlap=self.device.type == "cuda",
            max_num_batched_tokens=self.max_num_batched_tokens,
            summary={},
            pooling_type=None if self.pooling is None else self.pooling.pooling_type,
            draft_groups=drafts,
            draft_max_model_len=0 if self.draft is None else self.draft.max_model_len,
        )
        self.runner = self._make_runner(blocks, length)
        if self.draft is not None:
            assert isinstance(self.runner, ModelRunner)
            self.draft_runner = self._attach_draft(self.draft, length)
        if config.swap_space:
            self.tiers = self._make_tiers()

    def _attach_draft(self, draft: LoadedDraft, length: int) -> DraftRunner | HeadRunner:
        """Let what drafts follow the runner's steps."""
        pages = self._draft_pages
        assert isinstance(self.runner, ModelRunner) and pages is not None
        requests, rows = self.config.max_num_seqs, self.max_num_batched_tokens
        sizes: dict[str, Any] = dict(max_num_seqs=requests, max_model_len=length, max_rows=rows)
        sizes["records_passes"] = self.runner.graphs is not None and self._recordable(draft.model, "drafts")
        if isinstance(draft.model, Eagle3Head):
            return attach_head(self.runner, draft.model, draft.groups, pages, **sizes)
        assert self.config.speculative is not None
        most, records = self.config.speculative.num_speculative_tokens, self._records_steps()
        return attach_draft(self.runner, draft, pages, most, **sizes, records=records)

    def _make_tiers(self) -> KVTiers:
        """Allocate the host tier; its size and what its copies compete with enter the facts."""
        tiers = KVTiers(self.config, self.runner.kv_caches, self._minimum)
        if self.device.type == "cpu":
            rows = min(_PROBE_ROWS, self.max_num_batched_tokens, self.facts.kv_capacity - 1)
            plan, _ = self.first_step(np.array([rows], np.int32), SamplingParams(max_tokens=1))
            self._prefill_rate = prefill_rate(self.runner.execute, plan, self._minimum)
            self._drain(self.runner)
        self.facts = replace(
            self.facts,
            num_host_blocks=self._minimum(tiers.host.num_slots),
            host_copy_rate=tiers.host.rate_into,
            prefill_rate=self._prefill_rate,
        )
        return tiers

    def _measure_memory(self) -> Ledger:
        """What holds how much, now that everything is there."""
        tables: list[Any] = [self.runner.batch]
        if isinstance(self.runner, ModelRunner):
            tables.append(self.runner.sampling)
        host = 0 if self.tiers is None else self.tiers.host.num_slots * self.tiers.host.page_bytes
        caches, draft = self.runner.kv_caches, None
        if self.draft is not None and self.draft_runner is not None:
            draft = self.draft.model
            caches = [*caches, *self.draft_runner.kv_caches]
            tables.append(self.draft_runner.batch)
        return measured_ledger(self.model, caches, tables, self.device, self._activations, host, draft)

    def _make_runner(self, blocks: int, length: int) -> ModelRunner | StageRunner | PoolingRunner:
        caches = allocate_caches(self.groups, blocks, self.device, self._draft_pages)
        sizes: dict[str, Any] = dict(
            max_num_seqs=self.config.max_num_seqs,
            max_model_len=length,
            max_rows=self.max_num_batched_tokens,
            device=self.device,
        )
        if self.pooling is not None:
            hidden, kind = self.model_config.hidden_size, self.pooling.pooling_type
            return PoolingRunner(
                self.model, self.groups, caches, **sizes, hidden_size=hidden, pooling_type=kind
            )
        repeats: dict[str, Any] = dict(use_graphs=self._uses_graphs(), records=self._records_steps())
        dtype = DTYPES[self.dtype]
        if not self.stages.is_last:
            return StageRunner(self.model, self.groups, caches, self.stages, **sizes, **repeats, dtype=dtype)
        link = None
        if self.stages.size > 1:
            rows = (self.max_num_batched_tokens, self.model_config.hidden_size)
            link = partial(StageLink, self.stages, rows=rows, dtype=dtype, device=self.device)
        return ModelRunner(
            self.model,
            self.groups,
            caches,
            **sizes,
            **repeats,
            vocab_size=self.model_config.vocab_size,
            link=link,
            max_drafts=0
            if self.config.speculative is None
            else self.config.speculative.num_speculative_tokens,
            synthetic_acceptance=self.config.synthetic_acceptance,
        )

    def _records_steps(self) -> bool:
        if (
            self.device.type != "cpu" or self.group.size > 1
        ):  # what ranks tell each other is no kernel of ours
            return False
        return not self.config.enforce_eager and cpu_kernels.available()

    def _uses_graphs(self) -> bool:
        if self.device.type != "cuda" or self.config.enforce_eager:
            return False
        return self._recordable(self.model, "decode steps")

    def _recordable(self, model: CausalLM, what: str) -> bool:
        reason = model.why_no_graphs(DTYPES[self.dtype], self.device)
        if reason is not None:
            logger.info("%s run eagerly: %s", what, reason)
        return reason is None

    def _profile(self, length: int) -> int:
        """Peak bytes of the largest step, beyond what is allocated now: full budget, full sampling."""
        torch.cuda.synchronize(self.device)
        before = torch.cuda.memory_allocated(self.device)
        rows = self.max_num_batched_tokens
        plan, blocks = self.largest_step(length)
        runner = self._make_runner(blocks, length)
        kv_bytes = blocks * page_bytes(self.groups)
        torch.cuda.reset_peak_memory_stats(self.device)
        try:
            runner.execute(plan).wait()
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"a step of max_num_batched_tokens={rows} tokens does not fit on {self.device}: "
                f"{first_line(error)} Lower max_num_batched_tokens or max_num_seqs"
            ) from None
        self._drain(runner)
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device)
        if self.config.swap_space:
            self._prefill_rate = prefill_rate(runner.execute, plan, self._minimum)
            self._drain(runner)
        del runner
        gc.collect()
        return with_slack(peak - before - kv_bytes)

    def largest_step(self, length: int) -> tuple[StepPlan, int]:
        """The step that needs most memory, and how many KV blocks it uses.

        Args:
            length: tokens of the longest context.
        """
        rows = self.max_num_batched_tokens
        requests = min(self.config.max_num_seqs, rows)
        counts = np.full(requests, rows // requests, np.int32)
        counts[: rows % requests] += 1
        # top_p and penalties are the sampling that needs most memory.
        params = SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.1, logprobs=5, max_tokens=1)
        return self.first_step(np.minimum(counts, length - 1), params)

    def first_step(
        self, num_rows: np.ndarray, params: SamplingParams, num_computed: int = 0
    ) -> tuple[StepPlan, int]:
        """A step that admits requests and ends their prompts, and how many KV blocks it uses.

        Args:
            num_rows: int32 `[n]`, rows of each.
            params: of all.
            num_computed: tokens of each that the cache is taken to hold.
        """
        return first_step(self.groups, self.config.block_size, num_rows, params, num_computed)


def _prepare_triton() -> None:
    """What Triton does before its first kernel, beside other work."""
    with contextlib.suppress(ImportError):  # the kernels then are PyTorch's; `octavo.kernels.ops` says so
        from octavo.kernels.triton.compile_pool import prepare_compiler

        prepare_compiler()
