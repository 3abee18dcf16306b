"""Sampling settings of the running requests, by slot: what the host knows and what the device reads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from octavo.sampling.noise import seed_state
from octavo.sampling_params import SamplingParams
from octavo.step_messages import Admission

# What a slot needs beyond the argmax; the host decides by these, never by looking at the device.
RANDOM = 1  # temperature above 0
LOGPROBS = 2
FILTER = 4  # top_k, top_p or min_p
BIAS = 8
ALLOWED = 16
BAD_WORDS = 32
MIN_TOKENS = 64
PENALTY = 128
GRAMMAR = 256  # a mask comes with each step
PROCESS = BIAS | ALLOWED | BAD_WORDS | MIN_TOKENS | PENALTY

# Columns of the device table, 32 bits each: floats, integers, and in the last two one int64.
TEMPERATURE, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY = range(6)
TOP_K, PROMPT_LEN, MIN_OUTPUT = range(6, 9)
SEED = 5  # counted in int64
_COLUMNS = 12

_FLOAT_BOUND = 1e30  # beyond it float32 arithmetic on logits would meet infinities


@dataclass
class BadWords:
    """Token sequences that may not be completed, flattened.

    Attributes:
        last: int64 `[words]`, the token that completes a word.
        word: int64 `[tokens]`, which word a preceding token belongs to.
        back: int64 `[tokens]`, how far before the new token it must stand (1: directly).
        token: int32 `[tokens]`, the token that must stand there.
    """

    last: np.ndarray
    word: np.ndarray
    back: np.ndarray
    token: np.ndarray


@dataclass
class SlotLists:
    """Settings of one slot that are lists (int64 token ids, float32 values); None where unused."""

    stop_ids: np.ndarray | None = None
    bias_ids: np.ndarray | None = None
    bias_values: np.ndarray | None = None
    allowed_ids: np.ndarray | None = None
    bad_words: BadWords | None = None


class SamplingState:
    """Owns the sampling settings of all slots.

    Host: `flags` (uint16 `[slots]`), `logprobs` (int32 `[slots]`, -1 the whole vocabulary), `lists`,
    and `host`, the mirror of the table. Device: `table`, int32 `[slots, settings]`, whose
    float and int64 columns are bit patterns. Invariant: after `flush`, table and mirror are equal for
    every slot that is in use. On a CPU both are one memory. `version` changes whenever a slot's
    settings do.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, max_model_len: int, device: torch.device | str):
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.device = torch.device(device)
        self.version = 0
        self.flags = np.zeros(max_num_seqs, np.uint16)
        self.logprobs = np.zeros(max_num_seqs, np.int32)
        self.lists: list[SlotLists | None] = [None] * max_num_seqs
        self.host = np.zeros((max_num_seqs, _COLUMNS), np.int32)
        self.host_float = self.host.view(np.float32)
        self._dirty: set[int] = set()
        mirror = torch.from_numpy(self.host)
        self._shared = self.device.type == "cpu"
        self.table = mirror if self._shared else mirror.to(self.device)

    def add(self, admission: Admission) -> None:
        """Take over a request's settings into its slot, replacing the slot's former ones.

        Raises:
            RequestError: a setting names a token outside the vocabulary (the front end checks the
                same with `SamplingParams.check_vocabulary`).
        """
        slot, params = admission.slot, admission.params
        params.check_vocabulary(self.vocab_size)
        lists, flags = self._lists(admission)
        if not params.greedy:
            flags |= RANDOM
            if params.top_k or params.top_p < 1.0 or params.min_p > 0.0:
                flags |= FILTER
        if params.logprobs is not None:
            flags |= LOGPROBS
        if params.structured_outputs is not None:
            flags |= GRAMMAR
        if params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty:
            flags |= PENALTY
        self.flags[slot] = flags
        self.lists[slot] = lists
        self.logprobs[slot] = params.logprobs if params.logprobs is not None else 0
        self._write(slot, params, admission.prompt_len, admission.seed)
        self.version += 1
        if not self._shared:
            self._dirty.add(slot)

    def remove(self, slot: int) -> None:
        """Forget a slot's lists. Optional: `add` overwrites a slot, and unused slots cost nothing."""
        self.flags[slot] = 0
        self.lists[slot] = None
        self.version += 1

    def flush(self) -> None:
        """Bring the device table up to date: one small transfer of the changed slots, without waiting."""
        if not self._dirty:
            return
        slots = np.fromiter(self._dirty, np.int32, len(self._dirty))
        self._dirty.clear()
        # A fresh pinned buffer each time: the mirror may change again while the copy is under way.
        staged = torch.from_numpy(np.concatenate((slots[:, None], self.host[slots]), axis=1))
        staged = staged.pin_memory().to(self.device, non_blocking=True)
        self.table.index_copy_(0, staged[:, 0].long(), staged[:, 1:])

    def _write(self, slot: int, params: SamplingParams, prompt_len: int, seed: int) -> None:
        bound = _FLOAT_BOUND
        self.host_float[slot, :6] = (
            0.0 if params.greedy else min(params.temperature, bound),
            params.top_p,
            params.min_p,
            max(1 / bound, min(params.repetition_penalty, bound)),
            params.presence_penalty,
            params.frequency_penalty,
        )
        self.host[slot, TOP_K] = min(params.top_k, self.vocab_size)
        self.host[slot, PROMPT_LEN] = prompt_len
        self.host[slot, MIN_OUTPUT] = min(params.min_tokens, self.max_model_len)
        self.host.view(np.int64)[slot, SEED] = seed_state(seed)

    def _lists(self, admission: Admission) -> tuple[SlotLists | None, int]:
        params, flags, lists = admission.params, 0, SlotLists()
        if params.min_tokens > 0:
            stops = {*admission.eos_token_ids, *(params.stop_token_ids or ())}
            # A generation config may list ids beyond a trimmed vocabulary: nothing can produce those.
            ids = sorted(token for token in stops if token < self.vocab_size)
            if ids:
                lists.stop_ids = np.array(ids, np.int64)
                flags |= MIN_TOKENS
        if params.logit_bias:
            lists.bias_ids = np.array(list(params.logit_bias), np.int64)
            lists.bias_values = np.array(list(params.logit_bias.values()), np.float32)
            flags |= BIAS
        if params.allowed_token_ids:
            lists.allowed_ids = np.unique(np.array(params.allowed_token_ids, np.int64))
            flags |= ALLOWED
        if admission.bad_words_ids:
            lists.bad_words = _flatten_words(admission.bad_words_ids)
            flags |= BAD_WORDS
        return (lists, flags) if flags else (None, 0)


def _flatten_words(words: list[list[int]]) -> BadWords:
    preceding = [len(word) - 1 for word in words]
    return BadWords(
        last=np.array([word[-1] for word in words], np.int64),
        word=np.repeat(np.arange(len(words)), preceding),
        back=np.concatenate([np.arange(n, 0, -1) for n in preceding]),
        token=np.array([token for word in words for token in word[:-1]], np.int32),
    )
