"""config.json of EAGLE-3 heads, in the dialects of EAGLE, SpecForge and speculators."""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields
from typing import Any

from octavo.errors import ModelError
from octavo.models.config import ModelConfig
from octavo.models.hf_config import model_config_from_dict, positive

logger = logging.getLogger(__name__)

_IDS = "eagle_aux_hidden_state_layer_ids"
_NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


@dataclass(frozen=True)
class Eagle3Config(ModelConfig):
    """A head that drafts from the hidden states of its target (arXiv 2503.01840).

    Attributes:
        target_hidden_size: of the target's hidden states, three of which a row is made from.
        draft_vocab_size: tokens that it can draft.
        aux_layers: the target's layers whose inputs these hidden states are, ascending; that many as the
            target has layers: the last one's output.
        norm_before_residual: whether the normalized hidden state begins the residual stream.
        norm_before_fc: a norm of the three together; fc_norm: a norm of each.
        norms_logits: whether the output head reads normalized rows.
        feeds_norm: whether the next row reads them.
        own_embedding: whether it has an embedding, or uses the target's.
    """

    target_hidden_size: int = 0
    draft_vocab_size: int = 0
    aux_layers: tuple[int, ...] = ()
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norms_logits: bool = True
    feeds_norm: bool = False
    own_embedding: bool = False


def eagle3_config(
    raw: dict[str, Any], target: ModelConfig, own_embedding: bool, where: str = "config.json"
) -> Eagle3Config:
    """Read a head's config.

    EAGLE's own and SpecForge's are Llama's with `draft_vocab_size`; speculators keeps Llama's (or Qwen3's,
    with norms of q and k) under `transformer_layer_config`. Ids of auxiliary layers name layers whose
    *outputs* are read in SpecForge's (under `eagle_config`), whose *inputs* in speculators' (beside the other
    fields); without ids all mean the same three.

    Args:
        target: the model that it shall draft for.
        own_embedding: whether its checkpoint holds an embedding.
        where: names the file in messages.

    Raises:
        ModelError: no such head, a malformed config, or one for another target.
    """
    kind = raw.get("speculators_model_type")
    if kind not in (None, "eagle3"):
        raise ModelError(f"{where}: speculators_model_type {kind!r} is not supported: use an eagle3 head")
    if raw.get("draft_vocab_size") is None:
        raise ModelError(
            f"{where}: there is no draft_vocab_size, which every EAGLE-3 head has: name the folder of a head "
            "for method='eagle3', or use method='draft_model'"
        )
    inner = raw.get("transformer_layer_config") if kind else raw
    if not isinstance(inner, dict):
        raise ModelError(f"{where}: transformer_layer_config is no JSON object: fetch the file again")
    qwen3 = inner.get("model_type") == "qwen3" and kind is not None
    plain = {**inner, "architectures": ["Qwen3ForCausalLM" if qwen3 else "LlamaForCausalLM"]}
    plain.setdefault("dtype", raw.get("dtype") or raw.get("torch_dtype") or target.dtype)
    base = model_config_from_dict({k: v for k, v in plain.items() if v is not None}, {}, where)
    if base.num_layers != 1:
        raise ModelError(
            f"{where}: the head has {base.num_layers} layers, and heads of one are supported: use another"
        )
    flags = {name: _flag(raw, name, where) for name in _NORMS}
    if flags["norm_before_fc"] and flags["fc_norm"]:
        raise ModelError(f"{where}: norm_before_fc and fc_norm are both set: a head has one of them")
    if kind and "norm_before_residual" not in raw:
        logger.warning("%s states no norm_before_residual: false is taken, others may take true", where)
    theirs = {spec.name: getattr(base, spec.name) for spec in fields(ModelConfig)}
    theirs |= {"architecture": "Eagle3", "tie_word_embeddings": False, "extra": raw}
    config = Eagle3Config(
        **theirs,
        target_hidden_size=positive(raw, "target_hidden_size", where, base.hidden_size),
        draft_vocab_size=positive(raw, "draft_vocab_size", where),
        aux_layers=_aux_layers(raw, target.num_layers, kind is not None, where),
        norm_before_residual=bool(flags["norm_before_residual"]),
        norm_before_fc=bool(flags["norm_before_fc"]),
        fc_norm=bool(flags["fc_norm"]),
        # The two mean different things by one word.
        norms_logits=kind is not None or flags["norm_output"] is not False,
        feeds_norm=kind is not None and bool(flags["norm_output"]),
        own_embedding=own_embedding,
    )
    _check_target(config, target, where)
    return config


def _check_target(config: Eagle3Config, target: ModelConfig, where: str) -> None:
    refusal, remedy = f"{where}: the head is for another model than", "use a head for this one"
    if config.target_hidden_size != target.hidden_size:
        raise ModelError(
            f"{refusal} {target.architecture} of hidden_size {target.hidden_size}: it reads hidden states of "
            f"{config.target_hidden_size}; {remedy}"
        )
    if config.vocab_size != target.vocab_size:
        raise ModelError(
            f"{refusal} that of {target.vocab_size} tokens: its vocab_size is {config.vocab_size}; {remedy}"
        )
    if config.draft_vocab_size > target.vocab_size:
        raise ModelError(
            f"{where}: draft_vocab_size={config.draft_vocab_size} is more than the target's "
            f"{target.vocab_size} tokens: fetch the file again"
        )
    if not config.own_embedding and config.hidden_size != target.hidden_size:
        raise ModelError(
            f"{where}: the head of hidden_size {config.hidden_size} has no embedding, and that of the target "
            f"has {target.hidden_size} numbers a token: fetch its weights again"
        )


def _aux_layers(raw: dict[str, Any], num_layers: int, entering: bool, where: str) -> tuple[int, ...]:
    """The layers whose inputs are read."""
    nested, given = raw.get("eagle_config"), raw.get(_IDS)
    entering = entering or given is not None  # vLLM reads them there, in whatever dialect, as inputs
    if not entering and isinstance(nested, dict):
        given = nested.get(_IDS)
    if given is None:
        ids = [2, num_layers // 2, num_layers - 3]
        if sorted(set(ids)) != ids:
            raise ModelError(
                f"{where}: there is no {_IDS}, and the target's {num_layers} layers are too few for the "
                "usual three: add it"
            )
        return tuple(ids)
    if not isinstance(given, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in given):
        raise ModelError(f"{where}: {_IDS}={given!r} is no list of layers: fetch the file again")
    ids = [i if entering else i + 1 for i in given]
    if len(ids) != 3 or sorted(set(ids)) != ids or ids[0] < 0 or ids[-1] > num_layers:
        raise ModelError(
            f"{where}: {_IDS}={given!r} are not three ascending layers of the target's {num_layers}: use a "
            "head for this model"
        )
    logger.info("%s: %s=%s are read as layers' %s", where, _IDS, given, "inputs" if entering else "outputs")
    return tuple(ids)


def _flag(raw: dict[str, Any], name: str, where: str) -> bool | None:
    value = raw.get(name)
    if value is not None and not isinstance(value, bool):
        raise ModelError(f"{where}: {name}={value!r} is neither true nor false: fetch the file again")
    return value
