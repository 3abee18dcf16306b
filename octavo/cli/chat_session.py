"""The conversation of `octavo chat`: its messages, settings and commands."""

from __future__ import annotations

import argparse
import queue
import shlex
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from octavo.cli.sampling_args import add_sampling_arguments, sampling_values
from octavo.errors import RequestError, RequestFailedError
from octavo.outputs import RequestOutput
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.cli.terminal import Terminal
    from octavo.llm import LLM

HELP = """\
/system TEXT     set the system message and start anew; /system alone removes it
/reset           start a new conversation
/set NAME VALUE  change a setting of the answers (temperature 0.5); VALUE `default` undoes that
/set             show the settings that are not the model's own
/help            this
/exit            leave (also Ctrl-D)
Ctrl-C stops an answer. A line that ends in \\ goes on in the next one; three double quotes (\"\"\") open and
close a text of several lines. A message that begins with / is sent with a space before it."""


def check_settings(values: dict[str, Any]) -> None:
    """Check settings of the answers.

    Raises:
        RequestError: a value out of its bounds, or one that a chat can't show.
    """
    if SamplingParams(**values).n != 1:
        raise RequestError(f"n={values['n']} is not for a chat, which shows one answer: leave it out", "n")


@dataclass
class _Turn:
    """One answer as it came."""

    text: str = ""
    tokens: int = 0
    started: float = 0.0
    first: float | None = None
    last: float = 0.0
    output: RequestOutput | None = None
    interrupted: bool = False


class ChatSession:
    """Owns the conversation. A message enters it together with its answer, or not at all.

    An answer that was stopped stays as far as it came; one that failed takes its question with it.

    Args:
        settings: of `SamplingParams`, as the user gave them.
        defaults: the chat's own, where it has other ones than the model.
        stats: tell token counts and rates after each answer.
    """

    def __init__(
        self,
        llm: LLM,
        terminal: Terminal,
        settings: dict[str, Any],
        defaults: dict[str, Any],
        system: str | None = None,
        stats: bool = True,
    ):
        self._llm = llm
        self._terminal = terminal
        self._settings = {**defaults, **settings}
        self._defaults = defaults
        self._system = system
        self._stats = stats
        self._ended = False
        self.messages: list[dict[str, Any]] = []
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda rest: terminal.say(HELP),
            "/exit": self._exit,
            "/quit": self._exit,
            "/reset": self._reset,
            "/system": self._set_system,
            "/set": self._set,
        }

    @property
    def _context(self) -> int:
        """Most tokens that a conversation may have for an answer to begin."""
        return min(self._llm.facts.max_model_len - 1, self._llm.facts.kv_capacity)

    def greet(self) -> None:
        """Tell a person where they are."""
        if self._terminal.interactive:
            limit = self._llm.facts.max_model_len
            self._terminal.say(f"A context of {limit} tokens. /help tells the commands, Ctrl-D leaves.")

    def run(self) -> None:
        """Take messages and commands until the end of the input."""
        while not self._ended:
            try:
                message = self._terminal.read_message()
                if message is None:
                    if self._terminal.interactive:
                        self._terminal.say("")
                    return
                if message.strip():
                    self.take(message)
            except KeyboardInterrupt:  # what was typed is given up; an answer catches its own
                self._terminal.say("")

    def take(self, message: str) -> None:
        """Obey a command, or answer a message."""
        name, _, rest = message.partition(" ")
        try:
            if not message.startswith("/") or "\n" in message:
                self._answer(message.strip())
            elif command := self._commands.get(name):
                command(rest.strip())
            else:
                self._terminal.say(
                    f"there is no command {name}: /help tells them; to send it, put a space before it",
                    error=True,
                )
        except (RequestError, RequestFailedError) as error:
            self._terminal.say(" ".join(str(error).split()), error=True)

    # ---- answers --------------------------------------------------------------------------------

    def _answer(self, message: str) -> None:
        head = [] if self._system is None else [{"role": "system", "content": self._system}]
        question = {"role": "user", "content": message}
        prompt = self._llm.render_chat([*head, *self.messages, question])
        length = len(prompt["prompt_token_ids"])
        if length > self._context:
            self._say_full(length)
            return
        turn = self._stream(prompt)
        self._terminal.write("\n")
        if turn.text or not turn.interrupted:
            self.messages += [question, {"role": "assistant", "content": turn.text}]
        if self._stats:
            self._terminal.say(_summary(turn, length))
        self._tell_end(turn, length)

    def _stream(self, prompt: dict[str, Any]) -> _Turn:
        """Show an answer while it is made.

        The engine is read on a thread of its own, so that Ctrl-C takes effect at once, even while a long
        prompt is computed, and interrupts nothing but this method's waiting.

        Raises:
            RequestError, RequestFailedError: there is no answer, or no more of it.
        """
        params = self._llm.get_default_sampling_params().clone(**self._settings)
        items: queue.SimpleQueue[RequestOutput | Exception | None] = queue.SimpleQueue()
        stopped = threading.Event()

        def pump() -> None:
            try:
                stream = self._llm.stream(prompt, params)
                for output in stream:
                    if stopped.is_set():
                        stream.close()  # type: ignore[attr-defined]  # a generator: aborts the request
                        return
                    items.put(output)
                items.put(None)
            except Exception as error:
                items.put(error)

        turn = _Turn(started=time.perf_counter())
        threading.Thread(target=pump, name="octavo-chat", daemon=True).start()
        try:
            while (item := items.get()) is not None:
                if isinstance(item, Exception):
                    self._terminal.write("\n" if turn.text else "")
                    raise item
                self._show(turn, item)
        except KeyboardInterrupt:
            turn.interrupted = True
        finally:
            stopped.set()
        return turn

    def _show(self, turn: _Turn, output: RequestOutput) -> None:
        now = time.perf_counter()
        choice = output.outputs[0]
        turn.output = output
        if choice.token_ids:
            turn.first = turn.first if turn.first is not None else now
            turn.last = now
            turn.tokens += len(choice.token_ids)
        if choice.text:
            # First into the answer: what was shown is remembered, whenever Ctrl-C comes.
            turn.text += choice.text
            self._terminal.write(choice.text)

    def _tell_end(self, turn: _Turn, length: int) -> None:
        if turn.interrupted:
            self._terminal.say("stopped" if turn.text else "stopped: the message is forgotten")
        elif turn.output is not None and turn.output.outputs[0].finish_reason == "length":
            limit = self._settings.get("max_tokens")
            if limit is not None and turn.tokens >= limit:
                self._terminal.say(f"cut off after max_tokens={limit}: /set max_tokens changes it")
            else:
                self._say_full(length + turn.tokens)

    def _say_full(self, tokens: int) -> None:
        limit = self._llm.facts.max_model_len
        what = f"{tokens} tokens of {limit}"
        if self._context < limit - 1:
            what = f"{tokens} tokens, the KV cache holds {self._context}"
        self._terminal.say(f"the context is full ({what}): /reset starts a new conversation", error=True)

    # ---- commands -------------------------------------------------------------------------------

    def _exit(self, rest: str) -> None:
        self._ended = True

    def _reset(self, rest: str) -> None:
        self.messages.clear()
        self._terminal.say("a new conversation")

    def _set_system(self, rest: str) -> None:
        self._system = rest or None
        self.messages.clear()
        self._terminal.say(
            "system message set: a new conversation" if rest else "no system message: a new conversation"
        )

    def _set(self, rest: str) -> None:
        name, _, text = rest.partition(" ")
        name, text = name.replace("-", "_"), text.strip()
        if not name:
            for key, value in self._settings.items():
                self._terminal.say(f"{key} = {value!r}")
            return
        if not text:
            raise RequestError(f"/set {name} needs a value, or `default`")
        settings = {key: value for key, value in self._settings.items() if key != name}
        if text == "default":
            if name not in SamplingParams.__struct_fields__:
                raise RequestError(f"there is no setting {name}: see `octavo chat --help` under sampling")
            settings |= {key: value for key, value in self._defaults.items() if key == name}
        else:
            settings |= parse_setting(name, text)
        check_settings(settings)
        self._settings = settings
        self._terminal.say(f"{name} = {settings[name]!r}" if name in settings else f"{name}: the model's own")


