"""The schema that the author's kit writes never refuses in the launcher what the plugin's own model accepts."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import functools
import json
import re
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    PlainValidator,
    SecretStr,
    StringConstraints,
    ValidationError,
    WrapValidator,
    field_validator,
    model_validator,
)
from typing_extensions import TypedDict

from hardpoint.config.models import EngineConfig, ServerConfig
from hardpoint.config.units import Bytes, Count
from hardpoint.errors import PluginError
from hardpoint.interfaces.plugin import NoOptions
from hardpoint.plugins.options import option_names, schema_faults
from hardpoint.testing.manifest_writer import options_schema


class Word(enum.StrEnum):
    A = "a"
    B = "p"


class Plain(enum.Enum):
    A = "a"
    NUMBER = 1


class Number(enum.IntEnum):
    ONE = 1
    EIGHT = 8


class Bits(enum.IntFlag):
    ONE = 1
    TWO = 2


class Lenient(enum.Enum):
    A = "a"

    @classmethod
    def _missing_(cls, value: object) -> Lenient:
        return cls.A


class Pair(NamedTuple):
    first: int
    second: str = "b"


class Table(TypedDict, total=False):
    size: int


@dataclasses.dataclass
class Record:
    size: int = 1


class Child(BaseModel):
    model_config = ConfigDict(extra="forbid", populate_by_name=True)
    size: int = Field(default=1, alias="extent")


class Tree(BaseModel):
    size: int = 1
    children: list[Tree] = []
    by_name: dict[str, Tree] = {}


class Scalars(BaseModel):
    integer: int = 1
    bounded: int = Field(default=1, ge=1, lt=9)
    number: float = 1.0
    ratio: float = Field(default=0.5, gt=0, le=1)
    multiple: int = Field(default=8, multiple_of=8)
    text: str = "a"
    short: str = Field(default="a", min_length=1, max_length=3)
    pattern: str = Field(default="a", pattern=r"^[ap]+$")
    compiled: Annotated[str, Field(pattern=re.compile("^a$"))] = "a"
    switch: bool = False
    nothing: None = None
    anything: Any = None
    raw: bytes = b""
    decimal: Decimal = Field(default=Decimal(1), max_digits=4)
    fraction: Fraction = Fraction(1)
    imaginary: complex = 1j
    secret: SecretStr | None = None
    folder: Path | None = None
    day: datetime.date | None = None
    moment: datetime.datetime | None = None
    wait: datetime.timedelta | None = None
    size: ByteSize = ByteSize(1)
    literal: Literal["a", 1, True, None] = "a"
    numbers: Literal[1, 8] = 1
    word: Word = Word.A
    plain: Plain = Plain.A
    number_of: Number = Number.ONE
    bits: Bits = Bits.ONE
    lenient: Lenient = Lenient.A


class Containers(BaseModel):
    listed: list[int] = []
    few: list[str] = Field(default=["a"], min_length=1, max_length=2)
    tuples: tuple[int, ...] = ()
    fixed: tuple[int, str] = (1, "a")
    unique: set[int] = Field(default=set(), max_length=1)
    frozen: frozenset[str] = frozenset()
    queue: deque[int] = deque()
    sequence: Sequence[int] = ()
    iterable: Iterable[int] = ()
    table: dict[str, int] = {}
    by_number: dict[int, float] = Field(default={}, max_length=1)
    by_choice: dict[Literal["a"], int] = {}
    mapping: Mapping[str, list[int]] = {}
    ordered: OrderedDict[str, int] = OrderedDict()
    counter: Counter[str] = Counter()
    either: int | list[str] | None = None
    typed: Table = {}
    named: Pair = Pair(1)
    record: Record = Record()
    child: Child = Child()
    tree: Tree = Tree()


class Validated(BaseModel):
    size: Bytes = 1
    count: Count = Field(default=1, ge=1)
    commas: Annotated[list[str], BeforeValidator(lambda v: v.split(",") if isinstance(v, str) else v)] = []
    bent: Annotated[int, WrapValidator(lambda value, handler: 1)] = 1
    free: Annotated[int, PlainValidator(lambda value: 1)] = 1
    stripped: Annotated[str, StringConstraints(strip_whitespace=True, max_length=3)] = "a"
    after: Annotated[str, AfterValidator(str.strip), Field(max_length=3)] = "a"
    checked: int = Field(default=8, ge=1)
    prepared: int = Field(default=1, ge=1)
    renamed: int = Field(default=1, alias="new-name")

    @field_validator("checked")
    @classmethod
    def _is_power(cls, value: int) -> int:
        if value & (value - 1):
            raise ValueError("no power of two")
        return value

    @field_validator("prepared", mode="before")
    @classmethod
    def _prepare(cls, value: object) -> int:
        return 1


class Configured(BaseModel):
    model_config = ConfigDict(str_strip_whitespace=True, coerce_numbers_to_str=True, str_to_lower=True)
    short: str = Field(default="a", max_length=3, pattern="^[a-z0-9]*$")


class OtherEngine(BaseModel):
    model_config = ConfigDict(regex_engine="python-re")
    text: str = Field(default="a", pattern="^a$")


class Prepared(BaseModel):
    model_config = ConfigDict(extra="forbid")
    size: int = 1

    @model_validator(mode="before")
    @classmethod
    def _anything(cls, value: object) -> object:
        return {"size": 1}


class Several(BaseModel):
    several: int = Field(default=1, validation_alias=AliasChoices("one", "other"))


class ByBothNames(BaseModel):
    model_config = ConfigDict(populate_by_name=True, extra="forbid")
    size: int = Field(default=1, alias="extent")


class Checked(BaseModel):
    model_config = ConfigDict(extra="forbid")
    size: int = Field(default=1, ge=1)

    @model_validator(mode="after")
    def _check(self) -> Checked:
        return self


MODELS = (
    *(Scalars, Containers, Validated, Configured, OtherEngine, Prepared, Several, ByBothNames, Checked, Tree),
    *(NoOptions, ServerConfig, *(info.annotation for info in EngineConfig.model_fields.values())),
)
FIELDS = [
    pytest.param(model, key, id=f"{model.__name__}.{key}")
    for model in MODELS
    if isinstance(model, type) and issubclass(model, BaseModel)
    for key in option_names(model)
]
TEXTS = st.sampled_from(
    [
        *("", "a", "p", "pa", "aaaa", " abc ", " a\n", "a\n", "8", " 8 ", "8.0", "1e2", "0.5", "1_0", "-1", "nan"),
        *("inf", "yes", "off", "true", "2026-01-02", "2026-01-02T03:04:05Z", "P1D", "12:00", "512MiB", "4 GB", "8k"),
        *("a,b", "1+2j", "1/3", "NaN", "0x10", "/tmp", "B", "ab1", "only", "float32", "auto", "INFO"),
    ]
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 20),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.sampled_from([0.5, 1.0, 8.0, 1e308]),
    TEXTS,
    st.text(max_size=5),
    st.binary(max_size=3),
)
KEYS = st.one_of(st.sampled_from(["size", "extent", "children", "by_name", "first", "a", "1", 1]), st.text(max_size=2))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=3)),
    max_leaves=6,
)


@functools.cache
def schema_in_file(model: type[BaseModel]) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(json.dumps(options_schema(model)))
    return read


def launcher_faults(model: type[BaseModel], values: dict[str, Any]) -> list[str]:
    """As ``resolve_plan`` judges, with the schema as it comes out of the file."""
    return schema_faults("hash", "mine", schema_in_file(model), values)


@pytest.mark.parametrize(("model", "key"), FIELDS)
@settings(max_examples=40, deadline=None)
@given(value=VALUES)
@example(value="512MiB")
@example(value=" abc ")
@example(value=[1, 1])
@example(value={"extent": "3"})
@example(value={"size": "3"})
@example(value={"1": 1, "01": 2})
def test_what_the_model_accepts_the_launcher_accepts(model: type[BaseModel], key: str, value: Any) -> None:
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode({key: value}), strict=False)
    try:
        model.model_validate(plain)
    except ValidationError:
        return
    assert launcher_faults(model, plain) == []


@pytest.mark.parametrize(
    ("model", "values"),
    [
        (Scalars, {"integer": "x"}),
        (Scalars, {"bounded": 9}),
        (Scalars, {"short": "aaaa"}),
        (Scalars, {"pattern": "b"}),
        (Scalars, {"numbers": 2}),
        (Scalars, {"word": "b"}),
        (Scalars, {"folder": 5}),
        (Containers, {"listed": ["x"]}),
        (Containers, {"few": []}),
        (Containers, {"table": {"a": "b"}}),
        (Containers, {"record": {"size": "x"}}),
        (Containers, {"tree": {"children": [{"children": [{"size": "x"}]}]}}),
        (Validated, {"checked": 0}),
        (Checked, {"size": 0}),
        (Tree, {"children": 1}),
    ],
    ids=repr,
)
def test_what_the_schema_tells_is_enforced(model: type[BaseModel], values: dict[str, Any]) -> None:
    """Being careful must not end in checking nothing."""
    assert len(launcher_faults(model, values)) == 1
    with pytest.raises(ValidationError):
        model.model_validate(values)


def test_only_what_needs_it_is_unchecked() -> None:
    def unchecked(model: type[BaseModel]) -> set[str]:
        return {key for key, part in options_schema(model)["properties"].items() if "unchecked" in json.dumps(part)}

    assert unchecked(Validated) == {"size", "count", "commas", "bent", "free", "stripped", "after", "prepared"}
    assert not unchecked(Checked)
    assert "unchecked" not in options_schema(Checked)
    assert options_schema(Prepared)["unchecked"] is True
    assert options_schema(ByBothNames)["unchecked"] is True


@pytest.mark.parametrize("flag", ["audit", "-a", "--Audit", "--a=b", "--", 3, "--a--b", "--a b"])
def test_a_flag_that_is_none_is_refused(flag: Any) -> None:
    class Flagged(BaseModel):
        file: str = Field(default="", json_schema_extra={"flag": flag})

    with pytest.raises(PluginError, match="option 'file' of Flagged has the flag"):
        options_schema(Flagged)
