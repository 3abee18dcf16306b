"""The tiny models' tokenizer: a byte-level BPE with a chat template."""

from __future__ import annotations

import functools
import json
from pathlib import Path

from tests.tiny.variants import CONTEXT, SPECIAL_TOKENS, VOCAB_SIZE

_SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "A page of a book is a leaf of paper; an octavo has eight of them.",
    "Numbers such as 0, 1, 2, 3, 42 and 1234567890 are tokens too.",
    "def add(a, b):\n    return a + b\n",
    "今天天气很好，我们去公园散步吧。",
    "Zażółć gęślą jaźń — naïve café, Ünïcödé ✓ 🙂👍🏽 👨‍👩‍👧",
    "What is the capital of France? The capital of France is Paris.",
]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '</s>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@functools.cache
def tokenizer_json() -> str:
    """A byte-level BPE of `VOCAB_SIZE` entries trained on a few sentences; reversible for any UTF-8."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_SENTENCES, trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    return tokenizer.to_str()


def save_tokenizer(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json (bos, eos, chat template), as Hugging Face does."""
    (folder / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
