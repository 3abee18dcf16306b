"""`octavo generate`: one prompt in, text out as it is made."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from octavo.errors import RequestError

if TYPE_CHECKING:
    from octavo.llm import LLM
    from octavo.sampling_params import SamplingParams

SUMMARY = "answer one prompt, from the command line or standard input"

MAX_TOKENS = 256
"""A person reads the answer: `SamplingParams`' own 16 tokens would cut nearly every one."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from octavo.cli.sampling_args import add_sampling_arguments
    from octavo.config import EngineConfig
    from octavo.config_options import add_config_arguments

    parser.add_argument(
        "prompt",
        nargs="?",
        help="The prompt. `-`, or none where standard input is a pipe, reads it from there.",
    )
    model_help = EngineConfig.__dataclass_fields__["model"].metadata["help"]
    parser.add_argument("--model", metavar="MODEL", help=model_help)
    parser.add_argument(
        "--json", action="store_true", help="Print one JSON object once the answer is complete."
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--chat",
        dest="use_chat",
        action="store_true",
        default=None,
        help="Put the prompt into the chat template (done anyway if the model has one).",
    )
    form.add_argument(
        "--raw", dest="use_chat", action="store_false", help="Let the model continue the prompt as it stands."
    )
    parser.add_argument(
        "--system", metavar="TEXT", help="A system message before the prompt; implies --chat."
    )
    # One --seed, declared with the sampling options, seeds the request and the engine.
    add_sampling_arguments(parser, max_tokens=MAX_TOKENS)
    add_config_arguments(parser, EngineConfig, "engine", skip=("model", "seed"))


def run(args: argparse.Namespace) -> int:
    from octavo.cli.sampling_args import sampling_values
    from octavo.config import EngineConfig
    from octavo.config_options import config_from_args
    from octavo.sampling_params import SamplingParams

    # Everything that can be wrong with the command line is told before a model is loaded.
    if args.system is not None and args.use_chat is False:
        raise RequestError("--system needs the chat template, which --raw leaves out: drop one of the two")
    values = {"max_tokens": MAX_TOKENS, **sampling_values(args)}
    SamplingParams(**values)
    config = config_from_args(args, EngineConfig)
    prompt = read_prompt(args.prompt)

    import msgspec

    from octavo.llm import LLM

    with LLM(**vars(config)) as llm:
        params = llm.get_default_sampling_params().clone(**values)
        request = make_request(llm, prompt, args.use_chat, args.system)
        if args.json:
            print(msgspec.json.encode(llm.generate(request, params, use_tqdm=False)[0]).decode())
        elif params.n > 1:
            for choice in llm.generate(request, params, use_tqdm=False)[0].outputs:
                print(f"[{choice.index}] {choice.text}")
        else:
            stream(llm, request, params)
    return 0


def read_prompt(given: str | None) -> str:
    """The prompt of the command line or of standard input, whose last line end doesn't count.

    Raises:
        RequestError: there is none, or it isn't UTF-8.
    """
    if given is not None and given != "-":
        prompt = given
    elif given is None and sys.stdin.isatty():
        raise RequestError("there is no prompt: give one, or pipe one into standard input")
    else:
        try:
            prompt = sys.stdin.buffer.read().decode("utf-8").removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError as error:
            raise RequestError(
                f"standard input is not UTF-8 (byte {error.start}): convert it before it is piped in"
            ) from None
    if not prompt:
        piped = given is None or given == "-"
        raise RequestError(
            "the prompt is empty: "
            + ("standard input holds nothing; give a text" if piped else "give at least one character")
        )
    return prompt


def make_request(llm: LLM, prompt: str, use_chat: bool | None, system: str | None) -> Any:
    """What the engine is given: the conversation in the model's template, or the text as it stands."""
    if use_chat is None:
        use_chat = system is not None or llm.get_tokenizer().has_chat_template
    if not use_chat:
        return prompt
    messages = [{"role": "system", "content": system}] if system is not None else []
    return llm.render_chat([*messages, {"role": "user", "content": prompt}])


def stream(llm: LLM, request: Any, params: SamplingParams) -> None:
    """Write the text to standard output as it comes, with a line end behind it."""
    for output in llm.stream(request, params):
        sys.stdout.write(output.outputs[0].text)
        sys.stdout.flush()
    sys.stdout.write("\n")
