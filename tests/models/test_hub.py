"""Models by hub id: from a cache laid out as the hub lays it, and from a hub on loopback."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from octavo.errors import ModelError
from octavo.models.hub import HubName, parse_hub_name
from octavo.models.hub_files import choose_gguf, wanted_files
from octavo.models.locate import find_model
from tests import tiny
from tests.models.hub_server import COMMIT, OTHER_COMMIT, Hub, serving

ROOT = Path(__file__).parents[2]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, no login, and no network."""
    folder = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with serving(Hub()) as hub:
        point_at(hub.address, monkeypatch)
        yield hub


def point_at(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}"
    )


def lay_out(
    cache: Path, repo: str, files: dict[str, bytes], commit: str = COMMIT, refs: tuple[str, ...] = ("main",)
) -> Path:
    """A repository as the hub's cache holds it: content in blobs, links by name, branches as files."""
    root = cache / ("models--" + repo.replace("/", "--"))
    snapshot = root / "snapshots" / commit
    for number, (name, content) in enumerate(files.items()):
        blob = root / "blobs" / f"{commit[:4]}{number:036d}"
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        link = snapshot / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    for ref in refs:
        (root / "refs" / ref).parent.mkdir(parents=True, exist_ok=True)
        (root / "refs" / ref).write_text(commit)
    return snapshot


