"""`LLM.from_transformers`: modules in place of files, against Transformers' own generation in float32."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from octavo import LLM, SamplingParams
from octavo.errors import ConfigError, OctavoError, RequestError
from octavo.models import held
from octavo.models.transformers_modules import GivenModules
from tests import tiny
from tests.engine.test_llm_parity import expected, generate
from tests.models import test_transformers_model as fallback

SETTINGS: dict[str, Any] = dict(
    dtype="float32", num_threads=1, max_model_len=tiny.CONTEXT, check_invariants=True, max_num_seqs=16,
    kv_cache_memory_bytes=8 << 20,
)  # fmt: skip


def load(model: Any, tokenizer: Any = None, draft: Any = None, **settings: Any) -> LLM:
    return LLM.from_transformers(model, tokenizer, draft, **{**SETTINGS, **settings})


def fixed(draft: Any, method: str = "draft_model") -> dict[str, Any]:
    return {"draft": draft, "speculative_config": {"method": method, "adaptive": False}}


@functools.cache
def before(variant: str) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tiny.reference(variant).state_dict().items()}


def is_unchanged(variant: str) -> bool:
    now, then = tiny.reference(variant).state_dict(), before(variant)
    return now.keys() == then.keys() and all(torch.equal(now[name], then[name]) for name in then)


FAMILIES = [
    "llama", "qwen3-tied", "gemma2", "gemma3", "phi3", "granite", "olmo2", "mixtral", "qwen3-moe-mixed",
    "deepseek-v3", "stablelm", "yarn",
]  # fmt: skip


@pytest.mark.parametrize("variant", FAMILIES)
def test_families(variant: str):
    before(variant)
    with load(tiny.reference(variant)) as llm:
        assert generate(llm) == expected(variant)
        assert "transformers" not in llm.facts.summary["architecture"]
    assert is_unchanged(variant)


@pytest.mark.parametrize("family", ["GPT2", "Cohere2", "GPTNeoX", "Mixtral"])
def test_models_that_run_transformers_code(family: str):
    own = fallback.reference(family)
    with load(own, model_impl="transformers", max_model_len=128) as llm:
        outputs = llm.generate(fallback.texts(), fallback.GREEDY, use_tqdm=False)
        assert llm.facts.summary["architecture"].endswith("through transformers")
    for text, output in zip(fallback.texts(), outputs, strict=True):
        assert fallback.is_greedy(family, text, output.outputs[0].token_ids)


@pytest.mark.parametrize(("target", "draft"), [("llama", "qwen2"), ("llama", "llama"), ("gemma2", "qwen3")])
def test_assisted_as_generate_is(target: str, draft: str):
    model, assistant = tiny.reference(target), tiny.reference(draft)
    params = SamplingParams(temperature=0.0, max_tokens=40, detokenize=False)
    with load(model, **fixed(assistant)) as llm:
        outputs = llm.generate(tiny.PROMPTS, params, use_tqdm=False)
        stats = llm.stats()
    for prompt, output in zip(tiny.PROMPTS, outputs, strict=True):
        ids = torch.tensor([prompt])
        own = model.generate(ids, assistant_model=assistant, do_sample=False, max_new_tokens=40)
        assert output.outputs[0].token_ids == own[0, len(prompt) :].tolist()
    assert stats.spec_draft_tokens > 0
    assert (stats.spec_accepted_tokens == stats.spec_draft_tokens) == (target == draft)


def test_an_assistant_that_drafts_in_one_pass():
    from tests.tiny import pard

    assistant = pard.model("qwen2", "llama")
    assistant.config.pard_token = pard.MASK
    with load(tiny.reference("llama"), **fixed(assistant, "pard")) as llm:
        assert generate(llm) == expected("llama")
        assert llm.stats().spec_accepted_per_pos[2] > 0


def matrices(module: Any) -> dict[int, str]:
    return {p.data_ptr(): name for name, p in module.named_parameters() if p.ndim == 2}


def kept(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Models as they are once loaded."""
    from octavo.worker import worker

    seen: list[Any] = []
    fill = worker.load_weights

    def filled(model: Any, weights: Any) -> None:
        fill(model, weights)
        seen.append(model)

    monkeypatch.setattr(worker, "load_weights", filled)
    return seen


