"""Random steps for the kernels that prepare a batch, and the check against the plain versions."""

from __future__ import annotations

from types import ModuleType

import torch

from octavo.kernels import reference_batch


def check(kernels: ModuleType, counts: list[int], block_size: int, device: str = "cpu") -> None:
    """One step of requests with so many rows each: everything written must equal the twin's."""
    generator = torch.Generator().manual_seed(sum(counts) + block_size)
    slots_total, length, n, rows = 9, 700, len(counts), sum(counts)
    width = -(-length // block_size)

    def draw(high: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.randint(high, shape, generator=generator).to(dtype)

    state = dict(
        num_computed=draw(100, (slots_total,), torch.int64),
        token_table=draw(1000, (slots_total, length), torch.int32),
        block_table=draw(50, (slots_total, width), torch.int32),
        token_ids=torch.full((rows,), -7, dtype=torch.int32),
        positions=torch.full((rows,), -7),
        ends=torch.full((n,), -7),
        seq_lens=torch.full((n,), -7, dtype=torch.int32),
        block_rows=torch.full((n, width), -7, dtype=torch.int32),
        slot_mapping=torch.full((rows,), -7),
    )
    slots = torch.randperm(slots_total, generator=generator)[:n]
    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    tokens = draw(1000, (n, 3), torch.int32)[:, 1]
    results = []
    for module, where in ((reference_batch, "cpu"), (kernels, device)):
        s = {name: value.to(where, copy=True) for name, value in state.items()}
        at, first = slots.to(where), starts.to(where)
        module.gather_rows(
            at,
            first,
            s["num_computed"],
            s["token_table"],
            s["token_ids"],
            s["positions"],
            s["ends"],
            s["seq_lens"],
        )
        columns = -(-int(s["ends"].max()) // block_size)
        module.map_blocks(
            at, first, s["ends"], s["block_table"], block_size, columns, s["block_rows"], s["slot_mapping"]
        )
        module.append_tokens(at, s["ends"], tokens.to(where), s["token_table"])
        results.append({name: value.cpu() for name, value in s.items()})
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name
    assert (results[0]["positions"] >= 0).all()
    assert torch.equal(results[0]["num_computed"][slots], state["num_computed"][slots] + torch.tensor(counts))


COUNTS = [[1], [1, 1, 1, 1, 1], [1, 1, 7, 300], [513], [2, 1, 3]]
