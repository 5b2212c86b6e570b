"""Options are judged in the launcher by the manifest's schema as the plugin's own model would judge them."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hardpoint.errors import ConfigError
from hardpoint.plugins.options import describe_faults, schema_faults, validate_options


class Mode(enum.StrEnum):
    FAST = "fast"
    EXACT = "exact"


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid")

    size: int = 3
    parts: list[Part] = []


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    count: int = Field(default=3, ge=1, lt=10)
    even: int = Field(default=2, multiple_of=2)
    ratio: float = Field(default=0.5, gt=0, le=1)
    word: str = Field(default="a", pattern="^a+$", max_length=4)
    either: int | list[int] | None = None
    choice: Literal["p", "q"] = "p"
    level: Literal[1, 2, 3] = 1
    fixed: Literal["only"] = "only"
    mode: Mode = Mode.FAST
    numbers: tuple[int, ...] = ()
    pair: tuple[int, str] = (1, "a")
    few: Annotated[list[str], Field(min_length=1, max_length=2)] = ["a"]
    unique: Annotated[frozenset[str], Field(max_length=1)] = frozenset()
    table: dict[str, int] = {}
    switch: bool = False
    part: Part = Part()


CASES: list[dict[str, Any]] = [
    {"count": "8"},
    {"count": 8.0},
    {"count": True},
    {"count": 8.5},
    {"count": 0},
    {"count": 10, "word": "b"},
    {"even": 3},
    {"ratio": "1"},
    {"ratio": 0},
    {"word": "aaaaa"},
    {"word": 1},
    {"either": ["1", 2]},
    {"either": "x"},
    {"either": None},
    {"choice": "z"},
    {"level": 4},
    {"level": "1"},
    {"fixed": "other"},
    {"mode": "exact"},
    {"mode": "slow"},
    {"numbers": ["1", "x"]},
    {"few": []},
    {"few": ["a", "b", "c"]},
    {"unique": ["a", "a"]},
    {"table": {"a": "q"}},
    {"switch": "yes"},
    {"switch": "perhaps"},
    {"part": {"size": "q", "more": 1, "parts": [{"size": "2", "parts": [{"sise": 1}]}]}},
]


@pytest.mark.parametrize("values", CASES, ids=repr)
def test_the_launcher_says_what_the_model_says(values: dict[str, Any]) -> None:
    """Same conversions, same faults in the same words."""
    try:
        Options.model_validate(values)
        expected = []
    except ValidationError as error:
        expected = describe_faults("hash", "mine", error)
    assert schema_faults("hash", "mine", Options.model_json_schema(), values) == expected


def test_the_words_are_those_of_the_place_where_a_plugin_loads() -> None:
    with pytest.raises(ConfigError) as raised:
        validate_options("hash", "mine", Options, {"count": 0, "choice": "z"})
    assert schema_faults("hash", "mine", Options.model_json_schema(), {"count": 0, "choice": "z"}) == str(
        raised.value
    ).split("\n")
    assert "plugins.hash.mine.count: Input should be greater than or equal to 1 (given: 0)" in str(raised.value)


def test_a_required_option_is_missed() -> None:
    class Needy(BaseModel):
        path: Path
        size: int = 1

    schema = Needy.model_json_schema()
    assert schema_faults("hooks", "mine", schema, {"size": 2}) == [
        "plugins.hooks.mine.path: Field required (given: {'size': 2})"
    ]
    assert schema_faults("hooks", "mine", schema, {"path": "/tmp"}) == []
    assert len(schema_faults("hooks", "mine", schema, {"path": 5})) == 1


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "mystery"},
        {"type": ["string", "null"]},
        {"type": "integer", "unchecked": True},
        {"type": "string", "format": "date-time"},
        {"allOf": [{"type": "integer"}]},
        {"anyOf": [{"type": "integer"}, {"type": "mystery"}]},
        {"not": {"type": "string"}},
    ],
    ids=str,
)
@pytest.mark.parametrize("value", ["x", 1, None, [1], {"a": 1}], ids=repr)
def test_what_is_not_understood_accepts_anything(schema: dict[str, Any], value: object) -> None:
    whole = {"type": "object", "properties": {"key": schema, "other": {"type": "integer"}}}
    assert schema_faults("hash", "mine", whole, {"key": value}) == []
    assert len(schema_faults("hash", "mine", whole, {"key": value, "other": "x"})) == 1, "it spoils nothing else"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "(?=lookahead)x"},
        {"type": "integer", "minimum": "many"},
        {"$ref": "#/$defs/Missing"},
        {"type": "array", "items": 3},
        {"anyOf": [{"type": "null"}]},
    ],
    ids=str,
)
def test_a_schema_that_makes_no_sense_refuses_nothing(schema: dict[str, Any]) -> None:
    """The plugin's own model still judges where the plugin loads."""
    whole = {"type": "object", "properties": {"key": schema}}
    assert schema_faults("hash", "mine", whole, {"key": "x"}) == []
