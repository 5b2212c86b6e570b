"""The wire format: every record survives it, and nothing but ``CodecError`` comes of garbage."""

from __future__ import annotations

import datetime
import enum
import struct
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hardpoint.interfaces as interfaces
from hardpoint.interfaces import BoolArray, Float32Array, Int32Array, SchedulerOutput
from hardpoint.ipc import CodecError, Decoder, encode
from hardpoint.testing.record_values import same, values

PUBLIC = [getattr(interfaces, name) for name in sorted(interfaces.__all__)]
"""All public names, which are imported only when asked for."""
RECORDS = [
    value
    for value in PUBLIC
    # A spec travels as a WireSpec, which its own tests hold to the same rule.
    if isinstance(value, type) and issubclass(value, msgspec.Struct) and not issubclass(value, interfaces.KVCacheSpec)
]


class Arrays(msgspec.Struct, frozen=True):
    ints: Int32Array
    floats: Float32Array | None = None
    flags: tuple[BoolArray, ...] = ()
    named: dict[str, np.ndarray] = {}
    anything: Any = None


def array_message(payload: bytes, code: int = 1) -> bytes:
    return msgspec.msgpack.encode(msgspec.msgpack.Ext(code, payload))


def array_payload(code: int, shape: tuple[int, ...], data: bytes) -> bytes:
    return struct.pack(f"<BB{len(shape)}Q", code, len(shape), *shape) + data


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_every_record_survives_the_wire(record: type[msgspec.Struct]) -> None:
    decoder = Decoder[Any](record)

    @settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
    @given(values(record))
    def check(value: msgspec.Struct) -> None:
        assert same(value, decoder.decode(encode(value)))

    check()


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_garbage_is_one_named_error(data: bytes) -> None:
    for expected in (SchedulerOutput, Arrays, Any):
        try:
            Decoder[Any](expected).decode(data)
        except CodecError:
            continue


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_damaged_message_is_one_named_error_or_a_valid_record(data: st.DataObject) -> None:
    """Class 2: every byte of a real message may be changed, dropped or doubled."""
    ints = np.arange(4, dtype=np.int32)
    message = bytearray(encode(Arrays(ints, ints.astype(np.float32), (ints > 1,), {"a": ints}, ints)))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(message) - 1))
        kind = data.draw(st.sampled_from(("change", "drop", "double")))
        if kind == "change":
            message[at] = data.draw(st.integers(0, 255))
        elif kind == "drop":
            del message[at]
        else:
            message.insert(at, message[at])
    try:
        record = Decoder[Arrays](Arrays).decode(bytes(message))
    except CodecError:
        return
    assert record.ints.dtype == np.int32


@pytest.mark.parametrize(
    "pickled",
    [b"cos\nsystem\n(S'touch CANARY'\ntR.", b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x0ctouch CANARY\x85R."],
)
@pytest.mark.parametrize("code", [-128, -2, 0, 1, 2, 3, 42, 127])
def test_a_pickle_is_never_loaded(pickled: bytes, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Classes 1 and 2: neither as a message nor inside an extension value of any type."""
    monkeypatch.chdir(tmp_path)
    for data in (pickled, array_message(pickled, code), encode({"x": [pickled]})):
        for expected in (Any, SchedulerOutput, Arrays):
            try:
                Decoder[Any](expected).decode(data)
            except CodecError:
                continue
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("code", [-128, -2, 0, 2, 3, 127])
def test_unknown_extension_types_are_an_error_even_where_anything_is_allowed(code: int) -> None:
    with pytest.raises(CodecError, match=f"extension type {code} is unknown"):
        Decoder[Any](Any).decode(array_message(b"\0\0", code))


@pytest.mark.parametrize(
    ("payload", "fault"),
    [
        (b"", "no valid header"),
        (b"\x03", "no valid header"),
        (array_payload(12, (), b"12345678"), "no valid header"),
        (array_payload(255, (), b""), "no valid header"),
        (struct.pack("<BB9Q", 3, 9, *([1] * 9)) + b"1234", "no valid header"),
        (struct.pack("<BBI", 3, 1, 1), "cut short"),
        (array_payload(3, (2,), b"1234"), "4 bytes of elements"),
        (array_payload(3, (), b"12345"), "5 bytes of elements"),
        (array_payload(3, (2**62, 2**62), b"1234"), "bytes of elements"),
        (array_payload(3, (2**64 - 1, 0), b""), "bytes of elements"),
        (array_payload(0, (2,), b"\x01\x02"), "bool array"),
    ],
)
def test_array_sizes_are_checked_before_anything_is_allocated(payload: bytes, fault: str) -> None:
    """Classes 2 and 5: a claimed size never decides how much memory is taken."""
    with pytest.raises(CodecError, match=fault):
        Decoder[Any](Any).decode(array_message(payload))


def test_a_field_takes_its_own_dtype_only() -> None:
    wrong = encode({"ints": np.zeros(2, np.int64)})
    with pytest.raises(CodecError, match="array of int32, got int64"):
        Decoder[Arrays](Arrays).decode(wrong)
    with pytest.raises(CodecError, match="expected an array, got list"):
        Decoder[Arrays](Arrays).decode(encode({"ints": [1, 2]}))


def test_arrays_arrive_as_they_left_but_owned_writable_and_aligned() -> None:
    for dtype in ("bool", "int8", "int32", "uint16", "int64", "float16", "float32", "float64"):
        for source in (
            np.ones((2, 3), dtype),
            np.ones((4, 6), dtype)[::2, ::3].T,
            np.ones((), dtype),
            np.ones(0, dtype),
        ):
            array = Decoder[np.ndarray](np.ndarray).decode(encode(source))
            assert (array.dtype, array.shape, array.tolist()) == (source.dtype, source.shape, source.tolist())
            assert array.flags.writeable
            assert array.flags.aligned
            assert array.dtype.isnative


@pytest.mark.parametrize(
    "value",
    [
        object(),
        lambda: None,
        {"x": object()},
        np.zeros(2, dtype=object),
        np.zeros(2, dtype=">i4"),
        np.zeros(2, dtype="datetime64[s]"),
        np.array(["text"]),
        np.zeros(2, dtype=[("a", "i4")]),
        np.zeros((1,) * 9, dtype=np.int32),
        np.float32(1.0),
        2**65,
        enum.Enum("Odd", {"A": object()}).A,  # type: ignore[attr-defined]
        complex(1, 2),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_without_a_wire_form_are_refused_at_the_sender(value: Any) -> None:
    with pytest.raises(CodecError, match="cannot be sent"):
        encode(value)


def test_endless_nesting_is_refused_on_both_sides() -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(CodecError):
        encode(nested)
    with pytest.raises(CodecError):
        Decoder[Any](Any).decode(b"\x91" * 100_000)
    while nested:
        nested = nested[0]


@pytest.mark.parametrize("data", [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"])
def test_a_claimed_length_allocates_nothing(data: bytes) -> None:
    """Class 5: four billion elements in five bytes."""
    for expected in (Any, list[int], dict[str, int], tuple[int, ...], bytes):
        with pytest.raises(CodecError):
            Decoder[Any](expected).decode(data)


def test_a_time_is_plain_data() -> None:
    """The one extension type MessagePack itself defines yields a date, nothing more."""
    moment = datetime.datetime(2030, 1, 1, tzinfo=datetime.UTC)
    assert Decoder[Any](Any).decode(encode(moment)) == moment
