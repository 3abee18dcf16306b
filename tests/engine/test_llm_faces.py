"""What users type: snippets, prompts of every kind, bad input; and what the engine does after it."""

from __future__ import annotations

import json
import math
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest

from octavo import LLM, SamplingParams, TextPrompt, TokensPrompt
from octavo.errors import ConfigError, EngineDeadError, ModelError, RequestError
from octavo.progress import RequestBar
from tests import tiny

SMALL = dict(
    dtype="float32", device="cpu", num_threads=1, kv_cache_memory_bytes=8 << 20, check_invariants=True
)


@pytest.fixture(scope="module")
def llm():
    with LLM(str(tiny.checkpoint("llama")), max_model_len=200, **SMALL) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_is_left(request):
    yield
    if "llm" in request.fixturenames:
        engine = request.getfixturevalue("llm")
        engine.generate([[5, 6, 7]], SamplingParams(max_tokens=1), use_tqdm=False)
        stats = engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.kv_blocks_used) == (0, 0, 0)


def test_first_snippet_with_the_import_changed():
    model = str(tiny.checkpoint("llama"))
    settings = dict(
        tensor_parallel_size=1,
        gpu_memory_utilization=0.9,
        max_num_batched_tokens=8192,
        enforce_eager=False,
        swap_space=1,
    )
    with pytest.raises(ConfigError, match="swap_space=99999 GiB is more host memory than is free"):
        LLM(model=model, **(settings | dict(swap_space=99999)))
    llm = LLM(model=model, **settings, **SMALL)
    params = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=12)
    outputs = llm.generate(["Hello, my name is", "The capital of France is"], params)
    for output in outputs:
        choice = output.outputs[0]
        assert choice.finish_reason in ("length", "stop")
        assert isinstance(choice.text, str)
        assert len(choice.token_ids) <= 12
    llm.close()
    llm = LLM(model=model, enable_prefix_caching=True, **SMALL)
    llm.close()
    with pytest.raises(EngineDeadError, match="closed"):
        llm.generate("x", params)


@pytest.mark.parametrize("settings, name", [
    (dict(quantization="fp4"), "quantization"),
    (dict(kv_cache_dtype="fp4"), "kv_cache_dtype"),
    (dict(num_speculative_tokens=5), "names no method"),
    (dict(speculative_config={"method": "ngramm"}), "did you mean ngram"),
    (dict(tensor_parallel_size=2, device="cuda:0"), "tensor_parallel_size"),
    (dict(pipeline_parallel_size=2, device="cuda:0"), "pipeline_parallel_size"),
    (dict(pipeline_parallel_size=2, pp_layer_partition="2,x"), "pp_layer_partition"),
    (dict(enable_lora=True), "enable_lora"),
    (dict(max_lora_rank=16), "max_lora_rank=16 is not supported: this version serves no adapters"),
    (dict(enable_chunked_prefill=False), "enable_chunked_prefill"),
    (dict(gpu_memory_utilisation=0.5), "gpu_memory_utilization"),
    (dict(block_size=17), "block_size"),
    (dict(dtype="bfloat"), "dtype"),
    (dict(max_model_len=1), "max_model_len"),
    (dict(max_model_len="4x"), "4x"),
    (dict(max_num_seqs=0), "max_num_seqs"),
    (dict(gpu_memory_utilization=math.nan), "gpu_memory_utilization"),
    (dict(prefix_caching_hash_algo="md5"), "prefix_caching_hash_algo"),
    (dict(device="tpu"), "device"),
    (dict(num_threads=10**9), "num_threads"),
])  # fmt: skip
def test_settings_that_cannot_be_served_are_refused_by_name(settings, name):
    with pytest.raises(ConfigError, match=name) as caught:
        LLM(model=str(tiny.checkpoint("llama")), **settings)
    assert "\n" not in str(caught.value)


