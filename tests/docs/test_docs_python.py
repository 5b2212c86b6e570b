"""The page on the Python interface names everything there is, with the defaults and bounds that hold."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
from typing import Any

import msgspec
import pytest

import hardpoint
from hardpoint import LLM, AsyncLLM, Prompt, RequestOptions, RequestOutput, SamplingParams, errors
from hardpoint.engine.llm import DEFAULT_MAX_TOKENS
from hardpoint.engine.validation import validate_sampling
from hardpoint.errors import HardpointError, InvalidRequestError
from hardpoint.interfaces import (
    CliCommand,
    CompletionOutput,
    EmbeddingOutput,
    Logprob,
    ModelLimits,
    OutputKind,
    PositionLogprobs,
    RequestMetrics,
)
from hardpoint_serving.openai.protocol import ChatRequest, CompletionRequest
from hardpoint_serving.openai.translate import chat_sampling, completion_sampling
from hardpoint_terminal.chat import ChatCommand
from hardpoint_terminal.generate import GenerateCommand
from workspace import ROOT

PAGE = (ROOT / "docs/reference/python.md").read_text(encoding="utf-8")
LIMITS = ModelLimits(vocab_size=100, max_model_len=1000)
_BETWEEN = re.compile(r"(above )?(-?[\d.]+),? to (-?[\d.]+)")


def section(title: str) -> str:
    found = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    assert found, title
    return found


def rows(title: str) -> dict[str, list[str]]:
    """First cell to the other cells of each row of the section's first table."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")][2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {first: rest for first, *rest in cells}


def sampling_rows() -> dict[str, list[str]]:
    return {name.strip("`"): cells for name, cells in rows("`SamplingParams`").items()}


def written(default: Any) -> str:
    return f"`OutputKind.{default.name}`" if isinstance(default, OutputKind) else f"`{default!r}`"


def names(text: str) -> set[str]:
    """Words of the code spans; blocks, whose fences are made of the same sign, are left out."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", prose))))


def test_every_sampling_field_is_there_with_its_default() -> None:
    expected = {
        field.name: written(getattr(SamplingParams(), field.name)) for field in msgspec.structs.fields(SamplingParams)
    }
    assert {name: cells[0] for name, cells in sampling_rows().items()} == expected


def bounded() -> list[str]:
    return [name for name, cells in sampling_rows().items() if _BETWEEN.fullmatch(cells[1])]


def accepts(name: str, value: float) -> bool:
    given = type(getattr(SamplingParams(), name))(value)
    try:
        validate_sampling(msgspec.structs.replace(SamplingParams(), **{name: given}), 4, LIMITS)
    except InvalidRequestError as error:
        if error.param != name:
            raise
        return False
    return True


@pytest.mark.parametrize("name", [name for name in bounded() if "logprobs" not in name])
def test_bounds_are_the_validator_s(name: str) -> None:
    found = _BETWEEN.fullmatch(sampling_rows()[name][1])
    assert found is not None
    low, high = float(found[2]), float(found[3])
    step = 1 if isinstance(getattr(SamplingParams(), name), int) else 0.01
    assert accepts(name, low) is (found[1] is None)
    assert accepts(name, high)
    assert not accepts(name, low - step)
    assert not accepts(name, high + step)


@pytest.mark.parametrize("name", [name for name in bounded() if "logprobs" in name])
def test_bounds_of_logprobs(name: str) -> None:
    assert sampling_rows()[name][1] == f"0 to {LIMITS.max_logprobs}"
    for count, is_allowed in ((0, True), (LIMITS.max_logprobs, True), (LIMITS.max_logprobs + 1, False), (-2, False)):
        params = msgspec.structs.replace(SamplingParams(), **{name: count})
        if is_allowed:
            validate_sampling(params, 4, LIMITS)
        else:
            with pytest.raises(InvalidRequestError, match=name):
                validate_sampling(params, 4, LIMITS)


@pytest.mark.parametrize(
    ("record", "title"),
    [
        (Prompt, "`Prompt`"),
        (RequestOptions, "`RequestOptions`"),
        (RequestOutput, "What comes back"),
        (CompletionOutput, "What comes back"),
        (RequestMetrics, "What comes back"),
        (PositionLogprobs, "What comes back"),
        (Logprob, "What comes back"),
        (EmbeddingOutput, "What comes back"),
    ],
)
def test_every_field_of_a_record_is_named(record: type[Any], title: str) -> None:
    is_struct = issubclass(record, msgspec.Struct)
    fields = record.__struct_fields__ if is_struct else [field.name for field in dataclasses.fields(record)]
    assert {*fields} <= names(section(title))


@pytest.mark.parametrize("front", [LLM, AsyncLLM])
def test_every_call_is_there_with_its_parameters(front: type[Any]) -> None:
    text = section(f"`{front.__name__}`")
    for name, member in inspect.getmembers(front):
        if not name.startswith("_"):
            assert name in names(text), name
            if inspect.isfunction(member) and (row := re.search(rf"^\| `(?:await )?{name}\((.*?)\)` \|", text, re.M)):
                shown = set(re.findall(r"(\w+)(?:=[\w.]+)?(?:, |$)", row[1]))
                assert shown == set(inspect.signature(member).parameters) - {"self"}, name


def test_every_export_and_every_exception_is_named() -> None:
    assert set(hardpoint.__all__) - {"__version__"} <= names(PAGE)
    raised = {
        name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, HardpointError)
    }
    assert raised <= names(section("Exceptions"))


def default_of(command: CliCommand) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    length: int = parser.parse_args([]).max_tokens
    return length


def test_default_lengths() -> None:
    lengths = {entry: cells[0] for entry, cells in rows("Default lengths").items()}
    all_of_it = "up to the context length"
    completion = completion_sampling(CompletionRequest(prompt="x"))
    chat = chat_sampling(ChatRequest(messages=[]))
    assert lengths == {
        "`hardpoint generate`": str(default_of(GenerateCommand())),
        "`hardpoint chat`": str(default_of(ChatCommand())),
        "`POST /v1/completions`": str(completion.max_tokens),
        "`POST /v1/chat/completions`": all_of_it if chat.max_tokens is None else str(chat.max_tokens),
        "`LLM.generate` and `LLM.chat` without `params`": f"{DEFAULT_MAX_TOKENS}, or what the context leaves",
        "`SamplingParams()` without `max_tokens`": all_of_it,
    }
    assert validate_sampling(SamplingParams(), 4, LIMITS).max_tokens == LIMITS.max_model_len - 4
