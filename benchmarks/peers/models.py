"""The default model in each peer's own format: the same weights, made once from the GGUF file.

Every format but Q4_1 itself holds what the Q4_1 file decodes to, rounded to the format.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from benchmarks.peers.environment import Environment, InstallError, bench_folder, say
from octavo.models.pull import pull_default


def model_path(peer: str, weights: str, torch_index: str | None) -> Path:
    """The file or folder that a peer loads; made if it isn't there.

    Raises:
        InstallError: it cannot be made.
    """
    if weights == "Q4_1":
        return pull_default()
    if peer == "llama_cpp":
        name = {"16-bit": "BF16", "Q8_0": "Q8_0"}[weights]
        return _made(f"{name}.gguf", lambda path: _write_gguf(path, name))
    folder = _made("bf16", _write_folder)
    if peer == "openvino_genai":
        return _made("openvino", lambda path: _convert_openvino(folder, path, torch_index))
    if peer == "ctranslate2":
        return _made("ctranslate2-int8", lambda path: _convert_ctranslate2(folder, path))
    return folder


def _made(name: str, make: Callable[[Path], None]) -> Path:
    path = bench_folder() / "models" / name
    if not path.exists():
        say(f"making the model's {name}")
        scratch = path.with_name(f".{name}")
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        make(scratch)
        os.replace(scratch, path)
    return path


def _write_gguf(path: Path, name: str) -> None:
    import gguf

    reader = gguf.GGUFReader(pull_default())
    architecture = reader.fields["general.architecture"].contents()
    kind = gguf.GGMLQuantizationType[name]
    writer = gguf.GGUFWriter(path, architecture)
    for key, entry in reader.fields.items():
        if key.startswith("GGUF.") or key in ("general.architecture", "general.file_type"):
            continue
        inner = entry.types[-1] if entry.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, entry.contents(), entry.types[0], inner)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{name}"])
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
        else:
            writer.add_tensor(tensor.name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_folder(path: Path) -> None:
    """Config, weights in bfloat16 and tokenizer as Hugging Face's tools lay them out."""
    import torch
    from safetensors.torch import save_file

    from octavo.models.loader import iterate_weights, load_model_config
    from octavo.models.loading import targets_of
    from octavo.models.locate import find_model
    from octavo.tokenization.gguf_tokenizer import read_gguf_tokenizer

    source = find_model(str(pull_default()))
    config = load_model_config(source)
    path.mkdir()
    weights = iterate_weights(
        source, config, targets_of(config), "auto", torch.bfloat16, "cpu", progress=False
    )
    tensors = {name: tensor.contiguous().clone() for name, tensor in weights}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    parts = read_gguf_tokenizer(source.path)
    parts.backend.save(str(path / "tokenizer.json"))
    special = {name: parts.special_tokens[name] for name in ("bos_token", "eos_token")}
    _write_json(path / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **special})
    ids = {f"{name}_id": parts.backend.token_to_id(text) for name, text in special.items()}
    described = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        **ids,
    }
    _write_json(path / "config.json", described)
    _write_json(path / "generation_config.json", ids)


def _convert_openvino(folder: Path, path: Path, torch_index: str | None) -> None:
    from benchmarks.peers.openvino_genai import CONVERSION

    env = Environment("openvino-convert", 30)
    say("OpenVINO: making the environment of the conversion (1.7 GB, removed after)")
    env.create(CONVERSION, torch_index)
    # Not needed for text, and of another build than PyTorch's CPU one, Transformers cannot be imported.
    env.run("python", "-m", "pip", "uninstall", "-q", "-y", "torchvision")
    task = ("--task", "text-generation-with-past")
    env.run("optimum-cli", "export", "openvino", "--model", folder, *task, path)  # keeps bfloat16
    if not (path / "openvino_model.bin").exists():
        raise InstallError("optimum-cli wrote no openvino_model.bin")
    env.remove()


def _convert_ctranslate2(folder: Path, path: Path) -> None:
    env = Environment("ctranslate2", 15)
    env.run("ct2-transformers-converter", "--model", folder, "--quantization", "int8", "--output_dir", path)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
