"""Tokenizers out of GGUF files, against Transformers' conversion and against the algorithms' definitions."""

from __future__ import annotations

from pathlib import Path

import pytest
import regex
from hypothesis import example, given, settings
from hypothesis import strategies as st

from octavo.errors import ModelError
from octavo.models.gguf_file import GGUFFile
from octavo.tokenization.pre_tokenizers import LLAMA3, PRE_TOKENIZERS, QWEN2, find_pre_tokenizer
from octavo.tokenization.tokenizer import Tokenizer, load_tokenizer

from .conftest import byte_alphabet, spm_vocabulary, write_gguf, write_spm

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  leading and trailing  ",
    "tabs\tand\nnew\r\nlines\n\n\n  and    runs     of spaces",
    "def f(x):\n    return {'a': [x ** 2, 0.5e-3], \"b\": None}  # comment\n",
    "The price is $1,234.56 (12% off) on 2024-02-29.",
    "I'm you're they'LL we've it's O'Neil",
    "Größe naïve façade Ünïcödé ﬁ ① ½ x² ٣٤ १२",
    "你好，世界。这是一个测试。こんにちは世界 안녕하세요 세계",
    "Привет, мир! שלום עולם مرحبا بالعالم नमस्ते दुनिया สวัสดีชาวโลก",
    "😀 👨‍👩‍👧‍👦 🏳️‍🌈 🇫🇷🇩🇪 👍🏽 e\u0301 Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤̞͉͚̯̞̠͍A",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "x<|endoftext|>y <|im_end|><|im_end|> <repo_name>a/b<file_sep> <|not_a_token|>",
    "\x00\x01\x7f\x85\xa0\xad\u200b\u2028\u3000\ufeff\ufffd\U0010ffff",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa" * 5,
    "https://example.com/a?b=c&d=%20#e user@example.org C:\\dir\\file.txt",
]
# SmolLM2's vocabulary has no token for these bytes: a few control characters, and the first byte of planes
# 4 to 11, which are unassigned.
MISSING = {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2}
# Text that touches what a tokenizer treats specially, more often than random Unicode does.
SNIPPETS = st.lists(
    st.one_of(
        st.text(max_size=8).map(lambda text: "".join(c for c in text if not MISSING & set(c.encode()))),
        st.sampled_from(
            [
                " ",
                "  ",
                "\n",
                "\n\n",
                "\t",
                "'s",
                "'LL",
                "1",
                "23",
                "٣",
                "½",
                "the",
                "é",
                "世",
                "😀",
                "\u200d",
            ]
        ),
        st.sampled_from(["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<file_sep>"]),
    ),
    max_size=12,
).map("".join)


@pytest.fixture(scope="module")
def converted(default_model: Path):
    """Transformers' conversion of the same file: what AutoTokenizer.from_pretrained(gguf_file=…) builds."""
    from transformers.integrations.ggml import convert_gguf_tokenizer

    data = GGUFFile(default_model).metadata
    keys = ("tokens", "merges", "token_type", "bos_token_id", "eos_token_id", "unknown_token_id")
    fields = {key: data[f"tokenizer.ggml.{key}"] for key in keys}
    return convert_gguf_tokenizer("llama", {"tokenizer_type": "gpt2", **fields})[0]


