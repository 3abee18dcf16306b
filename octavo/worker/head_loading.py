"""Loading an EAGLE-3 head beside its target: found, checked against it, filled."""

from __future__ import annotations

from dataclasses import replace

import torch

from octavo.config import EngineConfig
from octavo.errors import ModelError
from octavo.models.config import ModelConfig
from octavo.models.eagle3 import Eagle3Head
from octavo.models.eagle3_config import eagle3_config
from octavo.models.interface import CausalLM
from octavo.models.json_file import read_json
from octavo.models.locate import ModelSource, configured_model
from octavo.models.weights import stored_names
from octavo.speculative_config import SpeculativeConfig
from octavo.worker.draft_loading import LoadedDraft, draft_settings, fill_draft


def load_head(
    config: EngineConfig,
    speculative: SpeculativeConfig,
    source: ModelSource,
    target: ModelConfig,
    model: CausalLM,
    dtype: str,
    device: torch.device,
    max_model_len: int,
) -> LoadedDraft:
    """Load the head that the settings name, and let the target give it hidden states.

    Args:
        source, target, model: the target.
        dtype: of its activations; the head's are the same.
        max_model_len: tokens of the longest context that the target serves.

    Raises:
        ConfigError, ModelError: the target gives no hidden states, or the head is not for it, can't be found
            or can't be loaded.
    """
    if not model.gives_states:
        raise ModelError(
            f"method='eagle3' needs a model of Octavo's own families, and {source.name} "
            f"({target.architecture}) is run by Transformers' code: use method='draft_model' or 'ngram'"
        )
    own = draft_settings(config, speculative)
    found = configured_model(own)
    if found.kind != "folder":
        raise ModelError(
            f"method='eagle3': {found.name} is a {found.kind} file: name a head's folder or hub id"
        )
    path = found.path / "config.json"
    names = {name.removeprefix("model.") for name in stored_names(found.path, config.load_format)}
    architecture = eagle3_config(read_json(path), target, "embed_tokens.weight" in names, str(path))
    # Heads state the length of their training; the rotation goes on beyond it.
    positions = max(architecture.max_position_embeddings, max_model_len)
    architecture = replace(architecture, max_position_embeddings=positions)
    head = fill_draft(config, own, found, architecture, dtype, device, max_model_len)
    assert isinstance(head, Eagle3Head)
    head.share_embedding(model.embedding())
    model.give_states(architecture.aux_layers)
    return LoadedDraft(head, head.kv_groups(), max_model_len, found.name)
