"""What is evaluated: a model with settings, checked as far as its small files tell, before it is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from octavo.config import EngineConfig
from octavo.engine.input_processor import InputProcessor
from octavo.errors import ConfigError
from octavo.eval.prompt_engine import PromptEngine
from octavo.layers.rotary import rope_variant
from octavo.models.config import ModelConfig
from octavo.tokenization.tokenizer import Tokenizer


class Subject:
    """A model and its settings.

    Attributes:
        name: as the user called it.
        config: the settings as given.
        model_config: the model's.
        tokenizer: its tokenizer.
        prefix: the tokens that the tokenizer puts before a text (BOS, or nothing).

    Raises (on construction):
        ConfigError: it makes no texts.
        RequestError: it has no tokenizer.
        ModelError: its files cannot be found or read.
    """

    def __init__(self, config: EngineConfig):
        self._processor = InputProcessor(config)
        self.config = self._processor.config
        self.name = self._processor.model_name
        self.model_config = self._processor.model_config
        if self._processor.pooling is not None:
            raise ConfigError(
                f"{self.name} makes embeddings, which tell of no next token: name a model that makes texts "
                "(or set runner='generate', if it does)"
            )
        self.tokenizer: Tokenizer = self._processor.need_tokenizer("an evaluation")
        bos = self.tokenizer.bos_token_id
        self.prefix = [bos] if bos is not None and self.tokenizer.encode("")[:1] == [bos] else []

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of texts, without special tokens around them."""
        return self.tokenizer.encode_batch(texts, add_special_tokens=False)

    def check_window(self, window: int) -> None:
        """Raises ConfigError: the context is shorter than `window` tokens."""
        asked = self.config.max_model_len
        if isinstance(asked, int) and window > asked:
            raise ConfigError(f"window={window} is beyond max_model_len={asked} of {self.name}: lower it")
        most = self.model_config.context_length
        if window > most:
            raise ConfigError(
                f"window={window} is beyond the context of {most} tokens of {self.name}: lower it"
            )

    def load(self, window: int, max_num_seqs: int) -> PromptEngine:
        """The engine, with room for `max_num_seqs` windows, and no more than that where that is safe.

        Raises:
            ConfigError, ModelError: it cannot be started.
        """
        length = self.config.max_model_len
        if length is None and _may_shorten(self.model_config, window):
            length = window
        config = replace(
            self.config,
            max_model_len=length,
            max_num_seqs=min(max_num_seqs, self.config.max_num_seqs),
            enable_prefix_caching=False,  # what is cached is not computed, and so not seen
            enforce_eager=True,
        )
        engine = PromptEngine(config)
        if window > engine.facts.kv_capacity:
            engine.close()
            raise ConfigError(
                f"window={window}: the KV cache of {self.name} holds {engine.facts.kv_capacity} tokens: "
                "lower it, or give the cache more memory"
            )
        return engine


def check_same_tokens(
    model: Subject, baseline: Subject, texts: Sequence[str], documents: Sequence[Sequence[int]]
) -> None:
    """Refuse two models that do not mean the same by a token id.

    Args:
        texts: what is evaluated.
        documents: their token ids by `model`.

    Raises:
        ConfigError: naming what differs.
    """
    sizes = [s.model_config.vocab_size for s in (model, baseline)]
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"{model.name} has a vocabulary of {sizes[0]} tokens and the baseline {baseline.name} one of "
            f"{sizes[1]}: name two models with the same"
        )
    hint = "name two models with the same (or give both one --tokenizer, if only the files differ)"
    ours, theirs = model.tokenizer.get_vocab(), baseline.tokenizer.get_vocab()
    for token, number in ours.items():
        if theirs.get(token, number) != number:
            raise ConfigError(
                f"the tokenizers differ: token {token!r} is {number} in {model.name} and {theirs[token]} in "
                f"{baseline.name}: {hint}"
            )
    if model.prefix != baseline.prefix:
        raise ConfigError(
            f"the tokenizers differ: {model.name} begins texts with {model.prefix} and {baseline.name} with "
            f"{baseline.prefix}: {hint}"
        )
    for number, (ids, others) in enumerate(zip(documents, baseline.encode(texts), strict=True)):
        if list(ids) != others:
            raise ConfigError(
                f"the tokenizers differ: they cut text {number} into other tokens ({len(ids)} of "
                f"{model.name}, {len(others)} of {baseline.name}): {hint}"
            )


def _may_shorten(model: ModelConfig, window: int) -> bool:
    """Whether a context of `window` tokens leaves the model's arithmetic what it is with the whole one."""
    reach = model.max_position_embeddings
    return all(
        rope_variant(rope, reach, window) == rope_variant(rope, reach, model.context_length)
        for rope in (model.rope, model.local_rope)
        if rope is not None
    )
