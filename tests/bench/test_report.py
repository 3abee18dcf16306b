"""Files of results: what cannot be written is told before anything is measured."""

from __future__ import annotations

import pytest

from octavo.bench.report import Report, as_json, check_writable, make_folder
from octavo.errors import ConfigError


def test_a_check_leaves_files_as_they_were(tmp_path):
    check_writable(None)
    check_writable(str(tmp_path / "new.json"))
    assert not list(tmp_path.iterdir())
    old = tmp_path / "old.json"
    old.write_text("content")
    check_writable(str(old))
    assert old.read_text() == "content"


@pytest.mark.parametrize("path", ["{}", "{}/none/x.json", "{}/file/x.json", "/proc/x.json", ""])
def test_files_that_cannot_be_written(tmp_path, path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="^plot='.*' cannot be written"):
        check_writable(path.format(tmp_path), "plot")


def test_a_folder_is_made(tmp_path):
    make_folder(str(tmp_path / "a" / "b"), "profile")
    assert (tmp_path / "a" / "b").is_dir() and not list((tmp_path / "a" / "b").iterdir())


@pytest.mark.parametrize("path", ["{}/file", "{}/file/x", "/proc/none", ""])
def test_folders_that_cannot_be_made(tmp_path, path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="^profile='.*' cannot be written to"):
        make_folder(path.format(tmp_path), "profile")


def test_synthetic_acceptance_is_told_in_the_table_and_in_the_file():
    report = Report("latency", {}, {"num_iters": 3}, [], "the table")
    assert report.marked(None) == report
    marked = report.marked([0.8, 0.5])
    assert "SYNTHETIC acceptance of drafts, 0.8,0.5" in marked.text
    assert as_json(marked)["summary"] == {"synthetic_acceptance": [0.8, 0.5], "num_iters": 3}
