"""From texts to the engine core's requests for embeddings: prompts, tokens, truncation, checks."""

from __future__ import annotations

import itertools
import secrets
import time

from octavo.engine.embedding_output import PreparedEmbedding
from octavo.engine.input_processor import InputProcessor, Prompt, check_priority, check_salt
from octavo.errors import CONTEXT_LENGTH_EXCEEDED, RequestError
from octavo.messages import CoreRequest
from octavo.pooling_params import PoolingParams
from octavo.sampling_params import RequestOutputKind, SamplingParams

# To the core an embedding is a request for one token that ends with it.
_ONE_STEP = SamplingParams(
    max_tokens=1,
    temperature=0.0,
    detokenize=False,
    ignore_eos=True,
    output_kind=RequestOutputKind.FINAL_ONLY,
)


class EmbeddingInput:
    """Makes core requests of texts, by the limits and the tokenizer of an `InputProcessor`."""

    def __init__(self, processor: InputProcessor):
        self._processor = processor
        self._serial = itertools.count()

    def prepare(
        self,
        prompt: Prompt,
        params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        prompt_name: str | None = None,
        priority: int = 0,
    ) -> PreparedEmbedding:
        """Check a text and make the core's request for its embedding.

        Args:
            prompt: text, token ids, or a dictionary with `prompt` or `prompt_token_ids` (and `cache_salt`).
            params: None takes the model's own.
            request_id: the user's name for it; None draws one.
            prompt_name: which of the model's prompts is put before a text; None: its default, if any.
            priority: lower runs first, under the priority policy.

        Raises:
            RequestError: whatever is wrong with it, in one line.
        """
        processor, settings = self._processor, self._processor.pooling
        if settings is None:
            raise RequestError(
                f"{processor.model_name} is loaded for texts, not for embeddings: set runner='pooling'"
            )
        params = params or PoolingParams()
        hidden = processor.model_config.hidden_size
        if params.dimensions is not None and params.dimensions > hidden:
            raise RequestError(
                f"dimensions={params.dimensions} is more than the embedding's {hidden}", "dimensions"
            )
        text, ids, salt = processor.read_prompt(prompt)
        check_salt(salt)
        check_priority(priority)
        lead = self._lead(prompt_name)
        tail: list[int] = []
        if ids is None:
            assert text is not None
            full = lead + text
            ids, tail = self._encode(full.lower() if settings.lower_case else full)
        elif prompt_name is not None:
            raise RequestError("prompt_name needs a text: put its tokens before the others", "prompt_name")
        ids = self._truncated(ids, tail, params.truncate_prompt_tokens)
        processor.check_ids(ids)
        self._check_length(len(ids))
        core = CoreRequest(
            request_id=f"{request_id or secrets.token_hex(8)}#e{next(self._serial)}",
            prompt_token_ids=ids,
            params=_ONE_STEP,
            seed=0,
            arrival_time=time.time(),
            priority=priority,
            cache_salt=salt,
            stream=False,
        )
        name = core.request_id.rpartition("#")[0]
        normalize = settings.normalize if params.normalize is None else params.normalize
        return PreparedEmbedding(name, text, ids, params, normalize, core)

    def _lead(self, prompt_name: str | None) -> str:
        settings = self._processor.pooling
        assert settings is not None
        name = prompt_name if prompt_name is not None else settings.default_prompt
        if name is None:
            return ""
        if name not in settings.prompts:
            known = ", ".join(settings.prompts) or "none"
            raise RequestError(
                f"prompt_name={name!r} is not one of the model's prompts ({known})", "prompt_name"
            )
        return settings.prompts[name]

    def _encode(self, text: str) -> tuple[list[int], list[int]]:
        """A text's tokens, and those of them that the model wants at every text's end."""
        tokenizer = self._processor.need_tokenizer("a text")
        ids = tokenizer.encode(text)
        plain = tokenizer.encode(text, add_special_tokens=False)
        for before in range(len(ids) - len(plain) + 1):
            if ids[before : before + len(plain)] == plain:
                return ids, ids[before + len(plain) :]
        return ids, []

    def _truncated(self, ids: list[int], tail: list[int], wanted: int | None) -> list[int]:
        """The first tokens, with the special ones of the end kept."""
        if wanted is None:
            return ids
        most = self._processor.facts.max_model_len
        if wanted > most:
            raise RequestError(
                f"truncate_prompt_tokens={wanted} is more than the model takes ({most} tokens)",
                "truncate_prompt_tokens",
            )
        keep = most if wanted == -1 else wanted
        if len(ids) <= keep:
            return ids
        return ids[: max(keep - len(tail), 0)] + tail[-keep:] if tail else ids[:keep]

    def _check_length(self, length: int) -> None:
        facts = self._processor.facts
        if length > facts.max_model_len:
            raise RequestError(
                f"the text has {length} tokens, and this model's maximum context length is "
                f"{facts.max_model_len} tokens: shorten it, or set truncate_prompt_tokens",
                "prompt",
                CONTEXT_LENGTH_EXCEEDED,
            )
        if facts.groups and length > facts.kv_capacity:
            raise RequestError(
                f"the text of {length} tokens needs more KV cache than there is ({facts.kv_capacity} "
                "tokens): shorten it, or give the cache more memory",
                "prompt",
            )
