"""Requests with a form among others: over the pretend model with pretend grammars, and over real ones."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Sequence

import numpy as np
import pytest

from octavo import LLM, RequestError, SamplingParams, StructuredOutputsParams
from octavo.engine import grammar_compiler
from octavo.engine.core import EngineCore
from octavo.messages import CoreOutput, CoreRequest
from octavo.sampling.structured.backend import Backend, Grammar, GrammarState
from octavo.step_messages import StepPlan, TokenMasks
from tests import tiny
from tests.engine import simulation as sim

WORDS = -(-sim.VOCAB // 32)
END_AT = 9  # tokens of a text of the pretend grammars


def allowed(place: int) -> np.ndarray:
    """Which tokens the pretend grammars allow at a place of the output."""
    return np.arange(sim.VOCAB) % 7 == place % 7


def choose(text: tuple[int, ...], mask: np.ndarray) -> int:
    """The pretend model's token under a mask."""
    options = np.flatnonzero(mask)
    return int(options[sim.next_token(text) % len(options)])


def expected_form(prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    for place in range(END_AT):
        tokens.append(choose(tuple(tokens), allowed(place)))
    return tokens[len(prompt) :]


class PretendState(GrammarState):
    """Masks take `seconds` of work, or at every other place, if moody, as long without any."""

    def __init__(self, seconds: float, moody: bool = False):
        self._place, self._seconds, self._moody = 0, seconds, moody

    def fill_mask(self, row: np.ndarray) -> None:
        idle = self._moody and self._place % 2 == 0
        if idle:
            time.sleep(self._seconds)
        until = time.thread_time() + (0 if idle else self._seconds)
        while time.thread_time() < until:
            time.sleep(0)  # work that leaves the interpreter to others
        padded = np.zeros(WORDS * 32, bool)
        padded[: sim.VOCAB] = allowed(self._place)
        row[:] = np.packbits(padded, bitorder="little").view(np.int32)

    def accept(self, tokens: Sequence[int]) -> int:
        for count, token in enumerate(tokens):
            if self.is_terminated or not allowed(self._place)[token]:
                return count
            self._place += 1
        return len(tokens)

    def rollback(self, count: int) -> None:
        self._place -= count

    @property
    def is_terminated(self) -> bool:
        return self._place == END_AT


class PretendGrammar(Grammar):
    def __init__(self, seconds: float, moody: bool = False):
        self._seconds, self._moody = seconds, moody
        self.first_mask = np.zeros(WORDS, np.int32)
        PretendState(0).fill_mask(self.first_mask)

    def new_state(self) -> GrammarState:
        return PretendState(self._seconds, self._moody)


class PretendBackend(Backend):
    """A form's text says what becomes of it: slow, moody, wait (for `gate`), wrong, broken, or nothing."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.compiled = 0

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        self.compiled += 1
        if params.text.startswith("wait"):
            assert self.gate.wait(10)
        if params.text == "wrong":
            raise RequestError("the form is wrong", "structured_outputs")
        if params.text == "broken":
            raise RuntimeError("the library\nfell over")
        return PretendGrammar(0.004 if params.text in ("slow", "moody") else 0.0, params.text == "moody")


class _Pending:
    def __init__(self, executor: Masked, plan: StepPlan, done: sim.Done):
        self._executor, self._plan, self._done = executor, plan, done
        self._sampled = plan.masked is None

    def sample(self, masks: TokenMasks) -> None:
        assert not self._sampled
        self._sampled = True
        plan = self._plan
        assert (
            plan.masked is not None and (masks.rows == plan.masked).all() and plan.samples[masks.rows].all()
        )
        bits = np.unpackbits(masks.bits.view(np.uint8), axis=1, bitorder="little")[:, : sim.VOCAB]
        for row, mask in zip(masks.rows, bits, strict=True):
            slot, end = plan.slots[row], plan.start[row] + plan.num_rows[row]
            if not mask.any():
                continue  # a request that has ended: nobody reads its row
            token = choose(tuple(self._executor.tokens[slot, :end].tolist()), mask)
            self._done.result.tokens[row] = token
            if end < self._executor.tokens.shape[1]:
                self._executor.tokens[slot, end] = token
        if plan.step_id in self._executor.failing_draws:
            raise RuntimeError("pretend failure while drawing")

    def wait(self):
        assert self._sampled, "a step was read before its tokens were drawn"
        return self._done.wait()


class Masked(sim.PretendExecutor):
    """Draws under masks."""

    failing_draws: frozenset[int] = frozenset()

    def execute(self, plan: StepPlan):
        return _Pending(self, plan, super().execute(plan))


def make_core(num_blocks: int = 64, **settings) -> tuple[EngineCore, PretendBackend]:
    core = sim.make_core(num_blocks, **settings)
    core.executor.__class__ = Masked
    core.wrap_stages(None)  # which looks at the executor's methods again
    backend = core.grammars._backend = PretendBackend()
    return core, backend


def request(
    name: str, prompt: list[int], form: str | None = None, max_tokens: int = 40, **params
) -> CoreRequest:
    structured = None if form is None else StructuredOutputsParams(regex=form)
    settings = SamplingParams(temperature=0, max_tokens=max_tokens, structured_outputs=structured, **params)
    return CoreRequest(request_id=name, prompt_token_ids=prompt, params=settings, seed=0)


class Run:
    """What became of requests."""

    def __init__(self, core: EngineCore):
        self.core = core
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, CoreOutput] = {}

    def take(self, outputs: list[CoreOutput]) -> None:
        for out in outputs:
            assert out.request_id not in self.ends
            self.tokens.setdefault(out.request_id, []).extend(out.new_token_ids)
            if out.finish_reason is not None:
                self.ends[out.request_id] = out

    def go(self, steps: int = 3000, until: str | None = None) -> None:
        deadline = time.monotonic() + 30
        for _ in range(steps):
            self.take(self.core.admit_compiled())
            waits = self.core.grammars.num_waiting
            if until in self.ends or not (self.core.has_work or (waits and until is None)):
                return
            assert time.monotonic() < deadline
            if self.core.has_work:
                self.take(self.core.step())
            else:
                time.sleep(0.001)
        raise AssertionError("not done")


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_forms_hold_whatever_happens(overlap, seed):
    """Preemption, chunks, aborts, shared beginnings and slow masks: the tokens are those of a lone run."""
    draw = random.Random(seed)
    core, _ = make_core(num_blocks=draw.choice((14, 20, 64)), async_scheduling=overlap, max_num_seqs=6)
    run, prompts, forms = Run(core), {}, {}
    for i in range(24):
        name = f"r{i}"
        head = list(range(16)) if draw.random() < 0.4 else []
        prompts[name] = head + [draw.randrange(sim.VOCAB) for _ in range(draw.randint(1, 40))]
        forms[name] = draw.choice((None, "easy", "easy", "slow", "moody"))
        core.add(request(name, prompts[name], forms[name], draw.choice((12, 40))))
        for _ in range(draw.randint(0, 3)):
            run.take(core.admit_compiled() + (core.step() if core.has_work else []))
        if draw.random() < 0.1:
            run.take(core.abort([name]))
    run.go()
    assert set(run.ends) == set(prompts)
    for name, prompt in prompts.items():
        end = run.ends[name]
        if end.finish_reason == "abort":
            continue
        if forms[name] is None:
            assert run.tokens[name] == sim.expected(prompt, len(run.tokens[name]))
            assert end.finish_reason == "length" and not end.complete
        else:
            assert run.tokens[name] == expected_form(prompt)
            assert end.finish_reason == "stop" and end.complete
    stats = core.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_blocks_used) == (0, 0, 0)


def test_preemption_happens_in_the_test_above():
    core, _ = make_core(num_blocks=8, max_num_seqs=6)
    run = Run(core)
    prompts = {f"r{i}": [i] * 12 for i in range(6)}
    for name, prompt in prompts.items():
        core.add(request(name, prompt, "easy"))
    run.go()
    assert core.stats().num_preemptions > 0
    assert all(run.tokens[name] == expected_form(prompt) for name, prompt in prompts.items())


@pytest.mark.parametrize("overlap", [False, True])
def test_a_hard_grammar_does_not_hold_its_neighbours(overlap):
    """Its row stays out of the steps while its mask is made; the others go on in each of them."""
    core, _ = make_core(async_scheduling=overlap)
    run = Run(core)
    core.add(request("hard", [1, 2], "slow"))
    core.add(request("plain", [3, 4], max_tokens=150))
    core.add(request("easy", [5, 6], "easy"))
    run.go()
    assert run.tokens["hard"] == expected_form([1, 2])
    assert run.tokens["easy"] == expected_form([5, 6])
    assert run.tokens["plain"] == sim.expected([3, 4], 150)
    without = [plan for plan in core.executor.plans if plan.masked is None and len(plan.slots)]
    # Only the first slow mask was waited for; the grammar's other tokens came between the plain one's steps.
    assert len(without) > 100
    assert run.ends["hard"].metrics.finished_time > 0


@pytest.mark.parametrize("overlap", [False, True])
def test_a_mask_that_is_quick_after_a_slow_one_is_not_waited_for_by_all(overlap):
    """What decides whether a request waits outside the steps is seen anew while its step is under way."""
    core, _ = make_core(async_scheduling=overlap)
    run = Run(core)
    for name in ("a", "b"):
        core.add(request(name, [1, 2], "moody"))
    core.add(request("plain", [3, 4], max_tokens=150))
    run.go()
    assert all(run.tokens[name] == expected_form([1, 2]) for name in ("a", "b"))


@pytest.mark.parametrize("overlap", [False, True])
def test_requests_wait_for_their_grammars_and_others_go_on(overlap):
    core, backend = make_core(async_scheduling=overlap, max_num_seqs=1)
    told = threading.Event()
    core.grammars.notify = told.set
    run = Run(core)
    for name in ("a", "b", "c"):
        core.add(request(name, [1], "wait"))
    core.add(request("plain", [2], max_tokens=20))
    assert core.stats().num_waiting == 4
    run.take(core.abort(["b"]))
    assert run.ends["b"].finish_reason == "abort"
    run.go(until="plain")
    assert run.tokens["plain"] == sim.expected([2], 20)
    assert core.stats().num_waiting == 2 and not core.has_work  # the loop may sleep
    backend.gate.set()
    assert told.wait(10)
    run.go()
    assert run.tokens["a"] == run.tokens["c"] == expected_form([1])
    core.add(request("again", [1], "wait"))
    assert core.has_work, "a grammar that is known is not compiled again"
    run.go()
    assert backend.compiled == 1


def test_wrong_and_broken_forms_end_their_requests_alone():
    core, _ = make_core()
    run = Run(core)
    core.add(request("wrong", [1], "wrong"))
    core.add(request("broken", [1], "broken"))
    core.add(request("good", [1], "easy"))
    run.go()
    for name, told in (("wrong", "the form is wrong"), ("broken", "the library fell over")):
        assert run.ends[name].finish_reason == "error"
        assert told in (run.ends[name].error or "")
        assert run.ends[name].error_param == "structured_outputs"
    assert run.tokens["good"] == expected_form([1])


def test_what_takes_too_long_is_refused(monkeypatch):
    monkeypatch.setattr(grammar_compiler, "COMPILE_SECONDS", 0.05)
    core, backend = make_core()
    told = threading.Event()
    core.grammars.notify = told.set
    run = Run(core)
    core.add(request("long", [1], "wait"))
    assert told.wait(10), "a loop that sleeps is woken"
    run.go()
    assert "within 0.05 s" in (run.ends["long"].error or "")
    backend.gate.set()
    core.add(request("next", [1], "easy"))
    run.go()
    assert run.tokens["next"] == expected_form([1])


@pytest.mark.parametrize("lasting", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_steps_that_fail_while_drawing_end_the_request_that_fails_alone(overlap, lasting):
    core, _ = make_core(async_scheduling=overlap)
    core.executor.failing_draws = frozenset(range(3, 1000) if lasting else [3])
    run = Run(core)
    core.add(request("a", [1], "easy"))
    core.add(request("b", [2], max_tokens=30))
    run.go()
    assert run.ends["b"].finish_reason == "length" and run.tokens["b"] == sim.expected([2], 30)
    if lasting:
        assert "pretend failure" in (run.ends["a"].error or "") and run.ends["a"].error_param is None
    else:
        assert run.tokens["a"] == expected_form([1])
    core.executor.failing_draws = frozenset()
    core.add(request("c", [1], "easy"))
    run.go()
    assert run.tokens["c"] == expected_form([1])


def test_a_form_that_other_settings_make_impossible():
    core, _ = make_core()
    run = Run(core)
    core.add(request("a", [1], "easy"))
    for _ in range(200):
        run.take(core.admit_compiled())
        if core.has_work:
            break
        time.sleep(0.005)
    wrong = int(np.flatnonzero(~allowed(0))[0])
    core.executor.execute = _drawing(core.executor, wrong)
    core.wrap_stages(None)
    run.go()
    assert run.ends["a"].finish_reason == "error"
    assert "loosen" in (run.ends["a"].error or "")


def _drawing(executor, token: int):
    def execute(plan: StepPlan):
        pending = Masked.execute(executor, plan)
        draw = pending.sample

        def sample(masks: TokenMasks) -> None:
            draw(masks)
            pending._done.result.tokens[:] = token

        pending.sample = sample
        return pending

    return execute


# ---- real grammars over a tiny random model, which without them writes nonsense ------------------

SETTINGS = dict(dtype="float32", device="cpu", num_threads=1, check_invariants=True, max_model_len=200)
SCHEMA = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "s": {"type": "string", "maxLength": 5},
    },
    "required": ["n", "s"],
    "additionalProperties": False,
}


def form(**fields) -> StructuredOutputsParams:
    return StructuredOutputsParams(**fields)


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "ahead"])
def llm(request):
    with LLM(
        str(tiny.checkpoint("llama")),
        async_scheduling=request.param,
        kv_cache_memory_bytes=8 << 20,
        **SETTINGS,
    ) as made:
        yield made


def ask(llm: LLM, params: SamplingParams | list[SamplingParams], prompts: int = 1):
    return [out.outputs for out in llm.generate(tiny.PROMPTS[:1] * prompts, params, use_tqdm=False)]


def check_json(text: str) -> None:
    value = json.loads(text)
    assert set(value) == {"n", "s"} and 0 <= value["n"] <= 99 and len(value["s"]) <= 5


def test_real_forms(llm):
    common = dict(max_tokens=150)
    params = [
        SamplingParams(seed=i, temperature=t, structured_outputs=f, **common)
        for i, (t, f) in enumerate(
            [
                (0, form(json=SCHEMA, disable_any_whitespace=True)),
                (1.5, form(json=SCHEMA)),
                (1, form(choice=["yes", "no"])),
                (0, form(regex="[0-9]{4}-[0-9]{2}")),
                (1, form(grammar='root ::= "<" [a-c] ">"')),
            ]
        )
    ]
    answers = [outputs[0] for outputs in ask(llm, params, len(params))]
    assert {answer.finish_reason for answer in answers} == {"stop"}
    check_json(answers[0].text)
    check_json(answers[1].text)
    assert answers[2].text in ("yes", "no")
    assert len(answers[3].text) == 7 and answers[3].text[4] == "-"
    assert answers[4].text in ("<a>", "<b>", "<c>")
    alone = [ask(llm, one)[0][0].token_ids for one in params]
    assert alone == [answer.token_ids for answer in answers]


def test_with_other_settings(llm):
    yes = form(choice=["yes", "no"])
    several = ask(llm, SamplingParams(n=6, seed=4, temperature=2, structured_outputs=yes, max_tokens=20))[0]
    assert {choice.text for choice in several} <= {"yes", "no"}
    stopped = ask(llm, SamplingParams(structured_outputs=form(regex="a{9}b"), stop=["aaa"], max_tokens=40))[
        0
    ][0]
    assert (stopped.text, stopped.finish_reason, stopped.stop_reason) == ("", "stop", "aaa")
    cut = ask(llm, SamplingParams(structured_outputs=form(regex="[a-z]{90}"), max_tokens=3))[0][0]
    assert cut.finish_reason == "length" and len(cut.token_ids) == 3
    long = ask(
        llm, SamplingParams(structured_outputs=form(regex="a*"), min_tokens=7, max_tokens=9, ignore_eos=False)
    )
    assert len(long[0][0].token_ids) >= 7 and set(long[0][0].text) == {"a"}


def test_logprobs_are_the_models_own(llm):
    plain = ask(llm, SamplingParams(temperature=0, logprobs=3, max_tokens=1))[0][0]
    formed = ask(
        llm, SamplingParams(temperature=0, logprobs=3, max_tokens=1, structured_outputs=form(regex="[0-9]+"))
    )[0][0]
    assert formed.text.isdigit() and formed.token_ids != plain.token_ids
    first, second = plain.logprobs[0], formed.logprobs[0]
    for token in plain.token_ids:
        assert second[token].logprob == pytest.approx(first[token].logprob, abs=1e-5)
    assert second[formed.token_ids[0]].logprob < max(entry.logprob for entry in second.values())


def test_refusals_reach_the_user(llm):
    for bad, told in ((form(regex="(a"), "unclosed"), (form(json={"not": {}}), "not")):
        with pytest.raises(RequestError, match=told) as caught:
            ask(llm, SamplingParams(structured_outputs=bad))
        assert caught.value.param == "structured_outputs"
    assert ask(llm, SamplingParams(structured_outputs=form(choice=["ok"]), max_tokens=9))[0][0].text == "ok"


def test_without_a_tokenizer():
    with LLM(
        str(tiny.checkpoint("llama")), skip_tokenizer_init=True, kv_cache_memory_bytes=1 << 20, **SETTINGS
    ) as made:
        params = SamplingParams(structured_outputs=form(regex="a"), detokenize=False)
        with pytest.raises(RequestError, match="tokenizer"):
            made.generate([[5, 6]], params, use_tqdm=False)