class _SettingParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise RequestError(message)


def parse_setting(name: str, text: str) -> dict[str, Any]:
    """A setting as the command line would read it: `temperature`, `0.5`. Switches take true or false.

    Raises:
        RequestError: no such setting, or not a value for it.
    """
    parser = _SettingParser(prog="/set", add_help=False, allow_abbrev=False)
    add_sampling_arguments(parser)
    flag = "--" + name.replace("_", "-")
    # Looked up in the parser, so that one declaration serves both.
    action = next((a for a in parser._actions if flag in a.option_strings), None)
    if action is None:
        raise RequestError(f"there is no setting {name}: see `octavo chat --help` under sampling")
    if isinstance(action, argparse.BooleanOptionalAction):
        if text.lower() not in ("true", "false"):
            raise RequestError(f"{name}={text!r} is not valid: give true or false")
        argv = [flag if text.lower() == "true" else "--no-" + flag[2:]]
    elif action.nargs == "+":
        argv = [flag, *text.split()]
    else:
        argv = [f"{flag}={_unquoted(text)}"]
    return sampling_values(parser.parse_args(argv))


def _unquoted(text: str) -> str:
    """`"\\n"` in quotes keeps its spaces; anything else stands as it is."""
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "\"'":
        try:
            return shlex.split(text)[0]
        except (ValueError, IndexError):
            return text
    return text


def _summary(turn: _Turn, prompt_tokens: int) -> str:
    parts = [f"{turn.tokens} token{'' if turn.tokens == 1 else 's'}"]
    if turn.tokens > 1 and turn.first is not None and turn.last > turn.first:
        parts.append(f"{(turn.tokens - 1) / (turn.last - turn.first):.1f} tokens/s")
    if turn.first is not None:
        parts.append(f"first after {turn.first - turn.started:.2f} s")
    cached = 0 if turn.output is None else turn.output.num_cached_tokens
    return f"[{', '.join(parts)}; prompt {prompt_tokens} tokens, {cached} cached]"
