"""``hardpoint generate``: complete prompts, all in one continuous batch, and print text or JSON."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from hardpoint import LLM
from hardpoint.config import add_arguments, load_config
from hardpoint.errors import ConfigError
from hardpoint.interfaces import (
    CliCommand,
    FinishReason,
    NoOptions,
    OutputKind,
    PluginContext,
    Prompt,
    RequestOutput,
    plugin,
)
from hardpoint_terminal.options import add_sampling_arguments, sampling_params
from hardpoint_terminal.output import StandardOutput

__all__ = ["GenerateCommand", "as_json", "create", "read_prompts"]


@dataclass(slots=True)
class _Printer:
    """Prints streams one after the other: the first unfinished prompt live, later ones once it is their turn."""

    prompts: Sequence[str]
    out: StandardOutput
    turn: int = 0
    pending: dict[int, list[str]] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    announced: bool = False

    def add(self, index: int, text: str, finished: bool) -> None:
        self.pending.setdefault(index, []).append(text)
        if finished:
            self.done.add(index)
        while self.turn < len(self.prompts):
            if not self.announced:
                self.out.write(f">>> {self.prompts[self.turn]}\n")
                self.announced = True
            self.out.write("".join(self.pending.pop(self.turn, [])))
            if self.turn not in self.done:
                return
            self.out.write("\n\n")
            self.turn += 1
            self.announced = False


class GenerateCommand(CliCommand):
    help = "Complete prompts with a model and print the result."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_arguments(parser, with_server=False)
        add_sampling_arguments(parser, max_tokens=128)
        group = parser.add_argument_group("prompts")
        add = group.add_argument
        add("--prompt", action="append", default=[], metavar="TEXT", help="prompt; repeatable")
        add("--prompts-file", metavar="FILE", help="JSON lines, each an object with a 'prompt' key; - reads stdin")
        text = "wrap each prompt as a user message (default: raw completion)"
        add("--chat-template", action=argparse.BooleanOptionalAction, default=False, help=text)
        form = group.add_mutually_exclusive_group()
        form.add_argument("--json", action="store_true", help="print one JSON object per prompt")
        form.add_argument("--stream", action="store_true", help="print text as it comes, and a summary")

    def run(self, arguments: argparse.Namespace) -> int:
        out = StandardOutput()
        prompts = read_prompts(arguments.prompt, arguments.prompts_file)
        config = load_config(arguments, os.environ)
        kind = OutputKind.DELTA if arguments.stream else OutputKind.FINAL_ONLY
        params = sampling_params(arguments, kind)
        with LLM.from_config(config) as llm:
            inputs = [self._input(llm, text, arguments.chat_template) for text in prompts]
            started = time.perf_counter()
            if arguments.stream:
                printer = _Printer(prompts, out)
                results: list[RequestOutput] = []
                for index, output in llm.stream(inputs, params):
                    printer.add(index, output.outputs[0].text, output.finished)
                    if output.finished:
                        results.append(output)
                        _complain(prompts[index], output)
                out.line(summary(results, time.perf_counter() - started))
            else:
                results = llm.generate(inputs, params)
                self._print(out, prompts, results, arguments.json)
        return 1 if any(_failed(result) for result in results) else 0

    def _input(self, llm: LLM, text: str, wrap: bool) -> Prompt:
        return llm.render_chat([{"role": "user", "content": text}]) if wrap else Prompt(text=text)

    def _print(
        self, out: StandardOutput, prompts: Iterable[str], results: Iterable[RequestOutput], as_lines: bool
    ) -> None:
        for text, result in zip(prompts, results, strict=True):
            if as_lines:
                out.line(json.dumps(as_json(text, result), ensure_ascii=False))
            else:
                out.line(f">>> {text}\n{result.outputs[0].text}\n")
            _complain(text, result)


def _failed(result: RequestOutput) -> bool:
    return any(output.finish_reason is FinishReason.ERROR for output in result.outputs)


def _complain(prompt: str, result: RequestOutput) -> None:
    if _failed(result):
        print(f"hardpoint: prompt {prompt[:60]!r} failed: {result.error}", file=sys.stderr)


def as_json(prompt: str, result: RequestOutput) -> dict[str, object]:
    """The stable form of ``--json``; times in seconds."""
    output = result.outputs[0]
    metrics = result.metrics
    return {
        "prompt": prompt,
        "text": output.text,
        "token_ids": list(output.token_ids),
        "prompt_token_ids": list(result.prompt_token_ids),
        "finish_reason": output.finish_reason,
        "metrics": {
            "ttft_s": metrics.ttft_s if metrics else None,
            "decode_tokens_per_s": metrics.decode_tokens_per_s if metrics else None,
        },
    }


def summary(results: Sequence[RequestOutput], seconds: float) -> str:
    """One line: how many tokens, how fast, and the median time to the first token."""
    tokens = sum(output.num_generated_tokens for result in results for output in result.outputs)
    firsts = [result.metrics.ttft_s for result in results if result.metrics and result.metrics.ttft_s is not None]
    first = f", first token after {median(firsts):.2f} s" if firsts else ""
    rate = tokens / seconds if seconds > 0 else 0.0
    return f"{len(results)} prompts, {tokens} tokens in {seconds:.2f} s: {rate:.1f} tokens/s{first}"


def read_prompts(given: Sequence[str], path: str | None) -> list[str]:
    """Prompts from flags, then from the file. Raises ``ConfigError`` naming the line that cannot be used."""
    prompts = list(given)
    if path == "-" and sys.stdin is None:
        raise ConfigError("--prompts-file '-' cannot be read: standard input is closed")
    if path is not None:
        try:
            text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--prompts-file {path!r} cannot be read: {error}") from None
        for number, line in enumerate(text.splitlines(), start=1):
            if line.strip():
                prompts.append(_prompt_of(line, f"{path}:{number}"))
    if not prompts:
        raise ConfigError("no prompt given; use --prompt TEXT or --prompts-file FILE")
    return prompts


def _prompt_of(line: str, where: str) -> str:
    try:
        value = json.loads(line)
    except (json.JSONDecodeError, RecursionError):
        raise ConfigError(f"{where} is not JSON; each line must be an object with a 'prompt' key") from None
    prompt = value.get("prompt") if isinstance(value, dict) else None
    if not isinstance(prompt, str):
        raise ConfigError(f"{where} has no text under the key 'prompt'")
    return prompt


@plugin("cli_command")
def create(ctx: PluginContext, options: NoOptions) -> GenerateCommand:
    del ctx, options
    return GenerateCommand()
