"""Tokenizers that the tests share: the default model's, and a small SentencePiece one written here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo.tokenization.byte_decoder import BYTES
from octavo.tokenization.gguf_tokenizer import TokenType
from octavo.tokenization.tokenizer import Tokenizer, load_tokenizer

SPM_WORDS = (
    "the he th in an er re on at en nd is or it es ed te ar ing and tion hello world wor ld lo hel ll "
    "▁the ▁a ▁an ▁and ▁hello ▁world ▁w ▁h ▁t ▁in ▁th ▁▁ ▁▁▁▁ 12 123 23 ea eat tea aa aaa é né 世界 世 界"
).split()
SPM_CHARS = sorted(set("abcdefghijklmnopqrstuvwxyzHW0123456789.,!?-▁é世界"))
SPM_CONTROL = ("<s>", "</s>")


def spm_vocabulary() -> tuple[list[str], list[float], list[int]]:
    """Tokens, scores and types of a SentencePiece BPE vocabulary with byte fallback."""
    tokens = ["<unk>", *SPM_CONTROL, *(f"<0x{b:02X}>" for b in range(256))]
    types = [TokenType.UNKNOWN, *[TokenType.CONTROL] * 2, *[TokenType.BYTE] * 256]
    scores = [0.0] * len(tokens)
    for rank, word in enumerate([w for w in SPM_WORDS if len(w) > 1]):
        tokens.append(word)
        types.append(TokenType.NORMAL)
        scores.append(-float(rank))
    for char in SPM_CHARS:
        tokens.append(char)
        types.append(TokenType.NORMAL)
        scores.append(-1000.0 - len(tokens))
    tokens.append("[INST]")
    types.append(TokenType.USER_DEFINED)
    scores.append(0.0)
    return tokens, scores, [int(t) for t in types]


def write_gguf(path: Path, model: str, tokens: list[str], **keys: Any) -> Path:
    """A GGUF file with a tokenizer and no tensors; `keys` are `tokenizer.ggml.*` (a dot: the full name)."""
    from gguf import GGUFWriter

    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    for key, value in keys.items():
        name = key if "." in key else f"tokenizer.ggml.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def byte_alphabet() -> list[str]:
    """GPT-2's spelling of each byte."""
    spelled = {byte: chr(char) for char, byte in BYTES.items() if byte < 256}
    return [spelled[byte] for byte in range(256)]


def write_spm(path: Path, **keys: Any) -> Path:
    tokens, scores, types = spm_vocabulary()
    base = dict(scores=scores, token_type=types, bos_token_id=1, eos_token_id=2, unknown_token_id=0)
    return write_gguf(path, "llama", tokens, **{**base, **keys})


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """SentencePiece files by kind (`trained.KINDS`)."""
    from .trained import train_models

    return train_models(tmp_path_factory.mktemp("sentencepiece"))


@pytest.fixture(scope="session")
def smollm2(default_model: Path) -> Tokenizer:
    """SmolLM2's tokenizer, from the GGUF file."""
    return load_tokenizer(default_model)


@pytest.fixture(scope="session")
def spm(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A SentencePiece tokenizer from a GGUF file."""
    return load_tokenizer(write_spm(tmp_path_factory.mktemp("spm") / "spm.gguf"))


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A byte-level tokenizer of 260 tokens, from a GGUF file."""
    tokens = [*byte_alphabet(), "<|im_start|>", "<|im_end|>", "he", "hel"]
    path = tmp_path_factory.mktemp("small") / "small.gguf"
    types = [1] * 256 + [3, 3, 1, 1]
    keys = dict(token_type=types, merges=["h e", "he l"], bos_token_id=256, eos_token_id=257)
    return load_tokenizer(write_gguf(path, "gpt2", tokens, pre="qwen2", **keys))