def test_models_that_cannot_be_loaded(tmp_path):
    with pytest.raises(ModelError, match="no-such-model"):
        LLM("no-such-model", **SMALL)
    with pytest.raises(ConfigError, match="max_model_len=100000"):
        LLM(str(tiny.checkpoint("llama")), max_model_len=100000, **SMALL)
    with pytest.raises(ConfigError, match="one block needs"):
        LLM(str(tiny.checkpoint("llama")), **(SMALL | dict(kv_cache_memory_bytes=10)))
    with pytest.raises(ConfigError, match="does not fit"):
        LLM(str(tiny.checkpoint("llama")), **(SMALL | dict(kv_cache_memory_bytes=1 << 60)))
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens=1000000000000\b"):
        LLM(str(tiny.checkpoint("llama")), max_num_batched_tokens=10**12, **SMALL)


def test_a_prompt_that_is_too_long_is_told_as_clients_know_it(llm):
    with pytest.raises(RequestError, match="this model's maximum context length is 200 tokens") as caught:
        llm.generate([[5] * 200], use_tqdm=False)
    assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")


def test_choices_that_would_fill_memory_are_refused(llm, monkeypatch):
    monkeypatch.setattr("octavo.engine.input_processor.MOST_HELD", 1000)
    params = SamplingParams(n=8, max_tokens=2, ignore_eos=True, allowed_token_ids=list(range(20, 120)))
    with pytest.raises(
        RequestError, match="n=8 choices of 150 token ids each .* are more than 1000: lower n"
    ):
        llm.generate([[5] * 50], params, use_tqdm=False)
    assert len(llm.generate([[5] * 25], params, use_tqdm=False)[0].outputs) == 8


def test_prompts_of_every_kind(llm):
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    ids = llm.get_tokenizer().encode("The quick brown fox")
    one = llm.generate("The quick brown fox", params, use_tqdm=False)
    assert len(one) == 1
    assert one[0].prompt == "The quick brown fox"
    assert one[0].prompt_token_ids == ids
    kinds = [ids, "The quick brown fox", {"prompt": "The quick brown fox"}, {"prompt_token_ids": ids}]
    kinds += [TextPrompt(prompt="The quick brown fox"), TokensPrompt(prompt_token_ids=ids)]
    for output in [*llm.generate(kinds, params, use_tqdm=False), *llm.generate(ids, params, use_tqdm=False)]:
        assert output.prompt_token_ids == ids
        assert output.outputs[0].token_ids == one[0].outputs[0].token_ids
    each = llm.generate([ids, ids], [params, params.clone(max_tokens=2)], use_tqdm=False)
    assert [len(o.outputs[0].token_ids) for o in each] == [4, 2]
    assert llm.generate([], params, use_tqdm=False) == []


def test_stream_adds_up_to_generate(llm):
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, logprobs=2)
    whole = llm.generate("A page of", params, use_tqdm=False)[0].outputs[0]
    parts = list(llm.stream("A page of", params))
    assert "".join(p.outputs[0].text for p in parts) == whole.text
    assert [t for p in parts for t in p.outputs[0].token_ids] == whole.token_ids
    assert sum(len(p.outputs[0].logprobs) for p in parts) == 30
    assert parts[-1].finished
    assert not parts[0].finished
    stream = llm.stream("A page of", params)
    next(stream)
    stream.close()


def test_logprobs_have_the_chosen_token_and_the_likeliest(llm):
    params = SamplingParams(temperature=0.0, max_tokens=5, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    output = llm.generate("A page of", params, use_tqdm=False)[0]
    choice = output.outputs[0]
    assert len(choice.logprobs) == 5
    for token, entry in zip(choice.token_ids, choice.logprobs, strict=True):
        assert entry[token].rank == 1
        assert len(entry) == 3
        assert entry[token].decoded_token == llm.get_tokenizer().decode([token], skip_special_tokens=False)
    chosen = [entry[token].logprob for token, entry in zip(choice.token_ids, choice.logprobs, strict=True)]
    assert choice.cumulative_logprob == pytest.approx(sum(chosen))
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)


