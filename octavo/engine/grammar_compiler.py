"""Compiling the forms of outputs beside the core's loop: who waits for a grammar holds nothing."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from octavo.config import EngineConfig
from octavo.engine.grammar_run import GrammarRun
from octavo.errors import OctavoError, RequestError
from octavo.messages import CoreRequest
from octavo.sampling.structured.backend import Backend, Grammar, Vocabulary
from octavo.structured_outputs import FormKey, StructuredOutputsParams

COMPILE_SECONDS = 15.0
"""A form that takes longer is refused. (Its thread goes on to its end: nothing can stop it.)"""

_FIELD = "structured_outputs"
_MAX_CACHED = 256
_MAX_CACHED_TEXT = 8 << 20  # characters of the forms in the cache, to which their grammars' memory is related
_THREADS = 4


@dataclass(eq=False)
class _Compilation:
    """One form under way, the requests that wait for it, and when it is given up (`time.monotonic`)."""

    future: Future[Grammar]
    deadline: float
    timer: threading.Timer
    requests: list[CoreRequest] = field(default_factory=list)


@dataclass(frozen=True)
class Compiled:
    """A request that waits no longer: `run` is its way through its grammar, or `error` says why there is
    none."""

    request: CoreRequest
    run: GrammarRun | None
    error: OctavoError | None = None


class GrammarCompiler:
    """Owns the threads that compile and make masks, and the grammars that were compiled last.

    All methods but `notify` are called on the core's thread.

    Attributes:
        notify: called, on any thread, when `take` has something new.
    """

    def __init__(self, config: EngineConfig, vocab_size: int):
        self.notify: Callable[[], None] = lambda: None
        self._config, self._vocab_size = config, vocab_size
        self._backend: Backend | None = None
        self._backend_lock = threading.Lock()
        self._cache: collections.OrderedDict[FormKey, Grammar] = collections.OrderedDict()
        self._cached_text = 0
        self._under_way: dict[FormKey, _Compilation] = {}
        # Threads are started when they are needed. Masks have their own: no schema holds them up.
        self._compilers = ThreadPoolExecutor(_THREADS, "octavo-grammar")
        self._masks = ThreadPoolExecutor(_THREADS, "octavo-mask")

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their grammars."""
        return sum(len(compilation.requests) for compilation in self._under_way.values())

    def begin(self, request: CoreRequest) -> GrammarRun | None:
        """Compile a request's form; its run if that was done before, else it waits for `take`."""
        params = request.params.structured_outputs
        assert params is not None
        key = params.key
        grammar = self._cache.get(key)
        if grammar is not None:
            self._cache.move_to_end(key)
            return GrammarRun(grammar, self._masks)
        compilation = self._under_way.get(key)
        if compilation is None:
            timer = threading.Timer(COMPILE_SECONDS, lambda: self.notify())
            timer.daemon = True
            future = self._compilers.submit(self._compile, params)
            compilation = _Compilation(future, time.monotonic() + COMPILE_SECONDS, timer)
            self._under_way[key] = compilation
            timer.start()
            future.add_done_callback(lambda _: self.notify())
        compilation.requests.append(request)
        return None

    def take(self) -> list[Compiled]:
        """Requests whose wait is over since the last call."""
        over: list[Compiled] = []
        now = time.monotonic()
        for key, compilation in list(self._under_way.items()):
            if not compilation.future.done() and now < compilation.deadline:
                continue
            del self._under_way[key]
            compilation.timer.cancel()
            outcome = self._outcome(key, compilation.future)
            for request in compilation.requests:
                if isinstance(outcome, OctavoError):
                    over.append(Compiled(request, None, outcome))
                else:
                    over.append(Compiled(request, GrammarRun(outcome, self._masks)))
        return over

    def abort(self, request_ids: Iterable[str]) -> list[str]:
        """Requests of these that wait here are forgotten; their ids."""
        gone = set(request_ids)
        found = []
        for compilation in self._under_way.values():
            found += [r.request_id for r in compilation.requests if r.request_id in gone]
            compilation.requests = [r for r in compilation.requests if r.request_id not in gone]
        return found

    def close(self) -> None:
        """End the threads once they are through with what they do now."""
        for compilation in self._under_way.values():
            compilation.timer.cancel()
        self._compilers.shutdown(wait=False, cancel_futures=True)
        self._masks.shutdown(wait=False, cancel_futures=True)

    def _outcome(self, key: FormKey, future: Future[Grammar]) -> Grammar | OctavoError:
        if not future.done():
            future.cancel()
            return RequestError(
                f"{_FIELD} was not compiled within {COMPILE_SECONDS:g} s: simplify it, or send it again if "
                "many others were sent at the same time",
                _FIELD,
            )
        error = future.exception()
        if isinstance(error, OctavoError):
            return error
        if error is not None:
            return RequestError(f"{_FIELD} cannot be compiled: {' '.join(str(error).split())[:200]}", _FIELD)
        grammar = future.result()
        self._cache[key] = grammar
        self._cached_text += len(key[1])
        while len(self._cache) > _MAX_CACHED or (
            self._cached_text > _MAX_CACHED_TEXT and len(self._cache) > 1
        ):
            oldest, _ = self._cache.popitem(last=False)
            self._cached_text -= len(oldest[1])
        return grammar

    def _compile(self, params: StructuredOutputsParams) -> Grammar:
        with self._backend_lock:
            if self._backend is None:
                self._backend = self._make_backend()
        return self._backend.compile(params)

    def _make_backend(self) -> Backend:
        from octavo.sampling.structured.llguidance_backend import LLGuidanceBackend

        return LLGuidanceBackend(load_vocabulary(self._config, self._vocab_size))


def load_vocabulary(config: EngineConfig, vocab_size: int) -> Vocabulary:
    """The tokens of the settings' model.

    Raises:
        ModelError: its tokenizer cannot be read.
    """
    from octavo.engine.input_processor import end_tokens
    from octavo.models.loader import load_model_config
    from octavo.models.locate import configured_model, configured_tokenizer
    from octavo.tokenization.tokenizer import load_tokenizer

    source = configured_model(config)
    tokenizer = load_tokenizer(configured_tokenizer(config, source))
    model = load_model_config(source, config.model_impl)
    table = tokenizer.byte_table(False)
    known = min(vocab_size, tokenizer.vocab_size)
    return Vocabulary(
        tokens=[table[i] for i in range(known)] + [b""] * (vocab_size - known),
        special_ids=[i for i in tokenizer.all_special_ids if i < vocab_size],
        eos_ids=[i for i in end_tokens(model, tokenizer) if 0 <= i < vocab_size],
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
    )
