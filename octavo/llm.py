"""The offline face: one model, many prompts, results when they are done."""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from octavo.batch_arguments import as_prompts, one_each
from octavo.config import EngineConfig, make_config
from octavo.engine.client import ThreadClient
from octavo.engine.embedding_input import EmbeddingInput
from octavo.engine.embedding_output import PreparedEmbedding
from octavo.engine.input_processor import InputProcessor, PreparedRequest, Prompt
from octavo.engine.output_processor import outputs_for
from octavo.errors import (
    EngineAsleepError,
    EngineDeadError,
    OctavoError,
    RequestError,
    RequestFailedError,
)
from octavo.messages import (
    AbortRequests,
    AddRequests,
    CoreOutputs,
    CoreStats,
    ProfileStatus,
    ResetPrefixCache,
    Sleep,
    SleepStatus,
    StartProfile,
    StopProfile,
    ToCore,
    WakeUp,
)
from octavo.outputs import EmbeddingRequestOutput, RequestOutput
from octavo.pooling_params import PoolingParams
from octavo.progress import request_bar
from octavo.sampling_params import RequestOutputKind, SamplingParams
from octavo.step_messages import ModelFacts
from octavo.tokenization.chat_template import load_chat_template
from octavo.tokenization.tokenizer import Tokenizer

Message = dict[str, Any]


@dataclass(frozen=True)
class ScoreOutput:
    """How likely a model finds a continuation.

    Attributes:
        logprob: natural logarithm of the probability of all its tokens after the prompt.
        token_logprobs: of each token.
        is_greedy: whether every token is the likeliest at its place.
        token_ids: the continuation's tokens.
    """

    logprob: float
    token_logprobs: list[float]
    is_greedy: bool
    token_ids: list[int]