def test_stop_strings_and_choices(llm):
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    text = llm.generate("Numbers such as", params, use_tqdm=False)[0].outputs[0].text
    stop = text[6:9]
    cut = llm.generate("Numbers such as", params.clone(stop=[stop, "never there"]), use_tqdm=False)[
        0
    ].outputs[0]
    assert cut.text == text[: text.index(stop)]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    times = llm.generate("Numbers such as", params.clone(stop=stop), use_tqdm=False)[0].metrics
    assert 0 < times.first_token_time <= times.last_token_time <= times.finished_time
    kept = params.clone(stop=stop, include_stop_str_in_output=True)
    assert llm.generate("Numbers such as", kept, use_tqdm=False)[0].outputs[0].text == cut.text + stop
    many = llm.generate("Numbers such as", params.clone(temperature=1.0, n=4, max_tokens=6), use_tqdm=False)[
        0
    ]
    assert [choice.index for choice in many.outputs] == [0, 1, 2, 3]
    assert all(len(choice.token_ids) == 6 for choice in many.outputs)


@pytest.mark.parametrize("limit", [-1, 0, 1, 150, 200, 201])
def test_max_tokens_beyond_the_context_are_clamped(llm, limit):
    prompt = list(range(5, 55))
    if limit < 1:
        wanted = SamplingParams(temperature=0.0, max_tokens=150 + limit, ignore_eos=True)
    else:
        wanted = SamplingParams(temperature=0.0, max_tokens=limit, ignore_eos=True)
    choice = llm.generate([prompt], wanted, use_tqdm=False)[0].outputs[0]
    assert len(choice.token_ids) == min(wanted.max_tokens, 150)
    assert choice.finish_reason == "length"
    for length in (200, 201):
        with pytest.raises(RequestError, match=rf"{length} tokens.*200"):
            llm.generate([[5] * length], wanted, use_tqdm=False)


def test_requests_that_can_never_fit_are_refused_at_once():
    per_token = 3 * 2 * 2 * 16 * 4
    settings = SMALL | dict(kv_cache_memory_bytes=96 * per_token)
    with LLM(str(tiny.checkpoint("llama")), max_model_len=250, **settings) as llm:
        assert llm.facts.kv_capacity == 96
        params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
        for length in (200, 60):
            with pytest.raises(RequestError, match=r"96 tokens.*shorten"):
                llm.generate([[5] * length], params, use_tqdm=False)
        small = llm.generate([[5] * 20], params, use_tqdm=False)[0].outputs[0]
        assert len(small.token_ids) == 60
        # The whole pool, to the last block; and what max_tokens=None leaves room for.
        full = llm.generate([[5] * 37], params, use_tqdm=False)[0].outputs[0]
        assert len(full.token_ids) == 60
        rest = llm.generate([[5] * 90], params.clone(max_tokens=None), use_tqdm=False)[0].outputs[0]
        assert len(rest.token_ids) == 7


def test_max_model_len_auto_takes_what_fits():
    per_token = 3 * 2 * 2 * 16 * 4
    settings = SMALL | dict(kv_cache_memory_bytes=96 * per_token)
    with LLM(str(tiny.checkpoint("llama")), max_model_len="auto", **settings) as llm:
        assert llm.facts.max_model_len == 96
    with LLM(str(tiny.checkpoint("llama")), max_model_len=-1, **SMALL) as llm:
        assert llm.facts.max_model_len == tiny.CONTEXT


