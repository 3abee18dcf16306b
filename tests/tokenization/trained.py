"""Small SentencePiece models of the kinds that language models use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import sentencepiece

ROOT = Path(__file__).parents[2]
PLAIN = dict(normalization_rule_name="identity", remove_extra_whitespaces=False)
GEMMA_IDS = dict(
    pad_id=0, eos_id=1, bos_id=2, unk_id=3, pad_piece="<pad>", eos_piece="<eos>", bos_piece="<bos>"
)
KINDS: dict[str, dict[str, Any]] = {
    # Llama 2, Mistral
    "llama": dict(model_type="bpe", vocab_size=900, byte_fallback=True, split_digits=True, **PLAIN),
    # no prefix, runs of line ends and spaces and turn marks as user-defined symbols
    "gemma": dict(
        model_type="bpe",
        vocab_size=900,
        byte_fallback=True,
        add_dummy_prefix=False,
        user_defined_symbols=["\n", "\n\n", "\n\n\n", "▁▁", "▁▁▁", "▁▁▁▁", "<start_of_turn>"],
        **PLAIN,
        **GEMMA_IDS,
    ),
    # characters normalized, spaces trimmed
    "trimmed": dict(model_type="bpe", vocab_size=900),
    # T5, XLM-RoBERTa
    "unigram": dict(model_type="unigram", vocab_size=800, pad_id=0, eos_id=1, unk_id=2, bos_id=-1),
    "xlmr": dict(model_type="unigram", vocab_size=800),
    "unigram with bytes": dict(model_type="unigram", vocab_size=900, byte_fallback=True, **PLAIN),
}


def train_models(folder: Path) -> dict[str, Path]:
    """A small model of each kind, trained on this project's own words."""
    lines = "\n".join((ROOT / name).read_text() for name in ("README.md", "README.zh-CN.md", "LICENSE"))
    sentences = [line for line in lines.split("\n") if line.strip()]
    files = {}
    for number, (name, options) in enumerate(KINDS.items()):
        prefix = folder / str(number)
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_prefix=str(prefix),
            minloglevel=2,
            num_threads=1,
            **options,
        )
        files[name] = prefix.with_suffix(".model")
    return files