@pytest.fixture(scope="module")
def published(converted):
    """The conversion with pre-tokenizer and decoder of SmolLM2's own tokenizer.json, which it leaves out.

    Transformers cuts words by GPT-2's expression alone, although the file names `smollm`: digits one by
    one, first. llama.cpp and the published tokenizer.json agree on that, so they are right, and it
    shows where blanks precede a digit ("a  1": two blanks are one token) and for digits beyond ASCII.
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    backend = Backend.from_str(converted.to_str())
    backend.decoder = decoders.ByteLevel()
    backend.model.unk_token = None
    backend.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True)]
    )
    return backend


@pytest.mark.parametrize("text", TEXTS)
def test_encodes_as_the_published_tokenizer(smollm2: Tokenizer, published, text: str) -> None:
    ids = smollm2.encode(text)
    assert ids == published.encode(text).ids
    assert smollm2.decode(ids, skip_special_tokens=False) == text
    for skip in (True, False):
        assert smollm2.decode(ids, skip_special_tokens=skip) == published.decode(
            ids, skip_special_tokens=skip
        )


@settings(max_examples=200, deadline=None)
@given(SNIPPETS)
def test_encodes_any_text_as_the_published_tokenizer(smollm2: Tokenizer, published, text: str) -> None:
    ids = smollm2.encode(text)
    assert ids == published.encode(text).ids
    assert smollm2.decode(ids, skip_special_tokens=False) == text


@settings(max_examples=200, deadline=None)
@given(SNIPPETS.map(lambda text: regex.sub(r"\p{N}", "", text)))
def test_encodes_text_without_digits_as_transformers(smollm2: Tokenizer, converted, text: str) -> None:
    assert smollm2.encode(text) == converted.encode(text).ids


def test_differs_from_transformers_where_it_ignores_the_pre_tokenizer(smollm2: Tokenizer, converted) -> None:
    assert smollm2.encode("Add 12 and 7.") == converted.encode("Add 12 and 7.").ids
    spelled = [smollm2.id_to_token(i) for i in smollm2.encode("a  1")]
    assert spelled == ["a", "ĠĠ", "1"]
    assert converted.encode("a  1").tokens == ["a", "Ġ", "Ġ", "1"]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 49151), max_size=30), st.booleans())
def test_decodes_any_ids_as_the_library(smollm2: Tokenizer, published, ids: list[int], skip: bool) -> None:
    assert smollm2.decode(ids, skip_special_tokens=skip) == published.decode(ids, skip_special_tokens=skip)


def test_bytes_that_the_vocabulary_lacks_are_left_out(smollm2: Tokenizer, converted) -> None:
    """As by llama.cpp and the published tokenizer.json (no unk_token); Transformers' conversion puts
    <|endoftext|> there, which would end the text for the model."""
    alphabet = byte_alphabet()
    assert MISSING == {b for b in range(0xF5) if smollm2.token_to_id(alphabet[b]) is None} - {0xC0, 0xC1}
    assert smollm2.encode("\U00040000") == smollm2.encode("\U00040000a")[:-1]
    assert smollm2.decode(smollm2.encode("\U00040000a"), skip_special_tokens=False) == "\ufffd\ufffd\ufffda"
    assert converted.encode("\U00040000").tokens[0] == "<|endoftext|>"


def test_special_tokens_of_the_default_model(smollm2: Tokenizer) -> None:
    assert smollm2.vocab_size == len(smollm2) == 49152
    assert (smollm2.bos_token_id, smollm2.eos_token_id, smollm2.eos_token_ids) == (1, 2, (2,))
    assert smollm2.all_special_ids == list(range(17))
    # The file says add_bos_token = false.
    assert smollm2.encode("hi") == smollm2.encode("hi", add_special_tokens=False)


def test_batches_equal_single_texts(smollm2: Tokenizer) -> None:
    assert smollm2.encode_batch(TEXTS) == [smollm2.encode(text) for text in TEXTS]


@pytest.mark.parametrize("text", [t for t in TEXTS if "<|" not in t and "<repo" not in t])
def test_token_bytes_add_up_to_the_text(smollm2: Tokenizer, text: str) -> None:
    assert b"".join(map(smollm2.token_to_bytes, smollm2.encode(text))) == text.encode()


def test_bos_and_eos_are_added_once_as_the_flags_say(tmp_path: Path) -> None:
    tokens, scores, types = spm_vocabulary()
    plain = load_tokenizer(write_spm(tmp_path / "a.gguf"))
    assert plain.encode("hello")[0] == 1 and plain.encode("hello").count(1) == 1
    assert plain.encode("hello", add_special_tokens=False) == plain.encode("hello")[1:]
    both = load_tokenizer(write_spm(tmp_path / "b.gguf", add_bos_token=True, add_eos_token=True))
    assert both.encode("hello") == [*plain.encode("hello"), 2]
    neither = load_tokenizer(write_spm(tmp_path / "c.gguf", add_bos_token=False))
    assert neither.encode("hello") == plain.encode("hello")[1:]
    assert tokens[plain.encode("<s>hello", add_special_tokens=False)[0]] == "<s>"


def _spm_oracle(text: str, tokens: list[str], scores: list[float], types: list[int]) -> list[int]:
    """SentencePiece's BPE by its definition: merge the adjacent pair whose token scores highest, leftmost."""
    ids = {t: i for i, t in enumerate(tokens)}
    normal = {t: s for t, s, kind in zip(tokens, scores, types, strict=True) if kind in (1, 4)}
    symbols = list(("▁" + text if text else "").replace(" ", "▁"))
    while True:
        pairs = [
            (normal[a + b], -i)
            for i, (a, b) in enumerate(zip(symbols, symbols[1:], strict=False))
            if a + b in normal
        ]
        if not pairs:
            break
        at = -max(pairs)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    out: list[int] = []
    for symbol in symbols:
        out += [ids[symbol]] if symbol in normal else [ids[f"<0x{b:02X}>"] for b in symbol.encode()]
    return out


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.sampled_from(
                ["hello", "world", "the", " ", "  ", "tea", "eat", "aaa", "123", "世界", "é", "Ω", "😀", "\n"]
            ),
            st.text("abcdehlonrtw 12.é世", max_size=6),
            st.text(max_size=3),
        ),
        max_size=8,
    ).map("".join)
)
@example("<0x41>")
@example("<unk")
def test_sentencepiece_by_its_definition(spm: Tokenizer, text: str) -> None:
    for name in ("<s>", "</s>", "<unk>", "[INST]"):
        text = text.replace(name, "")
    ids = spm.encode(text, add_special_tokens=False)
    assert ids == _spm_oracle(text, *spm_vocabulary())
    # U+2581 is the space itself in these vocabularies.
    assert spm.decode(ids) == text.replace("▁", " ")


