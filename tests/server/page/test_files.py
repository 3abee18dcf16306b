"""The page without a browser: what is served to whom, with which policy, and its texts in both languages."""

from __future__ import annotations

import re

import httpx
import pytest

import octavo
from octavo.server.page.files import ASSETS, FOLDER
from tests.server.conftest import Running, running
from tests.server.fakes import FakeEngine

DATA = ("/server_info.json", "/server_state.json")
PARTS = ("/", *(f"/page/{name}" for name in ASSETS))


def served(server: Running, path: str, **kwargs: object) -> httpx.Response:
    answer = server.client.get(path, **kwargs)  # type: ignore[arg-type]
    assert answer.status_code == 200, (path, answer.text)
    return answer


def test_every_part_is_served_with_a_policy_that_forbids_other_origins(server: Running) -> None:
    kinds = {"/": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
    for path in PARTS:
        answer = served(server, path)
        assert answer.headers["content-type"].split(";")[0] == kinds[path.rpartition(".")[2]]
        policy = dict(
            part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";")
        )
        assert policy["default-src"] == "'none'" and policy["frame-ancestors"] == "'none'"
        assert {policy[name] for name in ("script-src", "style-src", "img-src", "connect-src")} == {"'self'"}
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_the_files_name_no_other_place_and_hold_no_inline_code() -> None:
    for path in FOLDER.iterdir():
        text = path.read_text(encoding="utf-8")
        others = set(re.findall(r"(?:https?:)?//[a-z0-9-]+\.[a-z.]+[^\s\"']*", text))
        assert others <= {"http://www.w3.org/2000/svg", "//www.w3.org/2000/svg"}, path.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text), (
            path.name
        )
    page = (FOLDER / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<style|<script(?![^>]*\bsrc=)|\bstyle=|\bon[a-z]+=", page)


def test_the_folder_holds_what_is_served_and_nothing_else() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {"index.html", *ASSETS}


def test_an_unchanged_part_is_not_sent_again(server: Running) -> None:
    for path in PARTS:
        tag = served(server, path).headers["etag"]
        again = server.client.get(path, headers={"if-none-match": tag})
        assert again.status_code == 304 and again.content == b""
        assert served(server, path, headers={"if-none-match": '"other"'}).content


@pytest.mark.parametrize("path", ["/page/", "/page/index.html", "/page/../config.py", "/page/%2e%2e/info.py"])
def test_nothing_else_can_be_read(server: Running, path: str) -> None:
    request = server.client.build_request("GET", server.url)
    request.url = request.url.copy_with(raw_path=path.encode())
    assert server.client.send(request).status_code == 404


def test_the_page_loads_without_a_key_and_its_figures_do_not() -> None:
    with running(api_key=["k"]) as server:
        for path in PARTS:
            served(server, path)
        assert 'data-needs-key="true"' in served(server, "/").text
        for path in DATA:
            assert server.client.get(path).status_code == 401
            served(server, path, headers={"authorization": "Bearer k"})
    with running() as server:
        assert 'data-needs-key="false"' in served(server, "/").text


def test_it_can_be_turned_off() -> None:
    with running(disable_page=True) as server:
        for path in (*PARTS, *DATA):
            assert server.client.get(path).status_code == 404
        assert not {"/", *DATA} & set(server.client.get("/openapi.json").json()["paths"])


def test_no_other_method(server: Running) -> None:
    for path in (*PARTS, *DATA):
        assert server.client.post(path, json={}).status_code == 405


def languages() -> dict[str, dict[str, str]]:
    """The texts by language, read without running the script."""
    source = (FOLDER / "texts.js").read_text(encoding="utf-8")
    found = {}
    for name in ("en", "zh"):
        body = source.partition(f"const {name} = {{\n")[2].partition("\n};\n")[0]
        found[name] = dict(re.findall(r'(\w+): "((?:[^"\\]|\\.)*)"', body))
    return found


def test_both_languages_have_every_text_that_is_used() -> None:
    texts = languages()
    assert texts["en"].keys() == texts["zh"].keys() and len(texts["en"]) > 80
    for key, english in texts["en"].items():
        places = [sorted(re.findall(r"\{(\w+)\}", texts[name][key])) for name in ("en", "zh")]
        assert places[0] == places[1], (key, english)
    sources = "".join((FOLDER / name).read_text(encoding="utf-8") for name in ASSETS if name.endswith(".js"))
    page = (FOLDER / "index.html").read_text(encoding="utf-8")
    used = set(re.findall(r'\btext\("(\w+)"', sources))
    used |= set(re.findall(r'data-(?:text|label|placeholder)="(\w+)"', page))
    assert used <= texts["en"].keys()
    for key in texts["en"]:
        assert re.search(rf'"{key}"|\b{key}\b', sources.replace("texts.js", "") + page), key


def test_the_files_are_in_the_package() -> None:
    """What a wheel holds is the folder's files, by the pattern in pyproject.toml."""
    root = FOLDER.parent.parent.parent.parent
    assert root == type(FOLDER)(octavo.__file__).parent.parent
    assert '"server/page/static/*"' in (root / "pyproject.toml").read_text(encoding="utf-8")


def test_dead_engine_is_told() -> None:
    with running(FakeEngine()) as server:
        server.call(server.engine.kill)
        assert server.client.get("/server_state.json").status_code == 503
        served(server, "/server_info.json")
        served(server, "/")
