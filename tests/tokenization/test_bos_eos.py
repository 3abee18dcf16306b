"""BOS and EOS as the reference adds them, once: plain prompts, and chats whose template writes BOS itself."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, pre_tokenizers, processors
from tokenizers.models import BPE

from octavo.server.text import ChatPrompt, TextService
from octavo.tokenization.tokenizer import Tokenizer, load_tokenizer

from . import test_tekken, test_wordpiece
from .conftest import byte_alphabet, write_gguf, write_spm

CHAT = [{"role": "user", "content": "Hi there"}]
WITH_BOS = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
WITHOUT_BOS = WITH_BOS.removeprefix("{{ bos_token }}")
Place = Callable[[Path, dict[str, Path]], Path]


def _spm(kind: str, **config: Any) -> Place:
    """A folder with a SentencePiece file and a configuration."""

    def make(path: Path, models: dict[str, Path]) -> Path:
        shutil.copy(models[kind], path / "tokenizer.model")
        (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": WITH_BOS, **config}))
        return path

    return make


def _byte_level(add_bos: bool, template: str, **config: Any) -> Place:
    """A folder with a tokenizer.json of GPT-2's kind, whose post-processor may write BOS."""

    def make(path: Path, models: dict[str, Path]) -> Path:
        tokens = [*byte_alphabet(), "<|begin|>", "<|end|>"]
        backend = Backend(BPE({token: i for i, token in enumerate(tokens)}, []))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens(["<|begin|>", "<|end|>"])
        level = processors.ByteLevel(trim_offsets=False)
        bos = processors.TemplateProcessing("<|begin|> $A", special_tokens=[("<|begin|>", 256)])
        backend.post_processor = processors.Sequence([level, bos]) if add_bos else level
        backend.save(str(path / "tokenizer.json"))
        names = {"tokenizer_class": "TokenizersBackend", "eos_token": "<|end|>"}
        (path / "tokenizer_config.json").write_text(
            json.dumps({**names, "chat_template": template, "bos_token": "<|begin|>", **config})
        )
        return path

    return make


def _gguf(kind: str, **keys: Any) -> Place:
    def make(path: Path, models: dict[str, Path]) -> Path:
        file = path / "x.gguf"
        if kind == "llama":
            return write_spm(file, **{"tokenizer.chat_template": WITH_BOS, **keys})
        tokens = [*byte_alphabet(), "<|begin|>", "<|end|>", "th"]
        types = [1] * 256 + [3, 3, 1]
        ids = dict(token_type=types, merges=["t h"], bos_token_id=256, eos_token_id=257)
        return write_gguf(file, "gpt2", tokens, **{"tokenizer.chat_template": WITH_BOS, **ids, **keys})

    return make


def _tekken(path: Path, models: dict[str, Path]) -> Path:
    (path / "chat_template.jinja").write_text(WITH_BOS)
    return test_tekken.write(path, test_tekken.content())


def _bert(path: Path, models: dict[str, Path]) -> Path:
    return test_wordpiece._folder(path, {"do_lower_case": True, "chat_template": WITHOUT_BOS})


# (how to make it, BOS and EOS of a plain prompt, BOS of a chat)
KINDS: dict[str, tuple[Place, int | None, int | None, int | None]] = {
    "Llama 2": (_spm("llama", add_bos_token=True, add_eos_token=False, legacy=True), 1, None, 1),
    "Llama 2, newer": (_spm("llama", add_bos_token=True, legacy=False), 1, None, 1),
    "Gemma": (_spm("gemma", add_bos_token=True), 2, None, 2),
    "with EOS": (_spm("llama", add_bos_token=True, add_eos_token=True), 1, 2, 1),
    "EOS alone": (_spm("llama", add_bos_token=False, add_eos_token=True), None, 2, 1),
    "Llama 3": (_byte_level(True, WITH_BOS), 256, None, 256),
    "Llama 3, flags ignored": (
        _byte_level(True, WITH_BOS, add_bos_token=False, add_eos_token=True),
        256,
        None,
        256,
    ),
    "Qwen": (_byte_level(False, WITHOUT_BOS, bos_token=None), None, None, None),
    "tekken": (_tekken, 1, None, 1),
    "BERT": (_bert, 2, 3, None),
    "GGUF, llama": (_gguf("llama"), 1, None, 1),
    "GGUF, llama with EOS": (_gguf("llama", add_eos_token=True), 1, 2, 1),
    "GGUF, llama without BOS": (_gguf("llama", add_bos_token=False), None, None, 1),
    "GGUF, llama-bpe": (_gguf("gpt2", pre="llama-bpe"), 256, None, 256),
    "GGUF, qwen2": (_gguf("gpt2", pre="qwen2"), None, None, 256),
    "GGUF, qwen2 with BOS": (_gguf("gpt2", pre="qwen2", add_bos_token=True), 256, None, 256),
}


@pytest.fixture
def kind(
    request: pytest.FixtureRequest, tmp_path: Path, models: dict[str, Path]
) -> tuple[Tokenizer, int | None, int | None, int | None]:
    make, *expected = KINDS[request.param]
    return (load_tokenizer(make(tmp_path, models)), *expected)  # type: ignore[return-value]


@pytest.mark.parametrize("kind", KINDS, indirect=True)
def test_plain_prompts_get_bos_and_eos_once(kind: Any) -> None:
    tokenizer, bos, eos, _ = kind
    bare = tokenizer.encode("Hi there", add_special_tokens=False)
    assert not {bos, eos, tokenizer.bos_token_id, tokenizer.eos_token_id} & set(bare)
    want = [*([] if bos is None else [bos]), *bare, *([] if eos is None else [eos])]
    assert tokenizer.encode("Hi there") == want == tokenizer.encode_batch(["Hi there"])[0]


@pytest.mark.parametrize("kind", KINDS, indirect=True)
def test_chats_have_bos_once_where_the_template_writes_it(kind: Any) -> None:
    tokenizer, _, eos, bos = kind
    ids = tokenizer.encode_chat(CHAT)
    assert ids == tokenizer.encode(tokenizer.apply_chat_template(CHAT), add_special_tokens=False)
    if bos is not None:
        assert ids[0] == bos and ids.count(bos) == 1
    assert eos is None or eos not in ids
    service = TextService(tokenizer, 4096, tokenizer.vocab_size, 1)
    try:
        served = asyncio.run(service.encode_chat(ChatPrompt(CHAT, True, False, False, None, {})))
        assert served == ids
        plain = asyncio.run(service.encode("Hi there", True, "prompt"))
        assert plain == tokenizer.encode("Hi there")
    finally:
        service.close()


@pytest.mark.parametrize("name", ["Llama 2", "Llama 2, newer", "with EOS", "EOS alone", "Llama 3", "Qwen"])
def test_folders_as_transformers(name: str, tmp_path: Path, models: dict[str, Path]) -> None:
    import transformers
    from transformers.tokenization_utils_tokenizers import TokenizersBackend

    folder = KINDS[name][0](tmp_path, models)
    from_file = (folder / "tokenizer.json").is_file()
    theirs = (TokenizersBackend if from_file else transformers.LlamaTokenizer).from_pretrained(folder)
    ours = load_tokenizer(folder)
    assert ours.encode("Hi there") == theirs("Hi there").input_ids
    chat = theirs.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert ours.encode_chat(CHAT) == chat
