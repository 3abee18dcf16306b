"""`octavo run-batch` with the real engine over a tiny model: answers, signals, kills."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from octavo import LLM, AsyncLLM, SamplingParams
from octavo.cli.main import main
from tests import tiny

SETTINGS = ["--dtype", "float32", "--kv-cache-memory-bytes", "4MiB", "--num-threads", "1", "--disable-tqdm"]
TEXTS = ["The quick brown fox", "A page of a book", "今天天气很好", "def add(a, b):"]


@pytest.fixture(scope="module")
def model() -> str:
    return str(tiny.checkpoint("llama"))


def requests(count: int, max_tokens: int = 12) -> list[dict[str, Any]]:
    body = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
    return [
        {"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions",
         "body": {**body, "prompt": f"{TEXTS[i % len(TEXTS)]} {i}"}}
        for i in range(count)
    ]  # fmt: skip


def write(folder: Path, lines: list[dict[str, Any]]) -> tuple[Path, Path]:
    source = folder / "in.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return source, folder / "out.jsonl"


def results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def test_answers_are_the_engine_s(model, tmp_path, capsys):
    lines = requests(4)
    chat = [{"role": "user", "content": "hello"}]
    lines.append(
        {
            "custom_id": "chat",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": "tiny", "messages": chat, "temperature": 0, "max_tokens": 12},
        }
    )
    source, target = write(tmp_path, [*lines, {"custom_id": "bad"}])
    argv = [
        "run-batch",
        "-i",
        str(source),
        "-o",
        str(target),
        model,
        *SETTINGS,
        "--served-model-name",
        "tiny",
    ]
    assert main(argv) == 0
    assert capsys.readouterr().err.endswith("octavo: 5 answered, 1 refused\n")
    found = {r["custom_id"]: r for r in results(target)}
    assert found["bad"]["error"]["message"] == "line 6: url is missing"
    with LLM(model, dtype="float32", kv_cache_memory_bytes="4MiB", num_threads=1) as llm:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        outputs = llm.generate([line["body"]["prompt"] for line in lines[:4]], params, use_tqdm=False)
        answer = llm.chat(chat, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)[0]
    for i, output in enumerate(outputs):
        response = found[f"r{i}"]["response"]
        assert response["status_code"] == 200
        assert response["body"]["choices"][0]["text"] == output.outputs[0].text
        assert response["body"]["usage"]["completion_tokens"] == 12
    message = found["chat"]["response"]["body"]["choices"][0]["message"]
    assert message["content"] == answer.outputs[0].text


def test_a_run_that_is_ended_resumes_and_leaves_no_process(model, tmp_path):
    source, target = write(tmp_path, requests(16, max_tokens=100))
    argv = [sys.executable, "-m", "octavo", "run-batch", "-i", str(source), "-o", str(target), model]
    argv += [*SETTINGS, "--max-concurrency", "2"]
    log = tmp_path / "log"  # no pipe: a process that is left behind would hold it open

    def start() -> subprocess.Popen[bytes]:
        with log.open("w") as stderr:
            return subprocess.Popen(argv, stderr=stderr)

    done = 0
    for number, code in ((signal.SIGKILL, -9), (signal.SIGINT, 130)):
        child = start()
        deadline = time.monotonic() + 60
        while not target.exists() or target.read_bytes().count(b"\n") <= done:
            assert child.poll() is None, log.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.002)
        started = psutil.Process(child.pid).children(recursive=True)
        child.send_signal(number)
        assert child.wait(30) == code, log.read_text()
        left = psutil.wait_procs(started, timeout=20)[1]
        for process in left:
            process.kill()
        assert not left, "the engine outlives its front end"
        done = target.read_bytes().count(b"\n")
        assert 1 <= done < 16
    assert log.read_text().endswith("octavo: interrupted: run again to resume\n")
    early = target.read_bytes()
    assert start().wait(60) == 0, log.read_text()
    assert f"{16 - done} answered, {done} done by an earlier run" in log.read_text()
    assert target.read_bytes().startswith(early[: early.rindex(b"\n") + 1])
    found = results(target)
    assert sorted(r["custom_id"] for r in found) == sorted(f"r{i}" for i in range(16))
    assert all(r["response"]["body"]["usage"]["completion_tokens"] == 100 for r in found)


def test_no_model_is_loaded_for_what_needs_none(model, tmp_path, capsys, monkeypatch):
    lines = requests(3)
    source, target = write(tmp_path, lines[:2])
    argv = ["run-batch", "-i", str(source), "-o", str(target), *SETTINGS, "--model"]
    assert main([*argv, model]) == 0
    before = results(target)

    def load(*_: Any) -> None:
        raise AssertionError("a model is loaded")

    with monkeypatch.context() as patch:
        patch.setattr(AsyncLLM, "create", load)
        assert main([*argv, model]) == 0
        assert capsys.readouterr().err.endswith("octavo: 0 answered, 2 done by an earlier run\n")
        changed = lines[0] | {"url": "/v1/chat/completions"}
        write(tmp_path, [{"custom_id": "bad"}, changed, lines[1]])
        assert main([*argv, model]) == 0
        told = capsys.readouterr().err
        assert "octavo: 0 answered, 1 refused, 2 done by an earlier run; 1 of these have changed" in told
    found = results(target)
    assert found[:2] == before and [r["custom_id"] for r in found[2:]] == ["bad"]
    write(tmp_path, [*lines[:2], lines[2]])
    assert main([*argv, model]) == 0
    assert capsys.readouterr().err.endswith("octavo: 1 answered, 2 done by an earlier run\n")


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["-i", "in.jsonl", "-o", "in.jsonl"], "the same file"),
        (["-i", "missing.jsonl", "-o", "out.jsonl"], "'missing.jsonl' cannot be read"),
        (["-i", "in.jsonl", "-o", "no/such/folder.jsonl"], "'no/such/folder.jsonl' cannot be opened"),
        (
            ["-i", "in.jsonl", "-o", "out.jsonl", "--max-concurrency", "0"],
            "'0' is not an integer of at least 1",
        ),
        (["-i", "in.jsonl", "-o", "out.jsonl", "--max-num-seqs", "0"], "max_num_seqs=0"),
        (["-o", "out.jsonl"], "-i"),
    ],
)
def test_bad_usage_is_one_line_before_a_model_is_loaded(args, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, requests(1))
    try:
        code = main(["run-batch", *args, "--model", "no-such-model"])
    except SystemExit as stop:
        code = stop.code
    error = capsys.readouterr().err
    assert code == 2
    assert told in error
    assert error.count("\n") == 1
    assert not os.path.exists("out.jsonl")
