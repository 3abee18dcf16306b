"""Models that Transformers has loaded, as the loader takes them: a folder with configs, and held weights."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.config import EngineConfig, make_config
from octavo.errors import ConfigError, ModelError, first_line
from octavo.models.held import HeldModel, hold, release

_DTYPES = ("float32", "bfloat16", "float16")


class GivenModules:
    """Modules and a tokenizer that a user has given, for the time of loading.

    Attributes:
        settings: of the engine, those that the user gave among them.
        folder: what was written: configs and the tokenizer's files, no weights. It is read while the engine
            runs, and the user's to remove (`remove`).

    Raises (on construction):
        ConfigError: what was given cannot be served; one line says why.
    """

    def __init__(self, model: Any, tokenizer: Any, assistant_model: Any, settings: Mapping[str, Any]):
        self._folders: list[Path] = []
        self.folder = Path(tempfile.mkdtemp(prefix="octavo-modules-"))
        try:
            self.settings = {**settings, **self._take_all(model, tokenizer, assistant_model, settings)}
            if make_config(EngineConfig, self.settings).runs_ranks:
                raise ConfigError(
                    "modules are in this process's memory, and ranks run in others: save the model and name "
                    "its folder, or leave tensor_parallel_size, pipeline_parallel_size and "
                    "distributed_executor_backend out"
                )
        except BaseException:
            self.release()
            self.remove()
            raise

    def _take_all(
        self, model: Any, tokenizer: Any, assistant_model: Any, settings: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The settings that follow from what was given."""
        device = self._take("model", model, tokenizer)
        asked = settings.get("device", "auto")
        if asked not in ("auto", device, device.partition(":")[0]):
            raise ConfigError(
                f"device={asked!r}, and the model is on {device}: move it with .to({asked!r}), or leave "
                "device out"
            )
        found: dict[str, Any] = {"model": str(self._folders[0]), "device": device}
        if tokenizer is None:
            found["skip_tokenizer_init"] = True
        speculative = settings.get("speculative_config")
        named = speculative.get("model") if isinstance(speculative, dict) else None
        if (name := settings.get("speculative_model") or named) is not None and assistant_model is not None:
            raise ConfigError(f"{name!r} is to draft, and an assistant_model is given: leave one out")
        if assistant_model is not None:
            other = self._take("assistant_model", assistant_model, tokenizer)
            if other != device:
                raise ConfigError(
                    f"assistant_model is on {other}, and model on {device}: move it with .to({device!r})"
                )
            found["speculative_model"] = str(self._folders[1])
        return found

    def _take(self, what: str, given: Any, tokenizer: Any) -> str:
        """Write a model's configs, hold its weights; returns its device."""
        module, device = _checked(what, given)
        folder = self.folder / what
        folder.mkdir()
        name = f"{what} ({type(module).__name__})"
        (folder / "config.json").write_text(json.dumps(_config(module, name)), encoding="utf-8")
        generation = getattr(module, "generation_config", None)
        if generation is not None:
            (folder / "generation_config.json").write_text(generation.to_json_string(), encoding="utf-8")
        if tokenizer is not None:
            _save_tokenizer(tokenizer, folder)
        hold(folder, HeldModel(name, _weights(module, name)))
        self._folders.append(folder)
        return device

    def release(self) -> None:
        """Hold the weights no longer."""
        for folder in self._folders:
            release(folder)

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _checked(what: str, given: Any) -> tuple[Any, str]:
    """The module itself, and its device.

    Raises:
        ConfigError: it is none that can be served.
    """
    import torch

    from octavo.models.transformers_config import import_transformers

    transformers = import_transformers()
    module = getattr(given, "_orig_mod", given)  # what torch.compile wraps
    kind = f"{type(module).__module__}.{type(module).__qualname__}"
    if isinstance(given, (str, Path)):
        raise ConfigError(f"{what}={str(given)!r} is a name, no module: LLM(model=...) takes names")
    if hasattr(module, "merge_and_unload") or getattr(module, "_hf_peft_config_loaded", False):
        raise ConfigError(f"{what} has an adapter ({kind}): merge it first (`merge_and_unload`)")
    if not isinstance(module, torch.nn.Module) or getattr(module, "config", None) is None:
        raise ConfigError(f"{what} is a {kind} without a config: give a model that transformers has loaded")
    if not isinstance(module, transformers.PreTrainedModel) or not kind.startswith("transformers."):
        raise ConfigError(
            f"{what} is a {kind}, whose own code cannot run on paged attention: give a class of transformers"
        )
    if not module.can_generate():
        raise ConfigError(f"{what} is a {type(module).__name__}, which makes no texts: give a causal model")
    quantized = getattr(module.config, "quantization_config", None) is not None
    if quantized or getattr(module, "is_quantized", False):
        raise ConfigError(
            f"{what} is quantized by transformers: name its checkpoint to LLM(...), or give the unquantized "
            "model and `quantization`"
        )
    devices = sorted({str(tensor.device) for tensor in (*module.parameters(), *module.buffers())})
    if "meta" in devices:
        raise ConfigError(f"{what} has tensors without contents (on the meta device): load its weights first")
    if len(devices) > 1:
        raise ConfigError(f"{what} is spread over {', '.join(devices)}: load it on one device")
    if devices[0].partition(":")[0] not in ("cpu", "cuda"):
        raise ConfigError(f"{what} is on {devices[0]}: move it with .to('cpu') or .to('cuda')")
    return module, devices[0]


def _config(module: Any, name: str) -> dict[str, Any]:
    """config.json as Transformers would save it, of the class and dtype that the module has."""
    raw = json.loads(module.config.to_json_string())
    dtype = str(module.dtype).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise ConfigError(f"{name} is in {dtype}: give it in {' or '.join(_DTYPES)} (`.to(torch.float32)`)")
    raw.pop("torch_dtype", None)
    return {**raw, "architectures": [type(module).__name__], "dtype": dtype}


def _weights(module: Any, name: str) -> dict[str, Any]:
    """A module's tensors under the names that its checkpoint has: views where none had to be put together."""
    from transformers.core_model_loading import revert_weight_conversion

    try:
        return dict(revert_weight_conversion(module, module.state_dict()))
    except Exception as error:
        raise ModelError(
            f"{name}: transformers can't name its checkpoint's tensors ({first_line(error)}): save the "
            "model, and name its folder"
        ) from None


def _save_tokenizer(tokenizer: Any, folder: Path) -> None:
    if not hasattr(tokenizer, "save_pretrained"):
        raise ConfigError(
            f"tokenizer is a {type(tokenizer).__name__}: give one of transformers, or None to work with ids"
        )
    tokenizer.save_pretrained(folder)
