"""A worker for encoders (BERT and its like): whole texts through Transformers' model, no cache."""

from __future__ import annotations

import gc
import inspect
import logging
import time
from typing import Any

import numpy as np
import torch

from octavo.config import EngineConfig
from octavo.errors import ConfigError, ModelError, first_line
from octavo.models.fingerprint import fingerprint
from octavo.models.loader import load_model_config
from octavo.models.locate import ModelSource, configured_model
from octavo.models.pooling import pool_padded
from octavo.models.pooling_config import pooling_settings
from octavo.models.transformers_config import hf_config, import_transformers
from octavo.step_messages import ModelFacts
from octavo.worker.batch_invariance import check_batch_invariant
from octavo.worker.device import DTYPES, choose_device, choose_dtype, set_threads
from octavo.worker.device_errors import noticing_death
from octavo.worker.sizes import wanted_length

logger = logging.getLogger(__name__)

_ONLY_HEADS = ("pooler.", "cls.", "classifier.", "lm_head.", "vocab_")  # unused parts of a bare encoder


class EncoderWorker:
    """Owns one device and the encoder on it. `facts` says what was loaded.

    Raises (on construction):
        ConfigError, ModelError: what cannot be loaded or served, in one line.
    """

    facts: ModelFacts

    def __init__(self, config: EngineConfig):
        begin = time.perf_counter()
        self.device = choose_device(config.device)
        threads = set_threads(config, self.device)
        source = configured_model(config)
        model_config = load_model_config(source, config.model_impl)
        settings = pooling_settings(config, source, model_config)
        assert settings is not None  # an encoder makes nothing else
        check_batch_invariant(config, self.device, model_config, pooling=True)
        if config.quantization not in (None, "none"):
            raise ConfigError(
                f"quantization={config.quantization!r} does not serve encoders such as "
                f"{model_config.architecture}, which run through transformers: leave it out"
            )
        if config.runs_ranks:
            raise ConfigError(
                f"{source.name} is an encoder ({model_config.architecture}), which runs on one rank: leave "
                "tensor_parallel_size, pipeline_parallel_size and distributed_executor_backend out"
            )
        self.pooling_type = settings.pooling_type
        dtype = choose_dtype(config.dtype, model_config, self.device)
        length = wanted_length(config, model_config, settings)
        self.model = _load(config, source, DTYPES[dtype], self.device, model_config.extra)
        self.pad = int(getattr(self.model.config, "pad_token_id", None) or 0)
        budget = config.max_num_batched_tokens or (16384 if self.device.type == "cuda" else 1024)
        self.facts = ModelFacts(
            max_model_len=length,
            vocab_size=model_config.vocab_size,
            groups=[],
            num_blocks=0,
            cache_root=fingerprint(source, model_config, config.load_format, config.seed),
            overlap=False,
            max_num_batched_tokens=max(budget, length),
            summary={
                "model": source.name,
                "architecture": f"{model_config.architecture} through transformers",
                "device": f"{self.device} ({threads} threads)"
                if self.device.type == "cpu"
                else str(self.device),
                "dtype": dtype,
                "attention": self.model.config._attn_implementation,
                "pooling": settings.pooling_type,
                "loading": f"{time.perf_counter() - begin:.2f} s",
            },
            pooling_type=settings.pooling_type,
        )

    @torch.inference_mode()
    def encode(self, texts: list[list[int]]) -> np.ndarray:
        """Pooled vectors of texts, float32 `[n, hidden_size]`, computed as one padded batch.

        Raises:
            EngineDeadError: the device can run nothing more.
        """
        lengths = np.array([len(text) for text in texts])
        ids = np.full((len(texts), int(lengths.max())), self.pad, np.int64)
        for row, text in zip(ids, texts, strict=True):
            row[: len(text)] = text
        mask = np.arange(ids.shape[1]) < lengths[:, None]
        d_ids, d_mask, d_lengths = (torch.from_numpy(a).to(self.device) for a in (ids, mask, lengths))
        with noticing_death():
            hidden = self.model(input_ids=d_ids, attention_mask=d_mask.long())[0]
            return pool_padded(self.pooling_type, hidden, d_lengths).cpu().numpy()

    def close(self) -> None:
        """Free the model."""
        del self.model
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _load(
    config: EngineConfig, source: ModelSource, dtype: torch.dtype, device: torch.device, raw: dict[str, Any]
) -> Any:
    """Transformers' encoder with its weights.

    Raises:
        ModelError: it cannot be built, or weights are missing.
    """
    transformers = import_transformers()
    hf = hf_config(raw, str(source.path / "config.json"))
    cls = transformers.models.auto.modeling_auto.MODEL_MAPPING.get(type(hf), None)
    if cls is None:
        raise ModelError(f"{source.name}: {hf.model_type} has no encoder in transformers: use another model")
    cls = cls[0] if isinstance(cls, tuple) else cls
    options: dict[str, Any] = {"dtype": dtype}
    options["attn_implementation"] = "sdpa" if getattr(cls, "_supports_sdpa", False) else "eager"
    head = "add_pooling_layer" in inspect.signature(cls.__init__).parameters
    if config.load_format == "dummy":
        torch.manual_seed(config.seed)
        model = cls._from_config(hf, **options)
    else:
        if head:
            options["add_pooling_layer"] = False
        if config.load_format == "safetensors":
            options["use_safetensors"] = True
        before = transformers.utils.logging.get_verbosity()
        transformers.utils.logging.set_verbosity_error()  # what matters is checked here
        transformers.utils.logging.disable_progress_bar()
        try:
            model, report = cls.from_pretrained(
                source.path, config=hf, output_loading_info=True, local_files_only=True, **options
            )
        except Exception as error:
            raise ModelError(f"{source.path}: cannot be loaded: {first_line(error)}") from None
        finally:
            transformers.utils.logging.set_verbosity(before)
        lacking = [name for name in report["missing_keys"] if not name.startswith(_ONLY_HEADS)]
        wrong = [str(key) for key in report.get("mismatched_keys") or ()]
        if lacking or wrong:
            fault = f"tensor {lacking[0]!r} is missing" if lacking else f"tensor {wrong[0]} has another shape"
            raise ModelError(f"{source.path}: {fault}: fetch the model again")
    return model.eval().to(device)
