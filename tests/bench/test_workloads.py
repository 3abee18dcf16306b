"""Seeded workloads: lengths, what is shared, order, files."""

from __future__ import annotations

import json

import pytest

from octavo.bench.workloads import VOCAB, WorkloadSpec, rounds, vocab_bounds
from octavo.errors import ConfigError


def prompts(**figures):
    return [item.prompt_token_ids for item in WorkloadSpec(**figures).items()]


@pytest.mark.parametrize("kind", ["random", "shared-prefix", "repetitive", "multi-turn"])
def test_a_seed_fixes_the_requests(kind):
    figures = dict(kind=kind, num_prompts=10, input_len=20, output_len=5, prefix_len=30)
    items = WorkloadSpec(**figures, seed=1).items()
    assert items == WorkloadSpec(**figures, seed=1).items()
    assert items != WorkloadSpec(**figures, seed=2).items()
    assert len(items) == 10
    assert all(VOCAB[0] <= token <= VOCAB[1] for item in items for token in item.prompt_token_ids)
    small = WorkloadSpec(**figures).items(vocab_bounds(384))
    assert all(96 <= token < 384 for item in small for token in item.prompt_token_ids)


def test_random_lengths_lie_within_the_ratio():
    assert {len(p) for p in prompts(num_prompts=20, input_len=20)} == {20}
    items = WorkloadSpec(num_prompts=300, input_len=20, output_len=10, range_ratio=0.5).items()
    assert {len(item.prompt_token_ids) for item in items} == set(range(10, 31))
    assert {item.max_tokens for item in items} == set(range(5, 16))


def test_shared_prefixes_are_shared_and_the_rest_is_not():
    found = prompts(kind="shared-prefix", num_prompts=8, prefix_len=30, input_len=10)
    assert len({tuple(p[:30]) for p in found}) == 1
    assert len({tuple(p[30:]) for p in found}) == 8
    assert {len(p) for p in found} == {40}


def test_repetitive_prompts_repeat():
    for prompt in prompts(kind="repetitive", num_prompts=3, input_len=50, period=7):
        assert len(prompt) == 50
        assert all(prompt[i] == prompt[i + 7] for i in range(43))


def test_a_turn_continues_the_one_before():
    figures = dict(kind="multi-turn", num_prompts=7, turns=3, input_len=10, turn_len=4, output_len=6)
    items = WorkloadSpec(**figures).items()
    assert [item.after for item in items] == [None, 0, 1, None, 3, 4, None]
    for item in items:
        if item.after is not None:
            before = items[item.after].prompt_token_ids
            assert item.prompt_token_ids[: len(before)] == before
            assert len(item.prompt_token_ids) == len(before) + 6 + 4
    assert rounds(items) == [[0, 3, 6], [1, 4], [2, 5]]
    assert rounds([]) == []


def test_files(tmp_path):
    path = tmp_path / "work.jsonl"
    lines = [
        {"prompt": "a", "max_tokens": 3},
        {"prompt_token_ids": [1, 2]},
        {"question": "q", "output_len": 9},
        {"turns": ["first", "second"]},
        {"messages": [{"role": "user", "content": "hi"}]},
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    items = WorkloadSpec(kind="custom", path=str(path), output_len=7).items()
    assert [item.max_tokens for item in items] == [3, 7, 9, 7, 7]
    assert [item.prompt for item in items[:4]] == ["a", [1, 2], "q", "first"]
    assert items[4].messages == [{"role": "user", "content": "hi"}]
    assert len(WorkloadSpec(kind="custom", path=str(path), num_prompts=2).items()) == 2
    path.write_text('{"prompt": "a"}\n{"answer": 42}\n')
    with pytest.raises(ConfigError, match=r"work.jsonl:2 is not a request"):
        WorkloadSpec(kind="custom", path=str(path)).items()
    with pytest.raises(ConfigError, match="cannot be read"):
        WorkloadSpec(kind="custom", path="no-such-file").items()


@pytest.mark.parametrize(
    ("figures", "told"),
    [
        ({"kind": "sharegpt"}, "dataset_name='sharegpt' is not known"),
        ({"kind": "custom"}, "dataset_path=FILE"),
        ({"path": "x"}, "go together"),
        ({"input_len": 0}, "input_len=0"),
        ({"num_prompts": -1}, "num_prompts=-1"),
        ({"range_ratio": 1.0}, "range_ratio=1.0"),
    ],
)
def test_wrong_figures_are_named(figures, told):
    with pytest.raises(ConfigError, match=told):
        WorkloadSpec(**figures)