def test_sentencepiece_special_tokens_in_text(spm: Tokenizer) -> None:
    ids = spm.encode("<s>[INST] hello[INST]</s>", add_special_tokens=False)
    spelled = [spm.id_to_token(i) for i in ids]
    assert spelled[:2] == ["<s>", "[INST]"] and spelled[-2:] == ["[INST]", "</s>"]
    # User-defined tokens are text; control tokens are not.
    assert "[INST]" in spm.decode(ids) and "<s>" not in spm.decode(ids)
    assert "<s>" in spm.decode(ids, skip_special_tokens=False)


def test_without_the_space_prefix(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_spm(tmp_path / "a.gguf", add_space_prefix=False))
    ids = tokenizer.encode("hello world", add_special_tokens=False)
    assert [tokenizer.id_to_token(i) for i in ids] == ["hello", "▁world"]
    assert tokenizer.decode(tokenizer.encode(" hello")) == " hello"


@pytest.mark.parametrize(("name", "pattern"), [("llama-bpe", LLAMA3), ("qwen2", QWEN2)])
def test_words_are_cut_by_the_expression(name: str, pattern: str) -> None:
    """An independent engine (`regex`) cuts the same pieces out of the same text."""
    from tokenizers import Regex, pre_tokenizers

    cutter = pre_tokenizers.Split(Regex(find_pre_tokenizer(name).patterns[0]), "isolated")
    for text in TEXTS:
        pieces = [piece for piece, _ in cutter.pre_tokenize_str(text)]
        assert pieces == [m.group() for m in regex.finditer(pattern, text)]


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_every_pre_tokenizer_loses_nothing(tmp_path: Path, default_model: Path, name: str) -> None:
    """With a vocabulary of single bytes, decoding gives back the text, composed where the model composes."""
    import unicodedata

    tokens = [*byte_alphabet(), "<bos>", "th"]
    types = [1] * 256 + [3, 1]
    path = write_gguf(
        tmp_path / "x.gguf", "gpt2", tokens, pre=name, token_type=types, merges=["t h"], bos_token_id=256
    )
    tokenizer = load_tokenizer(path)
    for text in TEXTS:
        want = unicodedata.normalize("NFC", text) if find_pre_tokenizer(name).nfc else text
        assert tokenizer.decode(tokenizer.encode(text)) == want
    assert (256 in tokenizer.encode("x")) == find_pre_tokenizer(name).add_bos


