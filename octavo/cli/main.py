"""The `octavo` command: finds the subcommand, imports only that one, and turns errors into exit codes.

A command is a module `octavo.cli.<name>` (`-` written `_`) with

    SUMMARY: str                                    one line for `octavo --help`
    add_arguments(parser: ArgumentParser) -> None   declares its options
    run(args: Namespace) -> int                     does the work, returns the exit code

Its top level must stay light: `octavo --help` imports all of them. Heavy imports belong in `run`.

Exit codes: 0 done; 1 failed; 2 wrong usage, setting or request; 130 interrupted; 141 the reader of
standard output went away.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import os
import select
import sys
from collections.abc import Sequence
from typing import Any, NoReturn, Protocol, cast

from octavo.cli.arguments import normalized
from octavo.errors import ConfigError, OctavoError, RequestError
from octavo.version import __version__

COMMANDS = ("serve", "chat", "generate", "run-batch", "bench", "eval", "quantize", "plan", "pull", "env")
LLAMA_CPP = {
    "-m": "--model",
    "-c": "--max-model-len",
    "--ctx-size": "--max-model-len",
    "-n": "--max-tokens",
    "--predict": "--max-tokens",
    "--n-predict": "--max-tokens",
    "-t": "--num-threads",
    "--threads": "--num-threads",
    "-s": "--seed",
    "--temp": "--temperature",
    "-np": "--max-num-seqs",
    "--parallel": "--max-num-seqs",
    "-a": "--served-model-name",
    "--alias": "--served-model-name",
    "-md": "--speculative-model",
    "--model-draft": "--speculative-model",
    "-sys": "--system",
    "--system-prompt": "--system",
}
"""What llama.cpp calls some options, to tell those who give its names."""
EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 1, 2, 130, 141


class Command(Protocol):
    """What `main` asks of a command's module."""

    SUMMARY: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...


class Parser(argparse.ArgumentParser):
    """Reports wrong usage in one line. Options cannot be abbreviated, so that new ones break no script."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        # Here, and not in `parse_args` of the outermost parser, since only the command's own knows what
        # its options are called.
        words = sys.argv[1:] if args is None else args
        known, unknown = super().parse_known_args(normalized(words, self._option_string_actions), namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._hint(unknown[0])}")
        return known, unknown

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        # argparse abbreviates options of one dash all the same: -t would be -tp.
        found: list[Any] = super()._get_option_tuples(option_string)
        return [option for option in found if option_string.startswith(option[1])]

    def _hint(self, unknown: str) -> str:
        """What was perhaps meant by an argument that is none."""
        if not unknown.startswith("-"):
            takes_text = any(action.dest == "prompt" for action in self._actions)
            return ": write a prompt of several words in quotes" if takes_text else ""
        flag, options = unknown.partition("=")[0], self._option_string_actions
        near = [LLAMA_CPP[flag]] if LLAMA_CPP.get(flag) in options else []
        if not near and flag.startswith("--"):
            near = difflib.get_close_matches(flag, options, 1)
        return f": did you mean {near[0]}?" if near else ""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: {message} (see `{self.prog} --help`)\n")


def load_command(name: str) -> Command:
    """Import the module of a command."""
    return cast(Command, importlib.import_module(f"octavo.cli.{name.replace('-', '_')}"))


def build_parser(command: str | None = None) -> argparse.ArgumentParser:
    """The parser of the command line: `command` with its options, or all commands by name and summary."""
    parser = Parser(
        prog="octavo",
        description="Serve open-weight language models, offline and over the OpenAI API.",
        epilog="`octavo COMMAND --help` tells a command's options.",
    )
    parser.add_argument("--version", action="version", version=f"octavo {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, title="commands")
    for name in COMMANDS if command is None else (command,):
        module = load_command(name)
        subparser = subparsers.add_parser(name, help=module.SUMMARY, description=module.SUMMARY)
        if command is not None:
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (by default the process's) and return its exit code.

    `OCTAVO_DEBUG=1` shows the traceback of errors that are otherwise one line.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    command = argv[0] if argv and argv[0] in COMMANDS else None
    try:
        parser = build_parser(command)
        args = parser.parse_args(argv)
        if command is None:  # options stand before the command
            parser.error(f"options of {args.command} go after it")
        code = int(args.run(args) or 0)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        if _stdout_is_open():
            raise
        return EXIT_BROKEN_PIPE
    except OctavoError as error:
        if os.environ.get("OCTAVO_DEBUG") == "1":
            raise
        print(f"octavo: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, (ConfigError, RequestError)) else EXIT_FAILED


def _stdout_is_open() -> bool:
    """Whether standard output still has a reader; if not, the interpreter's last flush is silenced."""
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
        # An unbuffered stream has nothing to flush: ask the system.
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        if not any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
            return True
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return False


if __name__ == "__main__":
    sys.exit(main())
