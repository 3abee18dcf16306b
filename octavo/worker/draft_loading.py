"""Loading a draft model beside its target: found, checked against it, filled."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from octavo.config import EngineConfig
from octavo.errors import ConfigError, OctavoError
from octavo.kv.draft_pages import DraftPages, draft_pages
from octavo.kv.format import KVGroup
from octavo.kv.groups import page_bytes
from octavo.models.config import ModelConfig
from octavo.models.interface import CausalLM
from octavo.models.json_file import read_json
from octavo.models.loader import iterate_weights, load_model_config
from octavo.models.loading import build_model, load_targets, load_weights
from octavo.models.locate import ModelSource, configured_model, configured_tokenizer
from octavo.speculative_config import SpeculativeConfig
from octavo.tokenization.tokenizer import load_tokenizer
from octavo.worker.device import DTYPES, check_strictly_kept, choose_quantization

logger = logging.getLogger(__name__)


@dataclass
class LoadedDraft:
    """A draft model, filled.

    Attributes:
        model: the model.
        groups: its KV groups.
        max_model_len: tokens of the longest text that it drafts for.
        name: what the user called it.
        mask_token: the token in place of those that are not known yet, of a model that drafts several in one
            pass; None: it drafts one after another.
    """

    model: CausalLM
    groups: list[KVGroup]
    max_model_len: int
    name: str
    mask_token: int | None = None

    def pages(self, groups: Sequence[KVGroup], num_pages: int) -> DraftPages:
        """How the draft's blocks lie in pages of the target's pool.

        Raises:
            ConfigError: the pool is too small for any.
        """
        pages = draft_pages(groups, self.groups, num_pages)
        if not pages.blocks or num_pages < len(groups) + pages.run:
            raise ConfigError(
                f"the KV cache of {num_pages * page_bytes(groups)} bytes has no room for that of the draft "
                f"model {self.name}, of which one block needs {page_bytes(self.groups)}: give the cache more "
                "memory"
            )
        return pages


def load_draft(
    config: EngineConfig,
    speculative: SpeculativeConfig,
    source: ModelSource,
    target: ModelConfig,
    dtype: str,
    device: torch.device,
    max_model_len: int,
) -> LoadedDraft:
    """Load the draft model that the settings name.

    Args:
        source, target: the target's files and architecture.
        dtype: of its activations; the draft's are the same.
        max_model_len: tokens of the longest context that the target serves.

    Raises:
        ConfigError: it can't draft for this target; the message says why.
        ModelError: it can't be found or loaded.
    """
    own = draft_settings(config, speculative)
    found = configured_model(own)
    _refuse_head(found)
    architecture = load_model_config(found, config.model_impl)
    _check_vocabulary(config, own, source, target, found, architecture)
    mask_token = find_mask_token(found, architecture, speculative.method)
    length = min(max_model_len, architecture.context_length, speculative.max_model_len or max_model_len)
    model = fill_draft(config, own, found, architecture, dtype, device, length)
    return LoadedDraft(model, model.kv_groups(), length, found.name, mask_token)


def _refuse_head(source: ModelSource) -> None:
    path = source.path / "config.json"
    if source.kind == "folder" and path.is_file() and read_json(path).get("draft_vocab_size") is not None:
        raise ConfigError(
            f"{source.name} is a head, which drafts from its target's hidden states and not alone: give "
            "method='eagle3'"
        )


def find_mask_token(source: ModelSource, architecture: ModelConfig, method: str) -> int | None:
    """The token that a model drafts several tokens in one pass by: `pard_token`, or `ptd_token_id`, of its
    config.json; None unless the method is pard.

    Raises:
        ConfigError: it states none, or none that it has.
    """
    names = ("pard_token", "ptd_token_id")
    stated = (architecture.extra.get(name) for name in names)
    token = next((value for value in stated if value is not None), None)
    if method != "pard":
        if token is not None:
            logger.info("%s can draft all tokens in one pass: method='pard' lets it", source.name)
        return None
    if token is None:
        raise ConfigError(
            f"method='pard': {source.name} states no mask token (pard_token in config.json), so it isn't "
            "trained to draft several tokens in one pass: use method='draft_model', or a model that is"
        )
    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < architecture.vocab_size:
        raise ConfigError(
            f"method='pard': the mask token {token!r} of {source.name} is none of its "
            f"{architecture.vocab_size} tokens: correct pard_token in its config.json"
        )
    return token


def draft_settings(config: EngineConfig, speculative: SpeculativeConfig) -> EngineConfig:
    """The engine's settings, for what drafts in place of the target."""
    return replace(
        config,
        model=speculative.model,
        revision=speculative.revision,
        tokenizer=None,
        hf_overrides=None,
        quantization=speculative.quantization,
        speculative_config=None,
        speculative_model=None,
        num_speculative_tokens=None,
        speculative_synthetic_acceptance=None,
        kv_cache_dtype="auto",
    )


def fill_draft(
    config: EngineConfig,
    own: EngineConfig,
    found: ModelSource,
    architecture: ModelConfig,
    dtype: str,
    device: torch.device,
    max_model_len: int,
) -> CausalLM:
    """Build what drafts, and read its weights.

    Args:
        config, own: the engine's settings, and `draft_settings` of them.
        found, architecture: its files and architecture.

    Raises:
        ConfigError, ModelError: settings or weights that don't fit.
    """
    quantization = choose_quantization(
        own.quantization, found, config.load_format, device, architecture, dtype, config.quantization_strict
    )
    model = build_model(
        architecture,
        dtype=DTYPES[dtype],
        device=device,
        attention_backend=config.attention_backend,
        max_model_len=max_model_len,
        block_size=config.block_size,
        quantization=quantization,
        batch_invariant=config.batch_invariant,
    )
    half = quantization is not None and quantization.format == "half"
    given = architecture.dtype if config.load_format == "dummy" and half else dtype
    weights = iterate_weights(
        found,
        architecture,
        load_targets(model),
        config.load_format,
        DTYPES[given],
        device,
        seed=config.seed,
    )
    load_weights(model, weights)
    if config.quantization_strict:
        check_strictly_kept(model)
    return model


def _check_vocabulary(
    config: EngineConfig,
    own: EngineConfig,
    source: ModelSource,
    target: ModelConfig,
    found: ModelSource,
    draft: ModelConfig,
) -> None:
    refusal = f"the draft model {found.name} has another vocabulary than {source.name}"
    remedy = "choose a draft of the same family"
    if config.skip_tokenizer_init or config.load_format == "dummy":
        if target.vocab_size != draft.vocab_size:
            raise ConfigError(f"{refusal}: {draft.vocab_size} tokens, not {target.vocab_size}; {remedy}")
        return
    ours = load_tokenizer(configured_tokenizer(config, source))
    try:
        theirs = load_tokenizer(configured_tokenizer(own, found))
    except OctavoError as error:
        raise ConfigError(f"{refusal}, as far as is known: {error}") from None
    table, other = ours.byte_table(False), theirs.byte_table(False)
    known, theirs_known = min(ours.vocab_size, target.vocab_size), min(theirs.vocab_size, draft.vocab_size)
    most = min(known, theirs_known)
    for token in range(most):
        if table[token] != other[token]:
            raise ConfigError(
                f"{refusal}: token {token} is {other[token]!r} there and {table[token]!r} here; {remedy}"
            )
    # Beyond that there may be padding, which is no token's text.
    if any(table[i] for i in range(most, known)) or any(other[i] for i in range(most, theirs_known)):
        raise ConfigError(f"{refusal}: {theirs_known} tokens, not {known}; {remedy}")
