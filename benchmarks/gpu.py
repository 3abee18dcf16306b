"""Every figure of the GPU page, each one `octavo bench` command (benchmarks/gpu_rows.json), in one process.

    python benchmarks/gpu.py [--rows llama-8b,qwen3-0.6b/decode-1] [--json FILE] [--page]
    python benchmarks/gpu.py --list

Rows whose commands differ only in what is measured share one loaded model. `--rows` takes beginnings of ids;
the reports at the end of the file (sweep, growth, scheduler) run only when they are named. `--json` adds to
what the file holds, row by row, so that a run that is cut short loses nothing; `--page` writes the table of
benchmarks/gpu.md anew from it.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from octavo.bench.engines import Engines
from octavo.bench.report import Report, as_json
from octavo.cli.bench import load_benchmark
from octavo.cli.main import build_parser
from octavo.errors import OctavoError

FOLDER = Path(__file__).parent
BEGIN, END = "<!-- rows: begin (benchmarks/gpu.py --page) -->\n", "<!-- rows: end -->\n"


def load_rows(path: Path) -> dict[str, Any]:
    """The file of rows, with whole commands."""
    table: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    for row in [*table["rows"], *table["reports"]]:
        row["short"] = row["command"].replace("{engine}", "$ENGINE")
        row["command"] = row["command"].replace("{engine}", table["engine"])
    return table


def run_command(command: str, engines: Engines) -> Report:
    """What the command would do on its own, on an engine that others may have loaded."""
    argv = shlex.split(command)
    args = build_parser("bench").parse_args([*argv[1:], "--disable-tqdm"])
    return load_benchmark(args.benchmark).measure(args, engines)


def chosen_rows(table: dict[str, Any], names: list[str]) -> list[dict[str, Any]]:
    """Rows whose ids begin with one of the names; all but the reports without any."""
    if not names:
        return list(table["rows"])
    found = [
        row for row in [*table["rows"], *table["reports"]] if any(row["id"].startswith(n) for n in names)
    ]
    if not found:
        raise SystemExit(f"no row begins with {' or '.join(names)}: see --list")
    return found


def measure(rows: list[dict[str, Any]], results: dict[str, Any], json_path: Path | None) -> None:
    """Run the rows' commands, each once, and add what they found to `results` by id."""
    reports: dict[str, dict[str, Any]] = {}
    with Engines() as engines:
        for row in rows:
            command = row["command"]
            if command not in reports:
                print(f"\n$ {command}", file=sys.stderr, flush=True)
                try:
                    report = run_command(command, engines)
                    print(report.text, file=sys.stderr, flush=True)
                    reports[command] = as_json(report)
                except (OctavoError, RuntimeError) as error:  # the other rows have figures of their own
                    print(f"failed: {error}", file=sys.stderr, flush=True)
                    reports[command] = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
            result: dict[str, Any] = {"command": command, **reports[command]}
            if "value" in row and "error" not in result:
                value = result["summary"][row["value"]]
                result["figure"] = None if value is None else value * row.get("scale", 1)
            results[row["id"]] = result
            if json_path is not None:
                json_path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def judge(row: dict[str, Any], ours: float | None) -> dict[str, str]:
    """A row's cells: ours, peer, how many times better, floor, share of it, target, whether it is reached."""
    lower = row["better"] == "lower"

    def ratio(other: float | None) -> float | None:
        """How many times better ours is than the other."""
        if ours is None or not other:
            return None
        return other / ours if lower else ours / other

    peer, floor, target = ratio(row["peer"]), ratio(row["floor"]), ratio(row["target"])
    return {
        "figure": row["figure"],
        "ours": _number(ours),
        "vLLM": _number(row["peer"]),
        "times better": "–" if peer is None else f"{peer:.2f}",
        "floor": _number(row["floor"]),
        "share of it": "–" if floor is None else f"{floor:.0%}",
        "target": "–" if not row["target"] else f"{'≤' if lower else '≥'} {_number(row['target'])}",
        "": "" if target is None else "reached" if target >= 1 else "missed",
    }


def markdown(table: dict[str, Any], results: dict[str, Any]) -> str:
    """The page's part: machine and sources, the table, the commands."""
    rows = [(row, judge(row, results.get(row["id"], {}).get("figure"))) for row in table["rows"]]
    columns = list(rows[0][1])
    lines = [
        f"Machine: {table['machine']}. Peer: {table['peer']}. Floor: {table['floor']}.",
        "",
        f"| {' | '.join(columns)} |",
        f"|{'---|' * len(columns)}",
        *(f"| {' | '.join(cells.values())} |" for _, cells in rows),
        "",
        "The commands, in the order of the rows:",
        "",
        "```console",
        f'$ ENGINE="{table["engine"]}"',
        *dict.fromkeys(f"$ {row['short']}" for row, _ in rows),
        "```",
    ]
    return "\n".join(lines) + "\n"


def with_table(page: str, text: str) -> str:
    """The page with its part between the comments as `text`."""
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"the page has no comments {BEGIN.strip()} and {END.strip()}")
    return f"{head}{BEGIN}\n{text}\n{END}{tail}"


def plain(table: dict[str, Any], rows: list[dict[str, Any]], results: dict[str, Any]) -> str:
    """The rows for a terminal."""
    cells = [judge(row, results.get(row["id"], {}).get("figure")) for row in rows if "figure" in row]
    if not cells:
        return ""
    widths = {name: max(len(name), *(len(c[name]) for c in cells)) for name in cells[0]}
    lines = [" ".join(name.ljust(width) for name, width in widths.items())]
    lines += [" ".join(c[name].ljust(width) for name, width in widths.items()) for c in cells]
    return "\n".join(line.rstrip() for line in lines)


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return (
        f"{value:,.0f}"
        if value >= 100
        else f"{value:.3g}"
        if value >= 10
        else f"{value:.3f}".rstrip("0").rstrip(".")
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="", help="comma-separated beginnings of ids")
    parser.add_argument("--table", type=Path, default=FOLDER / "gpu_rows.json", help="the file of rows")
    parser.add_argument("--json", type=Path, help="results, by id; read first if it is there")
    parser.add_argument("--page", nargs="?", type=Path, const=FOLDER / "gpu.md", help="the page to write")
    parser.add_argument("--list", action="store_true", help="show ids and commands, run nothing")
    parser.add_argument("--no-run", action="store_true", help="show (and write) what --json holds")
    args = parser.parse_args(argv)
    table = load_rows(args.table)
    rows = chosen_rows(table, [name for name in args.rows.split(",") if name])
    if args.list:
        print("\n".join(f"{row['id']:24} {row['command']}" for row in [*table["rows"], *table["reports"]]))
        return
    results: dict[str, Any] = {}
    if args.json is not None and args.json.exists():
        results = json.loads(args.json.read_text(encoding="utf-8"))
    if not args.no_run:
        measure(rows, results, args.json)
    print(plain(table, rows, results))
    if args.page is not None:
        page = args.page.read_text(encoding="utf-8")
        args.page.write_text(with_table(page, markdown(table, results)), encoding="utf-8")


if __name__ == "__main__":
    main()
