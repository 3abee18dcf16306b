"""`octavo plan`, and `octavo env --url`: what is printed is what was computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.main import main
from octavo.config import EngineConfig
from octavo.errors import ModelError
from octavo.models import hub, hub_header
from octavo.planning.cards import CARDS
from tests import tiny
from tests.models.hub_server import COMMIT, Hub, serving
from tests.server.conftest import running
from tests.server.fakes import FakeEngine

GIB = 1 << 30


def planned(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> dict[str, Any]:
    assert main(["plan", *argv, "--json"]) == code
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    return told


def test_json_and_text_tell_the_same(capsys):
    model = str(tiny.checkpoint("llama"))
    argv = [model, "--gpu", "a100 40gb", "--request-len", "100", "--port", "8001"]
    told = planned(capsys, *argv)
    assert told["machine"]["name"] == "A100-40G"
    assert told["machine"]["source"].startswith("https://")
    memory = told["memory_bytes"]
    assert memory.pop("total") == sum(memory.values())
    assert told["fits"] and told["problem"] is None
    assert told["parallel"]["served_by_this_version"]
    assert main(["plan", *argv]) == 0
    text = capsys.readouterr().out
    assert f"{told['kv']['num_requests']} of 100 tokens at once" in text
    assert f"{told['kv']['num_blocks']} blocks of 16 tokens" in text
    assert "fits            yes" in text


def test_what_does_not_fit_ends_with_1_and_advice(capsys):
    model = str(tiny.checkpoint("llama"))
    settings = ["--device", "cpu", "--kv-cache-memory-bytes", "2000"]
    told = planned(capsys, model, *settings, code=1)
    assert not told["fits"] and "less than one block" in told["problem"]
    first = told["advice"][0]
    assert first["change"] == {"kv_cache_memory_bytes": None} and first["fits"]
    assert main(["plan", model, *settings]) == 1
    text = capsys.readouterr().out
    assert "fits            no: " in text and "(no --kv-cache-memory-bytes)" in text


def test_a_draft_model_is_planned_with_its_target(capsys):
    model, draft = str(tiny.checkpoint("llama")), str(tiny.checkpoint("qwen2"))
    argv = [model, "--gpu", "L4", "--speculative-model", draft]
    told = planned(capsys, *argv)
    alone = planned(capsys, model, "--gpu", "L4")
    assert alone["draft"] is None and told["draft"]["model"] == draft
    more = told["memory_bytes"]["weights"] - alone["memory_bytes"]["weights"]
    assert told["draft"]["weights_bytes"] == more > 0
    assert told["draft"]["kv_cache_bytes_per_request"] > 0
    assert told["kv"]["bytes_per_token"] == alone["kv"]["bytes_per_token"]
    assert main(["plan", *argv]) == 0
    assert f"draft model     {draft}, of the above weights " in capsys.readouterr().out


def test_parallel_sizes_are_planned_and_said_not_to_be_served(capsys):
    model = str(tiny.checkpoint("llama"))
    served = planned(capsys, model, "--gpu", "L4", "--pipeline-parallel-size", "2")
    assert served["parallel"]["served_by_this_version"]
    argv = [model, "--gpu", "L4", "-tp", "2", "-dp", "3"]
    told = planned(capsys, *argv)
    assert not told["parallel"]["served_by_this_version"]
    assert told["kv"]["num_requests_on_all_replicas"] == 3 * told["kv"]["num_requests"]
    assert main(["plan", *argv]) == 0
    assert "planned by formula, not served by this version" in capsys.readouterr().out


def test_stages_are_planned_as_they_are_divided(capsys):
    argv = [
        str(tiny.checkpoint("llama")),
        "--hf-overrides",
        '{"num_hidden_layers": 4}',
        "--load-format",
        "dummy",
    ]
    sizes = []
    for partition in ("2,2", "3,1"):
        told = planned(capsys, *argv, "--gpu", "L4", "-pp", "2", "--pp-layer-partition", partition)
        sizes.append(told["kv"]["bytes_per_token"])
    assert sizes[1] * 2 == sizes[0] * 3


@pytest.mark.parametrize(
    "argv,told",
    [
        (["--gpu", "A1000"], "gpu='A1000' is not known: choose T4"),
        (["--gpu", "T4", "--device", "cpu"], "contradicts device='cpu'"),
        (["--request-len", "0"], "'0' is not a number of at least 1 token"),
        (["--max-model-len", "100000"], "max_model_len=100000 is beyond"),
        (["--pipeline-parallel-size", "-1"], "pipeline_parallel_size=-1 is out of range"),
        (["-pp", "2", "--pp-layer-partition", "3,3"], "'3,3' has 6 layers and the model 3"),
    ],
)
def test_bad_input_is_told_in_one_line(argv, told, capsys):
    try:
        code = main(["plan", str(tiny.checkpoint("llama")), *argv])
    except SystemExit as stop:
        code = stop.code
    error = capsys.readouterr().err
    assert code == 2 and told in error and len(error.splitlines()) == 1


def test_an_encoder_has_nothing_to_plan(tmp_path, capsys):
    config = {"architectures": ["BertModel"], "model_type": "bert", "hidden_size": 32, "num_hidden_layers": 1,
              "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 100}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["plan", str(tmp_path), "--gpu", "L4"]) == 2
    assert "is an encoder (BertModel) and keeps no KV cache" in capsys.readouterr().err


# ---- models of the hub --------------------------------------------------------------------------


@pytest.fixture
def a_hub(monkeypatch, tmp_path):
    from huggingface_hub import constants

    with serving(Hub()) as hub_:
        monkeypatch.setattr(constants, "ENDPOINT", hub_.address)
        monkeypatch.setattr(
            constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            hub_.address + "/{repo_id}/resolve/{revision}/{filename}",
        )
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(hub, "cache_root", lambda download_dir: tmp_path / "cache")
        yield hub_


def test_of_a_folder_on_the_hub_the_config_alone_is_read(a_hub, capsys):
    folder = tiny.checkpoint("llama")
    files = {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}
    assert "model.safetensors" in files
    a_hub.add("org/model", files)
    here = planned(capsys, str(folder), "--gpu", "L4")
    there = planned(capsys, "org/model", "--gpu", "L4")
    assert {**there, "model": ""} == {**here, "model": ""}
    assert set(a_hub.downloads()) <= {"config.json", "generation_config.json"}


def test_of_a_gguf_file_on_the_hub_the_header_alone_is_read(a_hub, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(hub_header, "_STEPS", (4096, 1 << 20))
    path = tiny.gguf_file("llama", tmp_path / "m-Q8_0.gguf", "Q8_0")
    content = path.read_bytes()
    a_hub.add("org/model", {"m-Q8_0.gguf": content})
    here = planned(capsys, str(path), "--device", "cpu", "--kv-cache-memory-bytes", "1MiB")
    there = planned(capsys, "org/model:Q8_0", "--device", "cpu", "--kv-cache-memory-bytes", "1MiB")
    for kind in ("weights", "kv_cache"):
        assert there["memory_bytes"][kind] == here["memory_bytes"][kind]
    assert there["weights_by_type"] == here["weights_by_type"]
    spans = [span for method, path, span in a_hub.log if method == "GET" and span]
    assert spans and all(span.startswith("bytes=0-") for span in spans)


def test_a_model_in_the_cache_is_read_there(a_hub, tmp_path, capsys):
    folder = tmp_path / "cache" / "models--org--model"
    snapshot = folder / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    for file in tiny.checkpoint("llama").iterdir():
        if file.is_file():
            (snapshot / file.name).write_bytes(file.read_bytes())
    assert planned(capsys, "org/model", "--gpu", "L4")["fits"]
    assert a_hub.log == []


def test_what_the_hub_does_not_have_is_told(a_hub):
    with pytest.raises(ModelError, match="org/none"):
        with hub_header.described_model(EngineConfig(model="org/none")):
            raise AssertionError("found")
    a_hub.add("org/empty", {"README.md": b"x"})
    with pytest.raises(ModelError, match="no config.json"):
        with hub_header.described_model(EngineConfig(model="org/empty")):
            raise AssertionError("found")


# ---- a running server ---------------------------------------------------------------------------


def test_env_tells_of_a_server(capsys):
    with running(FakeEngine(), api_key=["k"]) as server:
        assert main(["env", "--url", server.url, "--api-key", "k", "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["memory_bytes"] == server.engine.facts.memory
        assert told["kv"]["prefix_cache_queries"] == 7
        assert told["model"] == "some/model"
        assert main(["env", "--url", server.url, "--api-key", "k"]) == 0
        text = capsys.readouterr().out
        assert "weights" in text and "0 of 7 tokens (0.0%)" in text
        assert main(["env", "--url", server.url]) == 2
        assert "asks for a key" in capsys.readouterr().err


@pytest.mark.parametrize(
    "url,code,told", [("http://127.0.0.1:9", 1, "does not answer"), ("ftp://x", 2, "is no address")]
)
def test_env_tells_who_is_not_there(url, code, told, capsys):
    assert main(["env", "--url", url]) == code
    assert told in capsys.readouterr().err


def test_env_tells_other_servers_apart(a_hub, capsys):
    assert main(["env", "--url", a_hub.address]) == 1
    assert "is no server of this version of Octavo" in capsys.readouterr().err


def test_sizes_on_the_command_line_are_those_of_the_settings(tmp_path: Path, capsys):
    told = planned(capsys, str(tiny.checkpoint("llama")), "--gpu", "L4", "--kv-cache-memory-bytes", "1GiB")
    assert 0 <= GIB - told["memory_bytes"]["kv_cache"] < told["kv"]["block_bytes"] or told["fits"]


def test_the_known_cards_are_listed_and_nothing_is_planned(capsys):
    assert main(["plan", "no/such-model", "--gpu", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [card.name for card in CARDS]
    assert lines[0].split() == ["T4", "14.75", "GiB"]


def test_types_that_take_nothing_are_not_told(tmp_path, capsys):
    file = tiny.gguf_file("llama-tied", tmp_path / "m.gguf", "Q8_0")
    assert main(["plan", str(file), "--gpu", "L4"]) == 0
    assert " 0.0 KiB" not in capsys.readouterr().out
