"""`octavo chat`: through a pipe and a pseudo-terminal with the real engine; its session with a slow one."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.cli.chat_session import ChatSession, parse_setting
from octavo.cli.main import main
from octavo.cli.terminal import Terminal
from octavo.errors import RequestError
from octavo.outputs import CompletionOutput, RequestOutput
from tests import tiny

SETTINGS = [
    "--dtype",
    "float32",
    "--kv-cache-memory-bytes",
    "8MiB",
    "--num-threads",
    "1",
    "--temperature",
    "0",
]
LONG = "The quick brown fox jumps over the lazy dog."
STATS = re.compile(
    r"\[(\d+) tokens, [\d.]+ tokens/s, first after [\d.]+ s; prompt (\d+) tokens, (\d+) cached\]"
)


@pytest.fixture(scope="module")
def model() -> str:
    return str(tiny.checkpoint("llama"))


def pipe(model: str, monkeypatch, capsys, text: str | bytes, *args: str) -> tuple[str, str]:
    data = text.encode() if isinstance(text, str) else text
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert main(["chat", model, *SETTINGS, "--max-tokens", "16", "--ignore-eos", *args]) == 0
    shown = capsys.readouterr()
    return shown.out, shown.err


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


class Answers:
    """What the engine answers to conversations, greedily."""

    def __init__(self, model: str):
        self._llm = LLM(model, dtype="float32", kv_cache_memory_bytes="8MiB", num_threads=1)
        self.close = self._llm.close

    def __call__(self, *messages: dict[str, Any], tokens: int = 16) -> str:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        return self._llm.chat(list(messages), params, use_tqdm=False)[0].outputs[0].text


@pytest.fixture(scope="module")
def answers(model) -> Iterator[Answers]:
    found = Answers(model)
    yield found
    found.close()


def test_lines_of_a_pipe_are_one_conversation(model, answers, monkeypatch, capsys):
    first = answers(user(LONG))
    second = answers(user(LONG), assistant(first), user("two\nlines"))
    out, err = pipe(model, monkeypatch, capsys, f"{LONG}\r\n\n  \ntwo\\\nlines\n")
    assert out == f"{first}\n{second}\n"
    assert ">>>" not in out + err
    assert "\x1b" not in out + err
    stats = STATS.findall(err)
    assert [int(tokens) for tokens, _, _ in stats] == [16, 16]
    assert stats[0][2] == "0"
    # At least the whole blocks of the first prompt: an answer's tokens may differ when its text is tokenized.
    assert int(stats[1][2]) >= int(stats[0][1]) // 16 * 16 > 0
    assert "cut off after max_tokens=16" in err


def test_commands(model, answers, monkeypatch, capsys):
    text = (
        "/system be brief\n"
        'hello\n/reset\n"""first\n\n  second"""\n/system\n/set max-tokens 4\n hello\n'
        "/set\n/sett x 1\n/set temperature hot\n/set n 2\n"
        "/set max_tokens default\n/set top_k 3\n/set top_k default\n/set nonsense default\n"
        " /x\n/exit\nnever\n"
    )
    system = {"role": "system", "content": "be brief"}
    expected = [
        answers(system, user("hello")),
        answers(system, user("first\n\n  second")),
        (hello := answers(user("hello"), tokens=4)),
        answers(user("hello"), assistant(hello), user("/x"), tokens=1024),  # to the context's end
    ]
    out, err = pipe(model, monkeypatch, capsys, text)
    shown = out.split("\n")
    rest = out
    for answer in expected[:3]:
        assert rest.startswith(answer + "\n"), shown
        rest = rest[len(answer) + 1 :]
    assert rest == expected[3] + "\n"
    assert "never" not in out
    for line in (
        "system message set: a new conversation", "a new conversation", "no system message: a new",
        "max_tokens = 4", "there is no command /sett", "argument --temperature: invalid float value: 'hot'",
        "n=2 is not for a chat", "temperature = 0.0", "ignore_eos = True", "max_tokens = 1024",
        "the context is full", "there is no setting nonsense", "top_k = 3", "top_k: the model's own",
    ):  # fmt: skip
        assert line in err, line


def test_a_full_context_is_one_line_and_reset_goes_on(model, answers, monkeypatch, capsys):
    text = "word " * 120 + "\n" + "word " * 120 + "\n/reset\nhello\n"
    out, err = pipe(model, monkeypatch, capsys, text, "--max-tokens", "1000", "--no-stats")
    assert "[" not in err
    told = [line for line in err.splitlines() if "the context is full" in line]
    assert len(told) >= 2
    assert all(re.search(r"\(\d+ tokens of 256\): /reset starts a new conversation", line) for line in told)
    assert answers(user("hello"), tokens=1000) in out


def test_options_reach_the_answer(model, monkeypatch, capsys):
    system = ["--system", "be brief"]
    text, _ = pipe(model, monkeypatch, capsys, "hello\n", *system, "--temperature", "1", "--seed", "5")
    again, _ = pipe(model, monkeypatch, capsys, "hello\n", *system, "--temperature", "1", "--seed", "5")
    other, _ = pipe(model, monkeypatch, capsys, "hello\n", *system, "--temperature", "1", "--seed", "6")
    assert text == again != other


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--temperature", "nan"], "temperature=nan"),
        (["--n", "2"], "n=2 is not for a chat"),
        (["--max-tokens", "0"], "max_tokens=0"),
        (["--block-size", "7"], "invalid choice: 7"),
    ],
)
def test_bad_usage_is_one_line_before_a_model_is_loaded(args, told, capsys):
    try:
        code = main(["chat", "no-such-model", *args])
    except SystemExit as stop:
        code = stop.code
    error = capsys.readouterr().err
    assert code == 2
    assert told in error
    assert error.count("\n") == 1


def test_a_pipe_that_is_not_utf8_is_told(model, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n"), encoding="utf-8"))
    assert main(["chat", model, *SETTINGS]) == 2
    assert "not UTF-8" in capsys.readouterr().err


# ---- at a terminal ----------------------------------------------------------------------------------


class Person:
    """Types at a pseudo-terminal and reads what appears."""

    def __init__(self, argv: list[str], env: dict[str, str]):
        ours, theirs = pty.openpty()
        self._fd = ours
        self.child = subprocess.Popen(
            argv, stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True,
            preexec_fn=lambda: _take_terminal(),
        )  # fmt: skip
        os.close(theirs)
        self._unread = ""
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def wait_for(self, pattern: str, timeout: float = 60.0) -> str:
        """All that appeared up to the end of the first match."""
        until = time.monotonic() + timeout
        while not (found := re.search(pattern, self._unread, re.S)):
            if not self._read(until - time.monotonic()):
                raise AssertionError(f"no {pattern!r} in {self._unread!r}")
        text, self._unread = self._unread[: found.end()], self._unread[found.end() :]
        return text

    def _read(self, timeout: float) -> bool:
        if timeout <= 0 or not select.select([self._fd], [], [], timeout)[0]:
            return False
        try:
            data = os.read(self._fd, 1 << 16)
        except OSError:  # the other side is closed
            return False
        self._unread += data.decode("utf-8", "replace")
        self.seen += data.decode("utf-8", "replace")
        return bool(data)

    def leave(self) -> int:
        while self._read(20):
            pass
        return self.child.wait(20)

    def close(self) -> None:
        self.child.kill()
        self.child.wait()
        os.close(self._fd)


def _take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C becomes a signal


@pytest.fixture(scope="module")
def long_model(tmp_path_factory) -> str:
    """A model whose answers take seconds."""
    folder = tmp_path_factory.mktemp("long")
    tiny.build("llama", max_position_embeddings=8192).save_pretrained(folder)
    tiny.save_tokenizer(folder)
    return str(folder)


@pytest.mark.parametrize("colours", [True, False])
def test_at_a_terminal(long_model, tmp_path, colours):
    env = os.environ | {"XDG_STATE_HOME": str(tmp_path), "TERM": "xterm", "OMP_NUM_THREADS": "1"}
    env.pop("NO_COLOR", None)
    if not colours:
        env["NO_COLOR"] = "1"
    argv = [
        sys.executable,
        "-m",
        "octavo",
        "chat",
        long_model,
        *SETTINGS,
        "--max-tokens",
        "8",
        "--ignore-eos",
    ]
    person = Person(argv, env)
    try:
        person.wait_for(r"A context of 8192 tokens.*>>> ")
        person.type("good morning\n")
        person.wait_for(STATS.pattern)
        person.wait_for(">>> ")
        person.type("/set max_tokens 8000\n")
        person.wait_for("max_tokens = 8000")
        person.wait_for(">>> ")
        person.type("go on\\\n")
        person.wait_for(r"\.\.\. ")
        person.type("and on\n")
        person.wait_for(r"and on\s+\S\S")  # the answer has begun
        begin = time.monotonic()
        person.type("\x03")
        stats = STATS.search(person.wait_for(STATS.pattern))
        person.wait_for("stopped")
        assert time.monotonic() - begin < 5
        assert stats is not None and int(stats[1]) < 8000
        person.wait_for(">>> ")
        person.type("half a mess")
        person.wait_for("half a mess")
        time.sleep(0.3)  # as a person: Python's line editor misses a signal in the instant before it waits
        person.type("\x03")  # gives up what was typed, and no more
        person.wait_for(">>> ")
        person.type("/set max_tokens 8\n")
        person.wait_for(">>> ")
        person.type("again\n")
        after = STATS.search(person.wait_for(STATS.pattern))
        assert after is not None
        # The stopped answer is part of the conversation.
        assert int(after[2]) > int(stats[2]) + int(stats[1]) // 2
        assert int(after[3]) >= int(stats[2]) // 16 * 16 > 0
        person.wait_for(">>> ")
        person.type("\x04")
        assert person.leave() == 0
    finally:
        person.close()
    assert ("\x1b[2m" in person.seen) == colours
    history = tmp_path / "octavo" / "chat_history"
    assert history.stat().st_mode & 0o777 == 0o600
    assert "good morning" in history.read_text().splitlines()


# ---- the session, with an engine that waits ---------------------------------------------------------


class SlowLLM:
    """Answers `abc…`, a letter a token, `delay` seconds each; `fail_at` breaks it there."""

    def __init__(self, delay: float = 0.0, fail_at: int | None = None):
        self.facts = SimpleNamespace(max_model_len=100, kv_capacity=1000)
        self.delay, self.fail_at = delay, fail_at
        self.aborted = threading.Event()
        self.prompts: list[list[dict[str, Any]]] = []

    def get_default_sampling_params(self) -> SamplingParams:
        return SamplingParams()

    def render_chat(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        self.prompts.append([dict(m) for m in messages])
        return {"prompt": "", "prompt_token_ids": [1] * sum(len(m["content"]) for m in messages)}

    def stream(self, prompt: Any, params: SamplingParams) -> Iterator[RequestOutput]:
        count = params.max_tokens or 16
        try:
            for i in range(count):
                time.sleep(self.delay)
                if i == self.fail_at:
                    raise RequestError("the step failed:\nno room")
                reason = "length" if i == count - 1 else None
                part = CompletionOutput(0, chr(97 + i % 26), [i], finish_reason=reason)
                yield RequestOutput("0", None, [1], [part], reason is not None)
        except GeneratorExit:
            self.aborted.set()
            raise


def session(llm: SlowLLM, text: str = "") -> tuple[ChatSession, io.StringIO, io.StringIO]:
    out, err = io.StringIO(), io.StringIO()
    terminal = Terminal(io.StringIO(text), out, err, {})
    return ChatSession(llm, terminal, {}, {"max_tokens": 26}, stats=False), out, err  # type: ignore[arg-type]


def interrupt_after(seconds: float) -> None:
    threading.Timer(seconds, os.kill, [os.getpid(), signal.SIGINT]).start()


def test_a_stopped_answer_stays_as_far_as_it_came():
    llm = SlowLLM(delay=0.02)
    chat, out, err = session(llm)
    interrupt_after(0.15)
    chat.take("question")
    text = out.getvalue().strip()
    assert 1 <= len(text) < 26
    assert "abcdefghijklmnopqrstuvwxyz".startswith(text)
    assert chat.messages == [user("question"), assistant(text)]
    assert err.getvalue() == "stopped\n"
    assert llm.aborted.wait(5)
    chat.take("next")
    assert llm.prompts[-1] == [user("question"), assistant(text), user("next")]


def test_an_answer_stopped_before_it_began_is_forgotten_at_once():
    llm = SlowLLM(delay=2.0)
    chat, out, err = session(llm)
    begin = time.monotonic()
    interrupt_after(0.1)
    chat.take("question")
    assert time.monotonic() - begin < 1.5
    assert chat.messages == []
    assert err.getvalue() == "stopped: the message is forgotten\n"


def test_a_failed_answer_takes_its_question_with_it():
    chat, out, err = session(SlowLLM(fail_at=3))
    chat.take("question")
    assert out.getvalue() == "abc\n"
    assert err.getvalue() == "the step failed: no room\n"
    assert chat.messages == []


def test_a_conversation_that_leaves_no_room_is_not_begun():
    llm = SlowLLM()
    chat, out, err = session(llm)
    chat.take("x" * 100)
    assert "the context is full (100 tokens of 100): /reset" in err.getvalue()
    llm.facts.kv_capacity = 50
    chat.take("x" * 60)
    assert "the context is full (60 tokens, the KV cache holds 50)" in err.getvalue()
    assert (out.getvalue(), chat.messages) == ("", [])


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("a\nb\n", ["a", "b"]),
        ("a\\\nb\\\nc\nd", ["a\nb\nc", "d"]),
        ("a\\", ["a"]),
        ('"""a\n b\\\n"""\nc\n', ["a\n b\\", "c"]),
        ('"""one line"""\n', ["one line"]),
        ('"""never closed\nx', ["never closed\nx"]),
        ('  """\nin\n\nside\n""" \n', ["in\n\nside"]),
    ],
)
def test_messages_of_several_lines(text, messages):
    terminal = Terminal(io.StringIO(text), io.StringIO(), io.StringIO(), {})
    found = []
    while (message := terminal.read_message()) is not None:
        found.append(message)
    assert found == messages


def test_a_model_cannot_steer_the_terminal():
    out = io.StringIO()
    out.isatty = lambda: True  # type: ignore[method-assign]
    Terminal(io.StringIO(), out, io.StringIO(), {}).write("a\x1b]0;title\x07b\n\tc\x9bé🙂")
    assert out.getvalue() == "a\ufffd]0;title\ufffdb\n\tc\ufffdé🙂"


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("temperature", "0.5", 0.5),
        ("top_k", "-1", -1),
        ("ignore_eos", "true", True),
        ("ignore_eos", "False", False),
        ("stop", '"\\n- "', ["\\n- "]),
        ("stop_token_ids", "1 2", [1, 2]),
        ("logit_bias", '{"3": -1}', {"3": -1}),
    ],
)
def test_settings_are_read_as_on_the_command_line(name, text, value):
    assert parse_setting(name, text) == {name: value}


@pytest.mark.parametrize(
    ("name", "text"), [("heat", "1"), ("ignore_eos", "maybe"), ("top_k", "1.5"), ("help", "1")]
)
def test_a_wrong_setting_is_told(name, text):
    with pytest.raises(RequestError, match=f"{name.replace('_', '.')}|{text}"):
        parse_setting(name, text)