@pytest.mark.parametrize("prompt", [
    [], "", [-1], [tiny.VOCAB_SIZE], [1 << 40], [1.5], [True], ["a", 3], None, {"prompt": None},
    {"tokens": [1]},
    "\ud800", {"prompt": "x", "multi_modal_data": {}},
])  # fmt: skip
def test_bad_prompts_are_named_and_harm_nothing(llm, prompt):
    with pytest.raises(RequestError) as caught:
        llm.generate([prompt], SamplingParams(max_tokens=2), use_tqdm=False)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("fields, name", [
    (dict(stop_token_ids=[tiny.VOCAB_SIZE], min_tokens=1), "stop_token_ids"),
    (dict(allowed_token_ids=[tiny.VOCAB_SIZE]), "allowed_token_ids"),
    (dict(logit_bias={tiny.VOCAB_SIZE: 1.0}), "logit_bias"),
    (dict(logprobs=21), "logprobs"),
    (dict(prompt_logprobs=-1), "prompt_logprobs"),
    (dict(allowed_token_ids=[tiny.EOS], min_tokens=1), "allowed_token_ids"),
    (dict(max_tokens=None, min_tokens=300), "min_tokens"),
])  # fmt: skip
def test_params_that_the_model_cannot_serve(llm, fields, name):
    with pytest.raises(RequestError, match=name):
        llm.generate([[5, 6]], SamplingParams(**(dict(max_tokens=2) | fields)), use_tqdm=False)


@pytest.mark.parametrize("fields, name", [
    (dict(stop_token_ids=list(range(tiny.VOCAB_SIZE)), min_tokens=1), "stop_token_ids"),
    (dict(allowed_token_ids=[ord("a") - 28], bad_words=["a"]), "bad_words"),
    (dict(allowed_token_ids=[ord("a") - 28, tiny.EOS], bad_words=["a"], min_tokens=2), "bad_words"),
])  # fmt: skip
def test_settings_that_forbid_every_token(llm, fields, name):
    assert llm.get_tokenizer().encode("a") == [ord("a") - 28]
    with pytest.raises(RequestError, match=name):
        llm.generate([[5, 6]], SamplingParams(max_tokens=4, **fields), use_tqdm=False)


@pytest.mark.parametrize("call", [
    lambda llm: llm.generate(None),
    lambda llm: llm.generate(5),
    lambda llm: llm.generate(b"abc"),
    lambda llm: llm.generate([b"abc"]),
    lambda llm: llm.generate({"prompt_token_ids": 5}),
    lambda llm: llm.generate({"prompt_token_ids": "abc"}),
    lambda llm: llm.generate("x", {"temperature": 0}),
    lambda llm: llm.generate("x", "y"),
    lambda llm: llm.generate("x", 5),
    lambda llm: llm.generate("x", [None]),
    lambda llm: llm.chat(None),
    lambda llm: llm.chat("hello"),
    lambda llm: llm.score(5, 5),
    lambda llm: llm.score(None, "x"),
])  # fmt: skip
def test_arguments_of_the_wrong_type_are_named(llm, call):
    with pytest.raises(RequestError) as caught:
        call(llm)
    assert "\n" not in str(caught.value)


def test_calls_beside_an_open_stream_of_the_same_thread_are_refused(llm):
    stream = llm.stream([5, 6, 7], SamplingParams(max_tokens=100, ignore_eos=True))
    next(stream)
    with pytest.raises(RequestError, match="stream"):
        llm.generate("x", use_tqdm=False)
    others = ThreadPoolExecutor(1)
    waiting = others.submit(llm.generate, "x", SamplingParams(max_tokens=3, ignore_eos=True), False)
    stream.close()
    assert len(waiting.result(20)[0].outputs[0].token_ids) == 3
    others.shutdown()