def files_of(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


@pytest.fixture(scope="module")
def tiny_files() -> dict[str, bytes]:
    return files_of(tiny.checkpoint("llama"))


def error_of(name: str, **options: object) -> str:
    with pytest.raises(ModelError) as caught:
        find_model(name, **options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "name, parsed",
    [
        ("org/name", HubName("org/name")),
        ("gpt2", HubName("gpt2")),
        ("org/name:Q4_K_M", HubName("org/name", tag="Q4_K_M")),
        ("org/name-GGUF/a.Q4_0.gguf", HubName("org/name-GGUF", file="a.Q4_0.gguf")),
        ("org/name/Q8_0/a-00001-of-00002.gguf", HubName("org/name", file="Q8_0/a-00001-of-00002.gguf")),
        ("org/../name", None),
        ("org/name/../../x.gguf", None),
        ("/org/name", None),
        ("./org/name", None),
        ("~/name", None),
        ("no/such/folder", None),
        ("nothing.gguf", None),
        ("org/na--me", None),
        ("org/name:", None),
        ("", None),
        ("a b/c", None),
    ],
)
def test_names(name: str, parsed: HubName | None) -> None:
    assert parse_hub_name(name) == parsed


# ---- the cache alone ----------------------------------------------------------------------------------


def test_revisions_in_the_cache(cache: Path, tiny_files: dict[str, bytes]) -> None:
    first = lay_out(cache, "org/tiny", tiny_files, COMMIT, ("main", "v1.0"))
    other = lay_out(cache, "org/tiny", tiny_files, OTHER_COMMIT, ("refs/pr/1",))
    for revision in (None, "main", "v1.0", COMMIT, COMMIT[:7]):
        found = find_model("org/tiny", revision=revision)
        assert (found.kind, found.path, found.name, found.revision) == ("folder", first, "org/tiny", COMMIT)
    for revision in ("refs/pr/1", OTHER_COMMIT, OTHER_COMMIT[:12]):
        assert find_model("org/tiny", revision=revision).path == other
    for revision in ("v2", COMMIT[:6], "ffffffff", "../../main", "e" * 40):
        message = error_of("org/tiny", revision=revision)
        assert repr(revision) in message and "HF_HUB_OFFLINE" in message or "not a branch" in message


def test_what_is_missing_or_incomplete_offline(cache: Path, tiny_files: dict[str, bytes]) -> None:
    message = error_of("org/none")
    assert "'org/none' at revision 'main'" in message and "not there" in message and str(cache) in message
    parts = {**tiny_files}
    weights = parts.pop("model.safetensors")
    lay_out(cache, "org/half", parts)
    assert "incomplete" in error_of("org/half")
    assert find_model("org/half", load_format="dummy").kind == "folder"
    parts["model-00001-of-00002.safetensors"] = weights
    lay_out(cache, "org/shard", parts)
    assert "incomplete" in error_of("org/shard")


def test_the_cache_folder_itself_may_be_named(cache: Path, tiny_files: dict[str, bytes]) -> None:
    snapshot = lay_out(cache, "org/tiny", tiny_files)
    assert find_model(str(snapshot)).path == snapshot
    assert "revision='v1' is for models of the hub" in error_of(str(snapshot), revision="v1")


def test_a_model_runs_from_the_cache(cache: Path, tiny_files: dict[str, bytes]) -> None:
    """By id, with the commit's own name nowhere in the way: same tokens and keys as from its folder."""
    from octavo import LLM, SamplingParams

    lay_out(cache, "org/tiny", tiny_files)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompt = {"prompt_token_ids": tiny.PROMPTS[0]}
    out, roots = [], []
    for name in ("org/tiny", str(tiny.checkpoint("llama"))):
        with LLM(name, dtype="float32", kv_cache_memory_bytes=1 << 24) as llm:
            out.append(llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids)
            roots.append(llm._client.facts.cache_root)
    assert list(out[0]) == list(out[1]) == tiny.greedy("llama", 0)[:8]
    assert roots[0] == roots[1]


def test_gguf_repositories_in_the_cache(cache: Path, tmp_path: Path) -> None:
    content = tiny.gguf_file("llama", tmp_path / "a.gguf").read_bytes()
    names = ["m-Q4_K_M.gguf", "m-q8_0.gguf", "mmproj-F16.gguf", "BF16/m-BF16-00001-of-00001.gguf"]
    snapshot = lay_out(cache, "org/m-GGUF", dict.fromkeys(names, content) | {"config.json": b"{}"})
    assert find_model("org/m-GGUF:q4_k_m").path == snapshot / names[0]
    assert find_model("org/m-GGUF:Q8_0").path == snapshot / names[1]
    assert find_model("org/m-GGUF:BF16").path == snapshot / names[3]
    found = find_model("org/m-GGUF/m-q8_0.gguf")
    assert (found.kind, found.path, found.revision) == ("gguf", snapshot / names[1], COMMIT)
    lay_out(cache, "org/one-GGUF", {"m-Q4_0.gguf": content})
    assert find_model("org/one-GGUF").kind == "gguf"


def test_a_link_out_of_the_repository_is_refused(
    cache: Path, tiny_files: dict[str, bytes], tmp_path: Path
) -> None:
    snapshot = lay_out(cache, "org/tiny", tiny_files)
    (tmp_path / "secret").write_text("{}")
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(tmp_path / "secret")
    assert "config.json: a link to" in error_of("org/tiny")
    folder = tmp_path / "mine"
    shutil.copytree(tiny.checkpoint("llama"), folder)
    (folder / "extra.json").symlink_to("/etc/passwd")
    assert "outside of the model's folder" in error_of(str(folder))
    (folder / "extra.json").unlink()
    (folder / "extra.json").symlink_to("config.json")
    assert find_model(str(folder)).kind == "folder"


# ---- a hub --------------------------------------------------------------------------------------------


def test_fetches_what_is_needed_and_no_more(hub: Hub, cache: Path, tiny_files: dict[str, bytes]) -> None:
    extra = ["README.md", "pytorch_model.bin", "original/consolidated.00.pth", "onnx/model.onnx", "tf.h5"]
    extra += ["consolidated.safetensors", "flax_model.msgpack"]
    hub.add("org/tiny", {**tiny_files, **dict.fromkeys(extra, b"x" * 100)})
    found = find_model("org/tiny")
    assert found.revision == COMMIT and found.path.is_relative_to(cache)
    assert files_of(found.path) == tiny_files
    assert sorted(hub.downloads()) == sorted(tiny_files)
    # What is there is not fetched again, and the branch is known offline.
    hub.log.clear()
    assert find_model("org/tiny") == found
    assert [path for _, path, _ in hub.log] == ["/api/models/org/tiny/revision/main"]
    hub.log.clear()
    assert find_model("org/tiny", revision=COMMIT).path == found.path
    assert hub.log == []


def test_a_branch_that_moved_is_followed(hub: Hub, tiny_files: dict[str, bytes]) -> None:
    hub.add("org/tiny", tiny_files)
    assert find_model("org/tiny").revision == COMMIT
    hub.add("org/tiny", {**tiny_files, "generation_config.json": b"{}"}, OTHER_COMMIT)
    assert find_model("org/tiny").revision == OTHER_COMMIT
    assert find_model("org/tiny", revision=COMMIT[:9]).revision == COMMIT


def test_formats_of_weights(hub: Hub, tiny_files: dict[str, bytes]) -> None:
    rest = {n: c for n, c in tiny_files.items() if n != "model.safetensors"}
    hub.add("org/bin", {**rest, "pytorch_model.bin": b"x", "training_args.bin": b"y"})
    find_model("org/bin")
    assert "pytorch_model.bin" in hub.downloads() and "training_args.bin" not in hub.downloads()
    assert "no safetensors files" in error_of("org/bin", load_format="safetensors")
    hub.log.clear()
    hub.add("org/both", {**tiny_files, "pytorch_model.bin": b"x"})
    find_model("org/both", load_format="dummy")
    assert sorted(hub.downloads()) == sorted(rest)
    hub.log.clear()
    find_model("org/both", load_format="pt")
    assert hub.downloads() == ["pytorch_model.bin"]


def test_one_gguf_model_of_many(hub: Hub) -> None:
    hub.add(
        "org/m-GGUF",
        {"README.md": b"", "m-Q4_0.gguf": b"GGUF", "m-Q8_0-00001-of-00002.gguf": b"GGUF 1"}
        | {"m-Q8_0-00002-of-00002.gguf": b"GGUF 2"},
    )
    message = error_of("org/m-GGUF")
    assert "2 GGUF models" in message and "org/m-GGUF:Q4_K_M" in message and "m-Q4_0.gguf" in message
    assert hub.downloads() == []
    assert "no GGUF file of Q5_K_M" in error_of("org/m-GGUF:Q5_K_M")
    assert "no file 'x.gguf'" in error_of("org/m-GGUF/x.gguf")
    found = find_model("org/m-GGUF:Q8_0")
    assert found.path.name == "m-Q8_0-00001-of-00002.gguf"
    assert sorted(hub.downloads()) == ["m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf"]


def test_a_cut_download_is_resumed(
    hub: Hub, tiny_files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # the library's pause between attempts
    # The library keeps what it has by pieces of 10 MB.
    big = {**tiny_files, "model.safetensors": tiny_files["model.safetensors"] + bytes(22 << 20)}
    hub.add("org/tiny", big)
    hub.cut.add("model.safetensors")
    assert files_of(find_model("org/tiny").path) == big
    ranges = [r for m, p, r in hub.log if m == "GET" and p.endswith("model.safetensors")]
    assert len(ranges) == 2 and ranges[1] is not None and ranges[1].startswith("bytes=10")


@pytest.mark.parametrize(
    "status, code, words",
    [
        (404, "RepoNotFound", ["neither a folder here", "HF_TOKEN"]),
        (401, "RepoNotFound", ["neither a folder here", "HF_TOKEN"]),
        (401, "GatedRepo", ["gated", "accept its terms", "HF_TOKEN"]),
        (403, "GatedRepo", ["gated", "accept its terms", "HF_TOKEN"]),
        (403, None, ["refuses", "status 403", "HF_TOKEN"]),
        (404, "RevisionNotFound", ["no revision 'main'"]),
        (503, None, ["status 503", "not in", "check the name and the network"]),
    ],
)
def test_refusals_are_one_line(status: int, code: str | None, words: list[str], hub: Hub) -> None:
    hub.refuse["org/tiny"] = (status, code)
    message = error_of("org/tiny")
    assert "'org/tiny'" in message
    for word in words:
        assert word in message
    assert len(hub.log) == 1  # no storm


def test_tokens(hub: Hub, tiny_files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/tiny", tiny_files)
    hub.token = "hf_right"
    assert "HF_TOKEN" in error_of("org/tiny")
    assert "HF_TOKEN" in error_of("org/tiny", token="hf_wrong")
    assert find_model("org/tiny", token="hf_right").revision == COMMIT
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert find_model("org/tiny", revision=COMMIT[:9]).revision == COMMIT


def test_no_network(
    cache: Path,
    tiny_files: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    point_at("http://127.0.0.1:9", monkeypatch)  # nobody listens on it
    began = time.monotonic()
    message = error_of("org/tiny", revision="v1")
    assert "'org/tiny' at revision 'v1'" in message and "does not answer" in message
    lay_out(cache, "org/tiny", tiny_files)
    assert find_model("org/tiny").revision == COMMIT
    assert "taken from the cache" in caplog.text
    assert time.monotonic() - began < 5


def test_a_hub_that_is_silent(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        point_at(f"http://127.0.0.1:{server.getsockname()[1]}", monkeypatch)
        began = time.monotonic()
        assert "does not answer" in error_of("org/tiny")
        assert time.monotonic() - began < 3


def test_no_space(hub: Hub, tiny_files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/tiny", tiny_files)
    monkeypatch.setattr("octavo.models.hub._free_space", lambda folder: 1000)
    message = error_of("org/tiny")
    assert "1000 are free" in message and "--download-dir" in message and hub.downloads() == []


def test_environment_and_settings_in_a_process(tiny_files: dict[str, bytes], tmp_path: Path) -> None:
    """HF_ENDPOINT, HF_HOME, HF_TOKEN and HF_HUB_OFFLINE as they are set for a command; --download-dir."""
    code = (
        "import sys; from octavo.config import EngineConfig\n"
        "from octavo.models.locate import configured_model, configured_tokenizer\n"
        "c = EngineConfig(model='org/tiny', tokenizer='org/tok', download_dir=(sys.argv[1:] or [None])[0])\n"
        "s = configured_model(c); print(s.path); print(configured_tokenizer(c, s)); print(repr(c))"
    )
    env = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": "hf_right", "HF_HUB_OFFLINE": "0"}
    env.pop("HF_HUB_CACHE", None)

    def run(*args: str, **more: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", code, *args], capture_output=True, text=True, env={**env, **more}, cwd=ROOT
        )
        assert done.returncode == 0, done.stderr
        assert "%" not in done.stderr  # no bars where nobody looks
        return done.stdout.splitlines()

    with serving(Hub()) as hub:
        hub.token = "hf_right"
        hub.add("org/tiny", tiny_files)
        hub.add("org/tok", tiny_files)
        model, tokenizer, _ = run(HF_ENDPOINT=hub.address)
        assert Path(model).parts[-4:] == ("hub", "models--org--tiny", "snapshots", COMMIT)
        assert sorted(files_of(Path(tokenizer))) == sorted(set(tiny_files) - {"model.safetensors"})
        elsewhere, _, shown = run(str(tmp_path / "mine"), HF_ENDPOINT=hub.address)
        assert elsewhere.startswith(str(tmp_path / "mine")) and "hf_right" not in shown
    assert run(HF_HUB_OFFLINE="1")[0] == model


# ---- which files --------------------------------------------------------------------------------------


def test_choice_of_files_by_name() -> None:
    def choose(*names: str, load_format: str = "auto") -> list[str]:
        found = wanted_files(("config.json", *names), None, None, load_format, True, "org/m")
        return [n for n in found if n.endswith((".safetensors", ".bin", ".json")) and n != "config.json"]

    shards = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    index = "model.safetensors.index.json"
    assert choose(index, *shards, "consolidated.safetensors") == [index, *shards]
    assert choose("model.safetensors", "model.fp16.safetensors") == ["model.safetensors"]
    assert choose("adapter_model.safetensors", "pytorch_model.bin") == ["pytorch_model.bin"]
    assert choose(index, *shards, "pytorch_model.bin.index.json", "pytorch_model-00001-of-00001.bin") == [
        index,
        *shards,
    ]
    with pytest.raises(ModelError, match="holds no model"):
        wanted_files(["README.md", "data.json"], None, None, "auto", True, "org/m")
    names = ["a-IQ4_XS.gguf", "a-Q4_K_M.gguf", "a-Q4_K_S.gguf", "imatrix.gguf"]
    assert choose_gguf(names, "Q4_K_M", None, "it") == [1]
    with pytest.raises(ModelError, match="no GGUF file of Q4"):
        choose_gguf(names, "Q4", None, "it")
