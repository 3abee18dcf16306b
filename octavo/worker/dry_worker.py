"""A worker that runs its steps on a pretended GPU: to find out which kernels a real one will launch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from octavo.config import EngineConfig
from octavo.layers.layer import Layer
from octavo.parallel.state import use_group
from octavo.sampling_params import SamplingParams
from octavo.worker.dry_group import DryGroup
from octavo.worker.graphs import DecodeGraphs, Recorded, graph_sizes
from octavo.worker.input_batch import StepInputs
from octavo.worker.model_runner import ModelRunner
from octavo.worker.worker import Worker

_PROMPT = 16  # rows of a short prompt
_MOST_JUDGED = 8  # requests whose drafts are judged in a step that is foreseen; more are rarely drafted for


class DryWorker(Worker):
    """A worker of the settings' model without weights, on the device of `pretended_gpu`, in whose context it
    lives. Its code is the real one's; its steps are those that `first_steps` and `later_steps` say."""

    def __init__(self, config: EngineConfig, device: torch.device):
        ranks = config.tensor_parallel_size
        if ranks > 1:
            self.group = DryGroup(ranks, device, not config.disable_custom_all_reduce)
        with use_group(self.group):
            _, self._length, build = self._settle(config, device)
            self.model = build(device=device)
        for module in self.model.modules():
            if isinstance(module, Layer):
                module.process_after_load()
        self.groups = self.model.kv_groups()

    def first_steps(self) -> Iterator[str]:
        """Run, one by one, what a start runs until its first tokens; yields what each was."""
        plan, blocks = self.largest_step(self._length)
        self.runner = runner = self._make_runner(blocks, self._length)
        runner.execute(plan)
        yield "profile"
        if isinstance(runner, ModelRunner):
            if runner.graphs is not None:
                runner.graphs = _DryGraphs(
                    self.model, runner.batch, runner.kv_caches, self.config.max_num_seqs, self._length
                )
            self._run(1, _PROMPT)
            yield "prompt"
            self._run(1, 1, num_computed=_PROMPT)
            yield "decode 1"

    def later_steps(self) -> Iterator[str]:
        """Run what most steps after these need: decoding of every size that is recorded, and sampling."""
        if not isinstance(self.runner, ModelRunner):
            return
        self._run(1, 1, num_computed=_PROMPT, temperature=1.0)
        yield "sampling"
        for size in graph_sizes(self.config.max_num_seqs):
            if size > 1:
                self._run(size, 1, num_computed=_PROMPT)
                yield f"decode {size}"
        drafts = 0 if self.config.speculative is None else self.config.speculative.num_speculative_tokens
        for size in graph_sizes(min(self.config.max_num_seqs, _MOST_JUDGED)) if drafts else ():
            self._run(size, 1 + drafts, num_computed=_PROMPT, drafts=drafts)
            yield f"judging drafts {size}"

    def _run(
        self, requests: int, rows: int, num_computed: int = 0, temperature: float = 0.0, drafts: int = 0
    ) -> None:
        params = SamplingParams(temperature=temperature, max_tokens=2)
        counts = np.full(requests, min(rows, self._length - 1), np.int32)
        plan, _ = self.first_step(counts, params, min(num_computed, self._length - 1 - rows))
        if drafts:
            plan.num_drafts = counts - 1
            plan.draft_tokens = np.zeros(int(plan.num_drafts.sum()), np.int32)
        self.runner.execute(plan)


class _DryGraphs(DecodeGraphs):
    """Runs every step as the first of its size, and records nothing."""

    def run(self, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
        self._graphs.clear()
        return super().run(inputs)

    def _record(self, inputs: StepInputs) -> Recorded:
        return Recorded(None, inputs.token_ids, inputs.token_ids, self._model.aux_states)
