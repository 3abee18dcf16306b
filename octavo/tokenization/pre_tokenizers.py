"""How byte-level BPE vocabularies cut text into words, by the name that a GGUF gives (`tokenizer.ggml.pre`).

The names are llama.cpp's (src/llama-vocab.cpp); the expressions are those of the models' own
tokenizer.json. Where the two differ, tokenizer.json is right: it is what the model was trained with.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

from octavo.errors import ModelError

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_HEAD = r"[^\r\n\p{L}\p{N}]?"
_ASCII_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{_CONTRACTIONS}|{_HEAD}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BLANKS}"
QWEN2 = rf"{_CONTRACTIONS}|{_HEAD}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BLANKS}"
QWEN35 = rf"{_CONTRACTIONS}|{_HEAD}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_BLANKS}"
TEKKEN = (
    rf"{_HEAD}{_UPPER}*{_LOWER}+|{_HEAD}{_UPPER}+{_LOWER}*|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"
)
GPT4O = (
    rf"{_HEAD}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_HEAD}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"
)
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    rf"{_ASCII_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_BLANKS}",
)
DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")
FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", GPT2, r"[0-9][0-9][0-9]")
DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"


@dataclass(frozen=True)
class PreTokenizer:
    """Cutting rules of one vocabulary family.

    Attributes:
        patterns: applied in turn, each to the pieces that the one before it left.
        ignore_merges: a piece that is itself a token is that token, whatever the merges say.
        add_bos: whether BOS is added when the file does not say.
        nfc: whether text is brought to Unicode's composed form first.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False

    def normalizer(self) -> normalizers.Normalizer | None:
        """The `tokenizers` object that prepares a text, if one is needed."""
        return normalizers.NFC() if self.nfc else None

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        """The `tokenizers` object that cuts, and spells bytes as GPT-2 does."""
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence(
            [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )


_gpt2 = PreTokenizer((GPT2,))
_digits = PreTokenizer((r"\p{N}", GPT2))
_llama3 = PreTokenizer((LLAMA3,), ignore_merges=True, add_bos=True)
_qwen2 = PreTokenizer((QWEN2,))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer(DEFAULT),
    **dict.fromkeys(
        ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4", "gigachat"), _gpt2
    ),
    **dict.fromkeys(("a.x-4.0", "mellum", "modern-bert"), _gpt2),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"),
        _digits,
    ),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), _llama3
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), PreTokenizer((LLAMA3,))),
    # llama.cpp leaves out the NFC of Qwen's tokenizer.json.
    "qwen2": PreTokenizer((QWEN2,), nfc=True),
    "qwen35": PreTokenizer((QWEN35,), nfc=True),
    **dict.fromkeys(
        ("deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez", "solar-open", "kormo", "grok-2", "f2llmv2"),
        _qwen2,
    ),
    "tekken": PreTokenizer((TEKKEN,), ignore_merges=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), PreTokenizer((GPT4O,))),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), PreTokenizer(DEEPSEEK3)),
    "deepseek-coder": PreTokenizer(DEEPSEEK_CODER),
    "falcon": PreTokenizer(FALCON),
    **dict.fromkeys(("poro-chat", "bloom", "gpt3-finnish"), PreTokenizer((BLOOM,))),
    "viking": PreTokenizer((BLOOM, r"\p{N}")),
}


def find_pre_tokenizer(name: str) -> PreTokenizer:
    """The rules that a GGUF names.

    Raises:
        ModelError: a name that is not known here; guessing would silently change the model's input.
    """
    if name not in PRE_TOKENIZERS:
        raise ModelError(
            f"the GGUF names the pre-tokenizer {name!r}, which is not supported: "
            "name the model's original tokenizer folder with --tokenizer"
        )
    return PRE_TOKENIZERS[name]