class LLM:
    """A model loaded for offline use. Keyword arguments are the settings of `EngineConfig`.

    The engine core runs on a thread of this process; tokenization and detokenization on the caller's.
    Use it as a context manager, or call `close`, to free the device.

    Raises:
        ConfigError: a setting that is wrong or not supported.
        ModelError: a model that cannot be loaded.
    """

    def __init__(self, model: str | None = None, **settings: Any):
        self.config: EngineConfig = make_config(EngineConfig, {"model": model, **settings})
        template = self.config.chat_template
        self._chat_template = load_chat_template(template) if template else None
        self._processor = InputProcessor(self.config)
        self._news: queue.SimpleQueue[CoreOutputs | EngineDeadError] = queue.SimpleQueue()
        self._client = ThreadClient(self._processor.config, self._news.put, self._news.put)
        self._close = weakref.finalize(self, self._client.close)
        self._processor.facts = self._client.facts
        self._embedding_input = EmbeddingInput(self._processor)
        self._outputs = outputs_for(self._processor)
        self._stats = CoreStats(kv_blocks_total=self._client.facts.num_blocks)
        self._names = iter(range(1 << 62))
        self._asleep = False
        self._files: weakref.finalize | None = None  # removes what was written for the engine alone
        self._lock = threading.Lock()  # one call at a time
        self._holder: int | None = None  # the thread whose call it is

    @classmethod
    def from_transformers(
        cls, model: Any, tokenizer: Any = None, assistant_model: Any = None, **settings: Any
    ) -> LLM:
        """A model that Transformers has loaded, without its files.

        Matrices that Octavo uses as they are stay where they are, shared with the module: don't change
        either. Those that it merges (query, key and value; gate and up), repacks for the device or has in
        another type are copied. The module itself is not needed any more.

        Args:
            model: a causal `PreTrainedModel` with its config, on the device that it shall run on.
            tokenizer: Transformers' tokenizer of it; None: work with token ids alone.
            assistant_model: a smaller one of the same vocabulary that drafts for it, as `generate` takes it;
                `num_speculative_tokens` and other fields of `speculative_config` are settings.
            settings: as `LLM(...)` takes them, but for `model`, `tokenizer` and `speculative_model`.

        Raises:
            ConfigError: no model of Transformers, quantized, without contents or not on one device, or a
                setting that is wrong.
            ModelError: an architecture that is not supported.
        """
        from octavo.models.transformers_modules import GivenModules

        given = GivenModules(model, tokenizer, assistant_model, settings)
        try:
            llm = cls(**given.settings)
        except BaseException:
            given.remove()
            raise
        finally:
            given.release()
        llm._files = weakref.finalize(llm, given.remove)
        return llm

    # ---- generation -----------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: Any = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts.

        Args:
            prompts: one text, one list of token ids, or a list of either (or of dictionaries with
                `prompt` or `prompt_token_ids`, and `cache_salt`).
            sampling_params: one for all or one each; None takes the model's defaults.
            use_tqdm: show progress.
            lora_request: not supported yet: refused.
            priority: one each, lower first, under the priority policy.

        Returns:
            One result per prompt, in order.

        Raises:
            RequestError: a prompt or setting is wrong; nothing was started.
            RequestFailedError: a step failed.
            EngineDeadError: the engine has ended.
        """
        batch = as_prompts(prompts)
        params = self._params_for(len(batch), sampling_params)
        if priority is not None and len(priority) != len(batch):
            raise RequestError(
                f"{len(priority)} priorities for {len(batch)} prompts: give one each", "priority"
            )
        with self._turn():
            prepared = [
                self._processor.prepare(
                    prompt,
                    p.clone(output_kind=RequestOutputKind.FINAL_ONLY),
                    str(next(self._names)),
                    priority=0 if priority is None else priority[i],
                    lora_request=lora_request,
                )
                for i, (prompt, p) in enumerate(zip(batch, params, strict=True))
            ]
            return self._run_all(prepared, use_tqdm)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Complete one prompt, yielding what is new as it comes. Closing the iterator ends the request.

        While it is open, other calls of the same thread are refused, and those of other threads wait.

        Raises:
            As `generate`.
        """
        params = self._params_for(1, sampling_params)[0].clone(output_kind=RequestOutputKind.DELTA)
        with self._turn():
            yield from self._run([self._processor.prepare(prompt, params, str(next(self._names)))])

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: Any = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, rendered by the model's chat template.

        Args:
            messages: `[{"role": …, "content": …}, …]`, or a list of such conversations.
            chat_template: a template in place of the model's.
            add_generation_prompt: end with the header of the assistant's turn.
            continue_final_message: continue the last message instead of answering it.
            tools: descriptions that the template may show to the model.
            chat_template_kwargs: further names for the template.

        The other arguments, results and errors are those of `generate`.
        """
        if isinstance(messages, str) or not isinstance(messages, Sequence):
            raise RequestError(
                f"messages is {type(messages).__name__}: give a list of messages with a role and a content",
                "messages",
            )
        conversations = cast(
            "list[Sequence[Message]]",
            [messages] if messages and isinstance(messages[0], dict) else list(messages),
        )
        prompts = [
            self.render_chat(
                conversation,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                **(chat_template_kwargs or {}),
            )
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm, lora_request)

    def render_chat(self, messages: Sequence[Message], **kwargs: Any) -> dict[str, Any]:
        """A conversation as a prompt (text and its token ids) for `generate` or `stream`."""
        tokenizer = self._processor.need_tokenizer("chat")
        kwargs["chat_template"] = kwargs.get("chat_template") or self._chat_template
        text = tokenizer.apply_chat_template(messages, **kwargs)
        return {"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}

    def score(
        self,
        prompts: Prompt | Sequence[Prompt],
        continuations: Prompt | Sequence[Prompt],
        use_tqdm: bool = True,
    ) -> list[ScoreOutput]:
        """Log-probability of each continuation after its prompt (or all after one prompt).

        Args:
            prompts: one, or one per continuation; text or token ids.
            continuations: text (tokenized on its own, without special tokens) or token ids.
            use_tqdm: show progress.

        Raises:
            As `generate`.
        """
        heads, tails = as_prompts(prompts), as_prompts(continuations)
        if len(heads) == 1:
            heads = heads * len(tails)
        if len(heads) != len(tails):
            raise RequestError(f"{len(heads)} prompts for {len(tails)} continuations: give one, or one each")
        head_ids = [self._ids(prompt, special=True) for prompt in heads]
        tail_ids = [self._ids(text, special=False) for text in tails]
        if not all(head_ids) or not all(tail_ids):
            raise RequestError("a prompt or continuation is empty: give at least one token", "prompt")
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        outputs = self.generate([h + t for h, t in zip(head_ids, tail_ids, strict=True)], params, use_tqdm)
        results = []
        for output, head, tail in zip(outputs, head_ids, tail_ids, strict=True):
            assert output.prompt_logprobs is not None
            entries = [
                cast(dict, e)[t] for e, t in zip(output.prompt_logprobs[len(head) :], tail, strict=True)
            ]
            values = [entry.logprob for entry in entries]
            results.append(ScoreOutput(sum(values), values, all(entry.rank == 1 for entry in entries), tail))
        return results

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        prompt_name: str | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Embed texts.

        Args:
            prompts: one text, one list of token ids, or a list of either (or of dictionaries with
                `prompt` or `prompt_token_ids`).
            truncate_prompt_tokens: tokens of a text's beginning that are read, -1 for as many as the
                model takes; None refuses longer texts.
            use_tqdm: show progress.
            pooling_params: dimensions and normalization, one for all or one each.
            prompt_name: which of the model's own prompts is put before each text ("query", …); None: its
                default, if it has one.

        Returns:
            One result per text, in order; `outputs.embedding` is a list of float32 values.

        Raises:
            RequestError: the model makes texts, or a text or setting is wrong; nothing was started.
            RequestFailedError: a step failed.
            EngineDeadError: the engine has ended.
        """
        batch = as_prompts(prompts)
        given = PoolingParams() if pooling_params is None else pooling_params
        params = one_each("pooling_params", given, PoolingParams, len(batch), "texts")
        if truncate_prompt_tokens is not None:
            changed = {"truncate_prompt_tokens": truncate_prompt_tokens}
            params = [PoolingParams(**{**msgspec.structs.asdict(p), **changed}) for p in params]
        with self._turn():
            prepared = [
                self._embedding_input.prepare(prompt, p, str(next(self._names)), prompt_name=prompt_name)
                for prompt, p in zip(batch, params, strict=True)
            ]
            return self._run_all(prepared, use_tqdm)

    # ---- the rest -------------------------------------------------------------------------------

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            RequestError: there is none, because of `skip_tokenizer_init`.
        """
        return self._processor.need_tokenizer("get_tokenizer")

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's own sampling settings."""
        return self._processor.default_params()

    @property
    def facts(self) -> ModelFacts:
        """What was loaded and how much fits."""
        return self._client.facts

    def stats(self) -> CoreStats:
        """Gauges and counters after the last call."""
        return self._stats

    def reset_prefix_cache(self) -> None:
        """Forget all cached blocks."""
        self._client.send(ResetPrefixCache())

    def sleep(self, level: int = 1) -> SleepStatus:
        """Give memory back until `wake_up`; what is cached is forgotten.

        Args:
            level: 1 gives back the KV cache and a GPU's weights, which host memory keeps; 2 all weights,
                which `wake_up` reads from the checkpoint again.

        Raises:
            RequestError: it sleeps already, or cannot.
            EngineDeadError: the engine has ended.
        """
        if level == 2 and self._files is not None:
            raise RequestError("level=2 reads weights again, and modules of Transformers are no files: use 1")
        status = cast("SleepStatus", self._ask(Sleep(level), "sleep"))
        if status.error is not None:
            raise RequestError(status.error)
        self._asleep = True
        return status

    def wake_up(self) -> SleepStatus:
        """Take the memory again.

        Raises:
            RequestError: it is awake.
            RequestFailedError: it cannot wake up, and sleeps on.
            EngineDeadError: the engine has ended.
        """
        if not self._asleep:
            raise RequestError("the engine is awake")
        status = cast("SleepStatus", self._ask(WakeUp(), "sleep"))
        if status.error is not None:
            raise RequestFailedError(status.error)
        self._asleep = False
        return status

    def start_profile(self) -> None:
        """Record the next steps, at most `profiler_max_iterations`, for a trace in `torch_profiler_dir`.

        Raises:
            RequestError: no such folder is set, or a profile is under way.
            EngineDeadError: the engine has ended.
        """
        self._profile(StartProfile())

    def stop_profile(self) -> ProfileStatus:
        """End the profile and write it: the trace, and a page beside it that sums it up.

        Raises:
            RequestError: nothing was recorded, or it cannot be written.
            EngineDeadError: the engine has ended.
        """
        return self._profile(StopProfile())

    def close(self) -> None:
        """Free the model, the cache and the thread. The object can't be used afterwards.

        A call under way in another thread ends with EngineDeadError.
        """
        self._close()
        if self._files is not None:
            self._files()
        self._news.put(EngineDeadError("this LLM was closed during the call"))

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Waits until no other thread's call is under way."""
        me = threading.get_ident()
        if self._holder == me:  # waiting would be for ever
            raise RequestError("a stream of this LLM is still open in this thread: finish or close it first")
        with self._lock:
            self._holder = me
            try:
                yield
            finally:
                self._holder = None

    def _profile(self, message: StartProfile | StopProfile) -> ProfileStatus:
        """Send a profile's message and wait for its answer."""
        status = cast("ProfileStatus", self._ask(message, "profile"))
        if status.error is not None:
            raise RequestError(status.error)
        return status

    def _ask(self, message: ToCore, answer: str) -> Any:
        """Send a message and wait for news with its answer."""
        with self._turn():
            if not self._close.alive:
                raise EngineDeadError("this LLM is closed: make a new one")
            self._client.send(message)
            while True:
                news = self._news.get()
                if isinstance(news, EngineDeadError):
                    raise news
                self._stats = news.stats
                if (found := getattr(news, answer)) is not None:
                    return found

    def _run_all(self, prepared: Sequence[PreparedRequest | PreparedEmbedding], use_tqdm: bool) -> list[Any]:
        """Run requests to their ends, under a bar; their outputs, in order."""
        results: dict[str, Any] = {}
        # Closed at once when the loop is interrupted: a traceback that somebody keeps would hold it open.
        with request_bar(use_tqdm, len(prepared)) as bar, contextlib.closing(self._run(prepared)) as outputs:
            for output in outputs:
                results[output.request_id] = output
                bar.advance(output)
        return [results[p.request_id] for p in prepared]

    def _run(self, prepared: Sequence[PreparedRequest | PreparedEmbedding]) -> Generator[Any, None, None]:
        """Start requests and yield their outputs until all have finished; whatever is left is aborted."""
        if not self._close.alive:
            raise EngineDeadError("this LLM is closed: make a new one")
        if self._asleep:
            raise EngineAsleepError("the engine sleeps: call wake_up first")
        failure: OctavoError | None = None
        try:
            for request in prepared:
                self._outputs.add(cast("Any", request))
            self._client.send(AddRequests([core for request in prepared for core in request.choices]))
            while len(self._outputs):
                news = self._news.get()
                if isinstance(news, EngineDeadError):
                    raise news
                self._stats = news.stats
                results, stopped = self._outputs.process(news.outputs)
                if stopped:
                    self._client.send(AbortRequests(stopped))
                for output, error in results:
                    failure = failure or error
                    yield output
        finally:
            left = [core for request in prepared for core in self._outputs.discard(request.request_id)]
            if left:
                with contextlib.suppress(EngineDeadError):
                    self._client.send(AbortRequests(left))
        if failure is not None:
            raise failure

    def _params_for(
        self, count: int, given: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        given = self._processor.default_params() if given is None else given
        return one_each("sampling_params", given, SamplingParams, count)

    def _ids(self, prompt: Prompt, special: bool) -> list[int]:
        if isinstance(prompt, str):
            return self._processor.need_tokenizer("text").encode(prompt, add_special_tokens=special)
        if isinstance(prompt, dict):
            raise RequestError("score takes text or token ids", "prompt")
        return list(prompt)