def test_errors_name_the_remedy(tmp_path: Path) -> None:
    tokens = ["a", "b", "ab"]
    good = dict(token_type=[1, 1, 1], merges=["a b"], pre="gpt-2")

    def error(file: str, model: str = "gpt2", vocabulary: list[str] = tokens, **changes) -> str:
        path = write_gguf(tmp_path / file, model, vocabulary, **{**good, **changes})
        with pytest.raises(ModelError) as caught:
            load_tokenizer(path)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "'klingon'" in error("a.gguf", pre="klingon") and "--tokenizer" in error("b.gguf", pre="klingon")
    assert "'rwkv'" in error("c.gguf", model="rwkv")
    assert "twice" in error("d.gguf", vocabulary=["a", "b", "b"])
    assert "types" in error("e.gguf", token_type=[1])
    assert "merges" in error("f.gguf", merges=["ab"])
    assert "`x`" in error("g.gguf", merges=["a x"])
    assert "scores" in error("h.gguf", model="llama")
    assert "bos_token" in error("i.gguf", add_bos_token=True)


def test_unigram_as_sentencepiece(tmp_path: Path, models: dict[str, Path]) -> None:
    """The kind "t5", with a character map or with byte pieces."""
    import sentencepiece

    from octavo.tokenization.sentencepiece_model import read_sentencepiece

    for kind, trim in (("unigram", True), ("unigram with bytes", False)):
        model = read_sentencepiece(models[kind])
        keys: dict[str, object] = dict(
            scores=model.scores,
            token_type=model.types,
            unknown_token_id=model.unk_id,
            eos_token_id=model.eos_id,
            add_space_prefix=True,
            remove_extra_whitespaces=trim,
        )
        if model.charsmap:
            keys["precompiled_charsmap"] = model.charsmap
        tokenizer = load_tokenizer(write_gguf(tmp_path / f"{trim}.gguf", "t5", model.tokens, **keys))
        reference = sentencepiece.SentencePieceProcessor(str(models[kind]))
        for text in TEXTS:
            if "<" in text or "\r" in text or "\u0301" in text:  # special tokens; what the library joins
                continue
            assert tokenizer.encode(text, add_special_tokens=False) == reference.encode(text), text
        # llama.cpp adds EOS and no BOS to this kind.
        assert tokenizer.encode("hello")[-1] == model.eos_id
        assert tokenizer.encode("hello")[:-1] == reference.encode("hello")


def test_gemma_as_its_files_have_it(tmp_path: Path) -> None:
    """No dummy prefix, BOS, spaces as user-defined tokens, turn marks as control tokens, one end of turn."""
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{b:02X}>" for b in range(256))]
    types = [3, 3, 3, 3, *[6] * 256]
    for token, kind in [("\n", 4), ("\n\n", 4), ("  ", 4), ("<start_of_turn>", 3), ("<end_of_turn>", 3)]:
        tokens.append(token)
        types.append(kind)
    for token in ["hi", "us", "user", "er", "▁x", "▁", "h", "i", "u", "s", "e", "r", "x"]:
        tokens.append(token)
        types.append(1)
    scores = [-1000.0 if kind != 1 else -float(i) for i, kind in enumerate(types)]
    keys = dict(
        bos_token_id=2, eos_token_id=1, unknown_token_id=3, padding_token_id=0, add_space_prefix=False
    )
    path = write_gguf(
        tmp_path / "gemma.gguf", "llama", tokens, scores=scores, token_type=types, pre="default", **keys
    )
    tokenizer = load_tokenizer(path)
    ids = tokenizer.encode("<start_of_turn>user\nhi<end_of_turn>\n   x")
    spelled = [tokenizer.id_to_token(i) for i in ids]
    assert spelled == ["<bos>", "<start_of_turn>", "user", "\n", "hi", "<end_of_turn>", "\n", "  ", "▁x"]
    assert tokenizer.decode(ids) == "user\nhi\n   x"
    assert tokenizer.eos_token_ids == (1, tokenizer.token_to_id("<end_of_turn>"))
    assert tokenizer.encode("hi") == [2, tokenizer.token_to_id("hi")]