def test_an_interrupt_ends_the_call_and_nothing_else(llm, monkeypatch):
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    expected = llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs[0].token_ids

    def interrupt(*_):
        raise KeyboardInterrupt

    kept = []
    for cls, name in ((RequestBar, "advance"), (type(llm._outputs), "process"), (type(llm._client), "send")):
        with monkeypatch.context() as patch:
            patch.setattr(cls, name, interrupt)
            with pytest.raises(KeyboardInterrupt) as caught:
                llm.generate([[5, 6, 7], [5, 6]], [params, params.clone(max_tokens=150)], use_tqdm=False)
        kept.append(caught)  # as interactive shells keep the traceback, and with it the call's frames
        assert len(llm._outputs) == 0
        outputs = llm.generate([[5, 6, 7]] * 2, params, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == [expected] * 2


def test_closing_ends_a_call_of_another_thread():
    llm = LLM(str(tiny.checkpoint("llama")), **SMALL)
    stream = llm.stream([5, 6, 7], SamplingParams(max_tokens=200, ignore_eos=True))
    next(stream)
    with ThreadPoolExecutor(1) as others:
        others.submit(llm.close).result(20)
    with pytest.raises(EngineDeadError, match="closed"):
        list(stream)
    llm.close()


def test_end_tokens_beyond_the_vocabulary_are_left_out(tmp_path):
    shutil.copytree(tiny.checkpoint("llama"), tmp_path, dirs_exist_ok=True)
    ends = [tiny.EOS, -1, tiny.VOCAB_SIZE, 1 << 40]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    with LLM(str(tmp_path), **SMALL) as llm:
        output = llm.generate([[5, 6]], SamplingParams(max_tokens=4, min_tokens=4), use_tqdm=False)[0]
        assert len(output.outputs[0].token_ids) == 4


def test_sampling_defaults_that_are_no_settings_are_the_models_fault(tmp_path):
    shutil.copytree(tiny.checkpoint("llama"), tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_p": 2.0}))
    with pytest.raises(ModelError, match=r"top_p=2.0.*generation_config"):
        LLM(str(tmp_path), **SMALL)
    with LLM(str(tmp_path), generation_config="none", **SMALL) as llm:
        assert llm.get_default_sampling_params().top_p == 1.0


def test_sampling_defaults_are_the_file_s_with_the_settings_in_their_place(tmp_path, caplog):
    shutil.copytree(tiny.checkpoint("llama"), tmp_path, dirs_exist_ok=True)
    stated = {"temperature": 0.3, "top_k": 5, "max_new_tokens": 9}
    (tmp_path / "generation_config.json").write_text(json.dumps(stated))
    override = {"top_k": 7, "max_new_tokens": 3}
    with LLM(str(tmp_path), override_generation_config=override, **SMALL) as llm:
        params = llm.get_default_sampling_params()
        assert (params.temperature, params.top_k, params.max_tokens) == (0.3, 7, 3)
        output = llm.generate([[5, 6]], use_tqdm=False)[0]
        assert len(output.outputs[0].token_ids) <= 3
    with LLM(str(tmp_path), generation_config="none", override_generation_config=override, **SMALL) as llm:
        params = llm.get_default_sampling_params()
        assert (params.temperature, params.top_k, params.max_tokens) == (1.0, 7, 3)
    with LLM(str(tmp_path), **SMALL) as llm:
        assert llm.get_default_sampling_params().max_tokens == 9


def blocks(count, **settings):
    rest = {name: value for name, value in SMALL.items() if name != "kv_cache_memory_bytes"}
    return LLM(str(tiny.checkpoint("llama")), num_gpu_blocks_override=count, **rest, **settings)


def test_blocks_are_as_many_as_the_setting_says(llm):
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    prompts = [[i, i + 1, i + 2] * 8 for i in range(5, 13)]
    wanted = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    few = dict(block_size=8, max_model_len=64, look_ahead_admission=False)
    with blocks(20, **few) as small:  # each takes 6
        assert small.facts.num_blocks == small.stats().kv_blocks_total == 20
        found = [output.outputs[0].token_ids for output in small.generate(prompts, params, use_tqdm=False)]
        assert found == wanted and small.stats().num_preemptions > 0
    with blocks(1000, max_num_seqs=1, max_model_len=64) as many:  # more than its requests can fill
        assert many.facts.num_blocks == 1000


def test_blocks_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError) as caught:
        blocks(10**12)
    told = str(caught.value)
    assert told.startswith("num_gpu_blocks_override=1000000000000 (") and "\n" not in told
    assert "does not fit" in told and told.endswith("lower num_gpu_blocks_override")
    with pytest.raises(ConfigError, match=r"3 groups of layers one each: raise num_gpu_blocks_override"):
        LLM(str(tiny.checkpoint("gemma2")), device="cpu", num_gpu_blocks_override=1)
    with pytest.raises(ConfigError, match="num_gpu_blocks_override=5 and kv_cache_memory_bytes=100 both"):
        LLM(str(tiny.checkpoint("llama")), num_gpu_blocks_override=5, kv_cache_memory_bytes=100)


def test_adapters_and_salts_are_checked(llm):
    with pytest.raises(RequestError, match="lora_request"):
        llm.generate("x", SamplingParams(max_tokens=1), use_tqdm=False, lora_request=object())
    for salt in ("", "a" * 129, "a/b", "a@b", "a\\b", "a\0b", 5, "\ud800"):
        with pytest.raises(RequestError, match="cache_salt"):
            llm.generate({"prompt": "x", "cache_salt": salt}, SamplingParams(max_tokens=1), use_tqdm=False)


def test_chat_renders_the_template_and_reuses_the_conversation(llm):
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    messages = [{"role": "user", "content": "What is the capital of France? 今天天气很好"}]
    first = llm.chat(messages, params, use_tqdm=False)[0]
    assert first.prompt == "<|user|>What is the capital of France? 今天天气很好</s><|assistant|>"
    answer = {"role": "assistant", "content": first.outputs[0].text}
    both = llm.chat(
        [messages, [*messages, answer, {"role": "user", "content": "And?"}]], params, use_tqdm=False
    )
    assert both[0].outputs[0].token_ids == first.outputs[0].token_ids
    assert both[0].num_cached_tokens > 0


def test_chat_template_of_the_settings_is_a_file_or_a_text(tmp_path):
    text = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    file = tmp_path / "own.jinja"
    file.write_text(text)
    for given in (str(file), text):
        with LLM(str(tiny.checkpoint("llama")), chat_template=given, **SMALL) as llm:
            assert llm.render_chat([{"role": "user", "content": "Hi"}])["prompt"] == "[Hi]"
    for wrong in (str(tmp_path / "none.jinja"), "{% for"):
        with pytest.raises(ConfigError, match="template"):
            LLM(str(tiny.checkpoint("llama")), chat_template=wrong, **SMALL)


def test_token_ids_alone_need_no_tokenizer():
    with LLM(str(tiny.checkpoint("llama")), skip_tokenizer_init=True, **SMALL) as llm:
        output = llm.generate([tiny.PROMPTS[0]], SamplingParams(temperature=0, max_tokens=5), use_tqdm=False)[
            0
        ]
        assert output.outputs[0].token_ids == tiny.greedy("llama", 0)[:5]
        assert output.outputs[0].text == ""
        for call in (lambda: llm.generate("text"), lambda: llm.chat([{"role": "user", "content": "x"}])):
            with pytest.raises(RequestError, match="skip_tokenizer_init"):
                call()


def test_dummy_weights_need_only_a_config(tmp_path):
    (tmp_path / "config.json").write_text((tiny.checkpoint("llama") / "config.json").read_text())
    settings = SMALL | dict(skip_tokenizer_init=True, load_format="dummy")
    tokens = []
    for seed in (0, 0, 1):
        with LLM(str(tmp_path), seed=seed, **settings) as llm:
            params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
            tokens.append(llm.generate([tiny.PROMPTS[1]], params, use_tqdm=False)[0].outputs[0].token_ids)
    assert tokens[0] == tokens[1] != tokens[2]


def test_the_cache_root_is_the_same_after_a_restart_and_differs_between_models():
    def root(variant: str, **settings) -> bytes:
        with LLM(str(tiny.checkpoint(variant)), **(SMALL | settings)) as llm:
            return llm.facts.cache_root

    base = root("llama")
    assert root("llama") == base
    assert root("llama", max_model_len=100) == base
    assert root("dynamic", max_model_len=300) != root("dynamic", max_model_len=500)
    others = [root("llama-tied"), root("llama", block_size=32), root("llama", dtype="bfloat16")]
    assert len({base, *others}) == 4
