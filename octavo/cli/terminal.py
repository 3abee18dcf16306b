"""Reading messages and writing answers: at a terminal with prompts, editing and colours, else plainly."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TextIO

from octavo.errors import RequestError

PROMPT, CONTINUED = ">>> ", "... "
FENCE = '"""'
HISTORY_LENGTH = 1000
_BOLD, _DIM, _RED, _PLAIN = "\x1b[1m", "\x1b[2m", "\x1b[31m", "\x1b[0m"
# What a model writes may not move the cursor, ring, or rename the window.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Terminal:
    """Owns the three streams of the program and the line editor's history.

    Answers go to standard output and nothing else does; what the program says goes to standard error.
    Prompts are shown only if standard input is a terminal, colours only where a terminal shows them and
    NO_COLOR isn't set. As a context manager it loads and saves the history of messages, which is kept
    in $XDG_STATE_HOME/octavo/chat_history, readable by the user alone.
    """

    def __init__(self, stdin: TextIO, stdout: TextIO, stderr: TextIO, env: Mapping[str, str]):
        self._in, self._out, self._err = stdin, stdout, stderr
        self.interactive = stdin.isatty()
        colours = not env.get("NO_COLOR") and env.get("TERM") != "dumb"
        self._colour_out = colours and stdout.isatty()
        self._colour_err = colours and stderr.isatty()
        self._clean = stdout.isatty()
        # input() edits lines, and writes its prompt to standard output: only where both are terminals.
        self._edits = self.interactive and stdout.isatty()
        state = env.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
        self._history_path = Path(state) / "octavo" / "chat_history"
        self._readline: ModuleType | None = None

    def __enter__(self) -> Terminal:
        if self._edits:
            with contextlib.suppress(ImportError):  # not built everywhere
                import readline

                self._readline = readline
                readline.set_history_length(HISTORY_LENGTH)
                with contextlib.suppress(OSError):
                    readline.read_history_file(self._history_path)
        return self

    def __exit__(self, *_: object) -> None:
        if self._readline is None:
            return
        with contextlib.suppress(OSError):  # a home that can't be written to
            self._history_path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(self._history_path, os.O_CREAT | os.O_WRONLY, 0o600))
            self._readline.write_history_file(self._history_path)

    def read_message(self) -> str | None:
        """The next message, of one line or more; None at the end of the input.

        A line that ends in a backslash goes on in the next one. Three double quotes at a line's beginning
        open a text of any lines, three at a line's end close it.

        Raises:
            KeyboardInterrupt: the user gave up what was typed.
            RequestError: the input isn't UTF-8.
        """
        line = self._read_line(PROMPT)
        if line is None:
            return None
        if line.lstrip().startswith(FENCE):
            return self._read_fenced(line.lstrip()[len(FENCE) :])
        lines = [line]
        while lines[-1].endswith("\\"):
            following = self._read_line(CONTINUED)
            if following is None:
                lines[-1] = lines[-1][:-1]
                break
            lines[-1] = lines[-1][:-1]
            lines.append(following)
        return "\n".join(lines)

    def _read_fenced(self, first: str) -> str:
        lines = [first]
        while not lines[-1].rstrip().endswith(FENCE):
            following = self._read_line(CONTINUED)
            if following is None:
                return "\n".join(lines).strip("\n")
            lines.append(following)
        lines[-1] = lines[-1].rstrip()[: -len(FENCE)]
        return "\n".join(lines).strip("\n")

    def _read_line(self, prompt: str) -> str | None:
        try:
            if self._edits:
                return input(self._styled_prompt(prompt))
            if self.interactive:
                self._err.write(prompt)
                self._err.flush()
            line = self._in.readline()
        except EOFError:
            return None
        except UnicodeDecodeError as error:
            raise RequestError(
                f"standard input is not UTF-8 (byte {error.start}): convert it before it is piped in"
            ) from None
        return line.removesuffix("\n").removesuffix("\r") if line else None

    def _styled_prompt(self, prompt: str) -> str:
        if not self._colour_out:
            return prompt
        if self._readline is None:
            return f"{_BOLD}{prompt}{_PLAIN}"
        # The editor must know which bytes take no room.
        return f"\x01{_BOLD}\x02{prompt}\x01{_PLAIN}\x02"

    def write(self, text: str) -> None:
        """A piece of an answer, shown at once."""
        self._out.write(_CONTROLS.sub("\ufffd", text) if self._clean else text)
        self._out.flush()

    def say(self, text: str, error: bool = False) -> None:
        """A line of the program's own."""
        self._out.flush()
        style = _RED if error else _DIM
        self._err.write(f"{style}{text}{_PLAIN}\n" if self._colour_err else f"{text}\n")
        self._err.flush()