def test_merges_over_lines(tmp_path: Path) -> None:
    """The kind "gemma4": characters and written merges, ▁ for spaces, lines apart, BOS."""
    tokens = ["<bos>", "<0x0D>", "<0xC3>", "<0xA9>", "a", "▁", "b", "▁b", "a▁b", "\n", "\n\n", "a\n"]
    types = [3, 6, 6, 6, *[1] * 8]
    merges = ["▁ b", "a ▁b", "\n \n", "a \n"]
    path = write_gguf(
        tmp_path / "a.gguf",
        "gemma4",
        tokens,
        token_type=types,
        merges=merges,
        bos_token_id=0,
        add_space_prefix=False,
    )
    tokenizer = load_tokenizer(path)
    spelled = [tokenizer.id_to_token(i) for i in tokenizer.encode("a b\n\na\né")]
    assert spelled == ["<bos>", "a▁b", "\n\n", "a", "\n", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("a b\n\na\né")) == "a b\n\na\né"


def test_kimis_words() -> None:
    """Han is cut from letters of other scripts, by sets that are taken from each other."""
    from tokenizers import Regex, pre_tokenizers

    cutter = pre_tokenizers.Split(Regex(find_pre_tokenizer("kimi-k2").patterns[0]), "isolated")

    def cut(text: str) -> list[str]:
        return [piece for piece, _ in cutter.pre_tokenize_str(text)]

    assert cut("Hello世界abc DEF'll 12345") == ["Hello", "世界", "abc", " DEF'll", " ", "123", "45"]
    assert cut("ひらがな漢字カナ") == ["ひらがな", "漢字", "カナ"]


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        ("jais-2", "a     b", ["a", "    ", " b"]),
        ("tiny_aya", "1234567", ["1", "234", "567"]),
        ("superbpe", "1234567", ["1", "234", "567"]),
        ("minicpm5", "1234567", ["123", "456", "7"]),
        ("ufakzeka", "Ali'ye", ["Ali", "'ye"]),
        ("qwen2", "we'll", ["we", "'ll"]),
        ("seed-coder", "a.\n", ["a", ".", "\n"]),
        ("dbrx", "a.\n", ["a", ".\n"]),
        ("bailingmoe", "a\n\nb", ["a", "\n\n", "b"]),
        ("deepseek-llm", "Ab 12世", ["Ab", " ", "12", "世"]),
        ("deepseek-coder", "Ab12", ["Ab", "1", "2"]),
        ("laguna", "a b\n\n c", ["a", " b", "\n\n", " c"]),
        ("youtu", "a世b12", ["a", "世", "b", "1", "2"]),
    ],
)
def test_words_of_further_families(name: str, text: str, pieces: list[str]) -> None:
    from tokenizers import Regex, pre_tokenizers

    steps = [pre_tokenizers.Split(Regex(p), "isolated") for p in find_pre_tokenizer(name).patterns]
    assert [piece for piece, _ in pre_tokenizers.Sequence(steps).pre_tokenize_str(text)] == pieces


def test_turn_ends_of_a_gguf(tmp_path: Path) -> None:
    tokens = ["a", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>"]
    path = write_gguf(
        tmp_path / "a.gguf",
        "gpt2",
        [*tokens, "b", "ab"],
        pre="gpt-2",
        merges=["a b"],
        # The last of these is ordinary text: only control tokens end a turn.
        token_type=[1, 3, 3, 3, 1, 1, 1],
        eos_token_id=1,
        eom_token_id=3,
    )
    assert load_tokenizer(path).eos_token_ids == (1, 3, 2)


@pytest.mark.slow
def test_encodes_as_auto_tokenizer(smollm2: Tokenizer, default_model: Path) -> None:
    from transformers import AutoTokenizer

    auto = AutoTokenizer.from_pretrained(default_model.parent, gguf_file=default_model.name)
    for text in TEXTS:
        if not regex.search(r"\p{N}", text):
            assert smollm2.encode(text) == auto(text).input_ids