def test_what_needs_no_other_form_is_not_copied(monkeypatch: pytest.MonkeyPatch):
    """The embedding always; with a layout that isn't packed, every matrix that isn't merged, too."""
    from octavo.quantization import linear_method

    module, seen = tiny.reference("llama"), kept(monkeypatch)
    with load(module):
        shared = {matrices(module).get(p.data_ptr()) for p in seen[0].parameters()} - {None}
    assert shared == {"model.embed_tokens.weight"}
    monkeypatch.setattr(linear_method, "packs", lambda *_: False)
    with load(module) as llm:
        shared = {matrices(module).get(p.data_ptr()) for p in seen[1].parameters()} - {None}
        assert generate(llm) == expected("llama")
    assert {name.split(".")[-2] for name in shared} == {"embed_tokens", "lm_head", "o_proj", "down_proj"}
    assert len(shared) == 2 + 2 * 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_type_is_the_modules(dtype: torch.dtype):
    module = tiny.build("llama").to(dtype)
    folder = tiny.root() / f"modules-{dtype}"
    module.save_pretrained(folder)
    settings = {**SETTINGS, "dtype": "auto"}
    with LLM(str(folder), skip_tokenizer_init=True, **settings) as llm:
        want, summary = generate(llm), llm.facts.summary
    with load(module, dtype="auto") as llm:
        assert generate(llm) == want
        assert llm.facts.summary["dtype"] == summary["dtype"]
        assert llm.facts.summary["weights"] == summary["weights"]


def test_text_by_the_tokenizer_that_was_given():
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny.checkpoint("llama"))
    params = SamplingParams(temperature=0.0, max_tokens=12)

    def answers(llm: LLM) -> list[Any]:
        chat = llm.chat([{"role": "user", "content": "some words"}], params, use_tqdm=False)
        return [*llm.generate("some words", params, use_tqdm=False), *chat]

    with load(tiny.reference("llama"), tokenizer, **fixed(tiny.reference("qwen2"))) as llm:
        texts, folders = answers(llm), list(held._held)
    with LLM(str(tiny.checkpoint("llama")), **SETTINGS) as llm:
        again = answers(llm)
    for got, want in zip(texts, again, strict=True):
        assert got.prompt_token_ids == want.prompt_token_ids
        assert got.outputs[0].text == want.outputs[0].text
    assert folders == []  # nothing is held once it is loaded


def test_sampling_defaults_and_ends_are_the_modules():
    module = tiny.build("llama")
    module.generation_config.temperature, module.generation_config.top_k = 0.5, 7
    first = tiny.greedy("llama", 0)[0]
    module.generation_config.eos_token_id = [first, 2]
    with load(module) as llm:
        assert llm.get_default_sampling_params().temperature == 0.5
        assert llm.get_default_sampling_params().top_k == 7
        params = SamplingParams(temperature=0.0, max_tokens=5, detokenize=False)
        output = llm.generate([tiny.PROMPTS[0]], params, use_tqdm=False)[0].outputs[0]
        assert output.token_ids == [first] and output.finish_reason == "stop"


def test_keys_of_blocks_tell_weights_apart():
    roots = []
    for change in (0.0, 0.0, 1.0):
        module = tiny.build("llama")
        with torch.no_grad():
            module.model.layers[1].mlp.up_proj.weight[0, 0] += change
        with load(module) as llm:
            roots.append(llm.facts.cache_root)
    assert roots[0] == roots[1] != roots[2]


