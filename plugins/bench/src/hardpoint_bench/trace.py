"""Traces of requests: JSON lines, read one at a time, so that a file of any length can be replayed.

A line is an object with

``arrival_s``              seconds, or ``timestamp`` in milliseconds as public traces have it; lines are in this order
``prompt_token_ids``       the prompt, or instead of it
``hash_ids``               one id per block of ``hash_block`` tokens; equal ids at equal places are a shared prefix
``prefix_id``,             a prefix shared by all lines with this id, and its length; what follows is this line's own
``prefix_length``
``input_length``           tokens of the prompt; needed unless ``prompt_token_ids`` are there
``output_length``          tokens to generate
``priority``, ``tenant``   as in a request; optional
"""

from __future__ import annotations

import codecs
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from hardpoint.errors import ConfigError
from hardpoint.interfaces import Int32Array
from hardpoint_bench.bounds import MAX_ARRIVAL_S, MAX_LENGTH
from hardpoint_bench.requests import HASH_IDS, PREFIX_IDS, hash_tokens, own_tokens, prefix_tokens

__all__ = ["Trace", "TraceFile", "TraceLine", "TraceRequest", "line_of"]

_STANDARD_INPUT = "standard input"
_Length = Annotated[int, msgspec.Meta(ge=1, le=MAX_LENGTH)]
_Token = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
_HashId = Annotated[int, msgspec.Meta(ge=0, lt=HASH_IDS)]
_Seconds = Annotated[float, msgspec.Meta(ge=0)]


class TraceLine(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One line, as written."""

    arrival_s: _Seconds | None = None
    timestamp: _Seconds | None = None
    prompt_token_ids: Annotated[list[_Token], msgspec.Meta(min_length=1, max_length=MAX_LENGTH)] | None = None
    hash_ids: list[_HashId] | None = None
    prefix_id: Annotated[int, msgspec.Meta(ge=0, lt=PREFIX_IDS)] | None = None
    prefix_length: Annotated[int, msgspec.Meta(ge=0, le=MAX_LENGTH)] | None = None
    input_length: _Length | None = None
    output_length: _Length
    priority: Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)] = 0
    tenant: Annotated[str, msgspec.Meta(max_length=256)] = ""


_FIELDS = frozenset(TraceLine.__struct_fields__)


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """``arrival`` in seconds from the first request on; ``prompt`` int32; ``number`` counts from 0."""

    number: int
    arrival: float
    prompt: Int32Array
    output_length: int
    priority: int = 0
    tenant: str = ""


Trace = Callable[[], Iterable[TraceRequest]]
"""Begins a replay: each call yields all requests anew, in the order of their arrival."""


@dataclass(slots=True)
class TraceFile:
    """The trace in file ``path``, ``-`` for standard input.

    ``hash_block``: tokens per hash id. ``unit_s``: seconds per unit of ``timestamp``. ``speed`` divides all times.
    :attr:`ignored` holds keys that lines had and nobody reads. Iterating raises ``ConfigError`` with the line's number.
    """

    path: str
    hash_block: int = 512
    unit_s: float = 1e-3
    speed: float = 1.0
    ignored: set[str] = field(default_factory=set)

    def __call__(self) -> Iterator[TraceRequest]:
        first: float | None = None
        last, number = 0.0, 0
        name = _STANDARD_INPUT if self.path == "-" else self.path
        with ExitStack() as stack:
            for at, raw in enumerate(self._lines(stack), start=1):
                if at == 1:
                    raw = raw.removeprefix(codecs.BOM_UTF8)
                if not raw.strip():
                    continue
                where = f"{name}:{at}"
                line = self._parse(raw, where)
                arrival = self._arrival(line, where)
                first = arrival if first is None else first
                if arrival - first < last:
                    raise ConfigError(f"{where}: it arrives before the line above; sort the trace by its arrival times")
                last = arrival - first
                after = last / self.speed
                if after > MAX_ARRIVAL_S:
                    raise ConfigError(
                        f"{where}: it arrives {after:g} s after the first line, of at most {MAX_ARRIVAL_S:g} s; "
                        "mend its time, or set --speed or --timestamp-unit"
                    )
                prompt = self._prompt(line, number, where)
                yield TraceRequest(number, after, prompt, line.output_length, line.priority, line.tenant)
                number += 1
        if not number:
            raise ConfigError(f"trace {name!r} holds no request")

    def _lines(self, stack: ExitStack) -> Iterable[bytes]:
        if self.path == "-":
            return sys.stdin.buffer
        try:
            return stack.enter_context(Path(self.path).open("rb"))
        except OSError as error:
            raise ConfigError(f"--trace {self.path!r} cannot be read: {error.strerror}") from None

    def _parse(self, raw: bytes, where: str) -> TraceLine:
        try:
            document = msgspec.json.decode(raw)
            line = msgspec.convert(document, TraceLine)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"{where}: {error}") from None
        if len(document) > len(_FIELDS & document.keys()):
            self.ignored.update(list(document.keys() - _FIELDS)[: 16 - len(self.ignored)])
        return line

    def _arrival(self, line: TraceLine, where: str) -> float:
        if (line.arrival_s is None) == (line.timestamp is None):
            raise ConfigError(f"{where}: it needs either 'arrival_s' (seconds) or 'timestamp', and not both")
        seconds = line.arrival_s if line.timestamp is None else line.timestamp * self.unit_s
        if seconds is None or not math.isfinite(seconds):
            raise ConfigError(f"{where}: its arrival time is not a finite number")
        return seconds

    def _prompt(self, line: TraceLine, number: int, where: str) -> Int32Array:
        length = line.input_length
        if line.prompt_token_ids is not None:
            if line.hash_ids is not None or line.prefix_id is not None:
                raise ConfigError(f"{where}: 'prompt_token_ids' leave no room for 'hash_ids' or 'prefix_id'")
            if length is not None and length != len(line.prompt_token_ids):
                found = len(line.prompt_token_ids)
                raise ConfigError(f"{where}: 'input_length' is {length}, but there are {found} 'prompt_token_ids'")
            return np.asarray(line.prompt_token_ids, dtype=np.int32)
        if length is None:
            raise ConfigError(f"{where}: it needs 'input_length' or 'prompt_token_ids'")
        if line.hash_ids is not None:
            return self._hashed(line.hash_ids, length, line, where)
        if line.prefix_id is None:
            if line.prefix_length is not None:
                raise ConfigError(f"{where}: 'prefix_length' without 'prefix_id'")
            return own_tokens(number, length)
        shared = line.prefix_length
        if shared is None or shared > length:
            raise ConfigError(
                f"{where}: 'prefix_length' is {shared}; with 'prefix_id' it is 0 to 'input_length' {length}"
            )
        return np.concatenate([prefix_tokens(line.prefix_id, shared), own_tokens(number, length - shared)])

    def _hashed(self, hash_ids: list[int], length: int, line: TraceLine, where: str) -> Int32Array:
        if line.prefix_id is not None:
            raise ConfigError(f"{where}: 'hash_ids' leave no room for 'prefix_id'")
        due = -(-length // self.hash_block)
        if len(hash_ids) != due:
            raise ConfigError(
                f"{where}: {len(hash_ids)} 'hash_ids' for 'input_length' {length}; blocks of {self.hash_block} tokens "
                f"make {due}; set --hash-block to the trace's block size"
            )
        return hash_tokens(hash_ids, self.hash_block, length)


def line_of(**fields: Any) -> bytes:
    """A line with its end, from the fields of :class:`TraceLine`."""
    return msgspec.json.encode(TraceLine(**fields)) + b"\n"
