"""``hardpoint chat``: a conversation in the terminal, streamed as it comes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from typing import Any

from hardpoint import LLM
from hardpoint.config import add_arguments, load_config
from hardpoint.errors import ConfigError, InvalidRequestError
from hardpoint.interfaces import CliCommand, NoOptions, OutputKind, PluginContext, SamplingParams, plugin
from hardpoint_terminal.options import add_sampling_arguments, sampling_params
from hardpoint_terminal.output import StandardOutput

__all__ = ["ChatCommand", "create"]

_Messages = list[dict[str, Any]]
_HELP = "Type a message. /reset starts over, /quit (or the end of input) leaves."


class ChatCommand(CliCommand):
    help = "Talk to a model in the terminal."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_arguments(parser, with_server=False)
        add_sampling_arguments(parser, max_tokens=512)
        parser.add_argument("--system", metavar="TEXT", help="system message of the conversation")

    def run(self, arguments: argparse.Namespace) -> int:
        out = StandardOutput()
        if sys.stdin is None:
            raise ConfigError("standard input is closed; give it messages, one a line")
        params = sampling_params(arguments, OutputKind.DELTA)
        start = [{"role": "system", "content": arguments.system}] if arguments.system else []
        with LLM.from_config(load_config(arguments, os.environ)) as llm:
            print(_HELP, file=sys.stderr)
            messages: _Messages = list(start)
            for line in _lines():
                if line == "/quit":
                    break
                if line == "/reset":
                    messages = list(start)
                    print("(new conversation)", file=sys.stderr)
                elif line.startswith("/"):
                    print(f"unknown command {line.split()[0]}. {_HELP}", file=sys.stderr)
                elif line:
                    messages = self._turn(llm, out, messages, line, params)
        return 0

    def _turn(
        self, llm: LLM, out: StandardOutput, messages: list[dict[str, Any]], line: str, params: SamplingParams
    ) -> list[dict[str, Any]]:
        """Answer one line; returns the longer conversation, or the old one when the line could not be taken."""
        asked = [*messages, {"role": "user", "content": line}]
        parts: list[str] = []
        try:
            for _, output in llm.stream([llm.render_chat(asked)], params):
                parts.append(output.outputs[0].text)
                out.write(parts[-1])
                if output.error:
                    print(f"hardpoint: {output.error}", file=sys.stderr)
        except InvalidRequestError as error:
            print(f"hardpoint: {error}; /reset starts over", file=sys.stderr)
            return messages
        out.line()
        return [*asked, {"role": "assistant", "content": "".join(parts)}]


def _lines() -> Iterator[str]:
    interactive = sys.stdin.isatty()
    while True:
        try:
            line = input("> ") if interactive else sys.stdin.readline()
        except EOFError:
            return
        if not interactive and not line:
            return
        line = line.strip()
        yield line.split()[0] if line.startswith("/") else line


@plugin("cli_command")
def create(ctx: PluginContext, options: NoOptions) -> ChatCommand:
    del ctx, options
    return ChatCommand()