def test_files_are_removed_when_it_is_closed(monkeypatch: pytest.MonkeyPatch):
    seen: list[Path] = []
    remove = GivenModules.remove
    monkeypatch.setattr(GivenModules, "remove", lambda given: (seen.append(given.folder), remove(given)))
    with load(tiny.reference("llama")) as llm:
        folder = Path(llm.config.model)
        assert sorted(p.name for p in folder.iterdir()) == ["config.json", "generation_config.json"]
        with pytest.raises(RequestError, match="level=2"):
            llm.sleep(2)
        llm.sleep(1)
        llm.wake_up()
        assert generate(llm) == expected("llama")
    assert not folder.exists() and seen == [folder.parent]
    with pytest.raises(OctavoError):
        load(tiny.reference("llama"), max_model_len=1 << 20)
    assert len(seen) == 2 and not seen[1].exists() and not held._held


class Own(transformers.LlamaForCausalLM):
    """A class of a user's."""


def on_meta() -> Any:
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(tiny.reference("llama").config)


def quantized() -> Any:
    module = tiny.build("llama")
    module.config.quantization_config = {"quant_method": "fp8"}
    return module


def lacking() -> Any:
    module = tiny.build("llama")
    del module.model.layers[2]
    return module


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "a name": (lambda: "some/model", {}, "is a name, no module"),
    "none": (lambda: None, {}, "without a config"),
    "no model": (lambda: torch.nn.Linear(2, 2), {}, "without a config"),
    "a user's class": (lambda: Own(tiny.reference("llama").config), {}, "Own, whose own code"),
    "no head": (lambda: tiny.reference("llama").model, {}, "LlamaModel, which makes no texts"),
    "quantized": (quantized, {}, "quantized by transformers"),
    "on meta": (on_meta, {}, "without contents"),
    "float64": (lambda: tiny.build("llama").double(), {}, "in float64"),
    "fewer layers": (lacking, {}, "'model.layers.2.* is missing"),
    "another device": (lambda: tiny.reference("llama"), {"device": "cuda"}, "model is on cpu"),
    "ranks": (lambda: tiny.reference("llama"), {"tensor_parallel_size": 2}, "ranks run in others"),
    "no setting": (lambda: tiny.reference("llama"), {"no_setting": 2}, "no setting no_setting"),
    "a draft by name": (
        lambda: tiny.reference("llama"),
        {"draft": tiny.reference("qwen2"), "speculative_model": "x"},
        "'x' is to draft",
    ),
    "two drafts": (
        lambda: tiny.reference("llama"),
        {"draft": tiny.reference("qwen2"), "speculative_config": {"method": "draft_model", "model": "x"}},
        "'x' is to draft",
    ),
    "no tokenizer": (lambda: tiny.reference("llama"), {"tokenizer_": object()}, "tokenizer is a object"),
    "another vocabulary": (
        lambda: tiny.reference("llama"), {"draft": fallback.reference("Qwen2")}, "199 tokens, not 384"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str):
    make, settings, words = REFUSED[case]
    model, settings = make(), dict(settings)
    tokenizer, draft = settings.pop("tokenizer_", None), settings.pop("draft", None)
    with pytest.raises(OctavoError, match=words) as error:
        LLM.from_transformers(model, tokenizer, draft, **{**SETTINGS, **settings})
    assert "\n" not in str(error.value) and str(tiny.root().parent / "octavo-modules") not in str(error.value)
    assert not held._held


def test_an_architecture_that_nobody_knows():
    module = tiny.build("llama")
    module.config.__class__ = type("NewConfig", (type(module.config),), {"model_type": "new"})
    module.__class__ = type("NewForCausalLM", (type(module),), {})
    type(module).__module__ = "transformers.models.new"
    with pytest.raises(OctavoError, match="model_type 'new' is known neither"):
        load(module)


def test_adapters_are_to_be_merged():
    module = tiny.build("llama")
    module._hf_peft_config_loaded = True
    with pytest.raises(ConfigError, match="merge it first"):
        load(module)
