"""Reading traces: every form of a line, and every fault with its line number."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardpoint.errors import ConfigError
from hardpoint_bench.generator import Mix
from hardpoint_bench.trace import TraceFile, TraceRequest


def write(path: Path, *lines: dict[str, Any] | bytes) -> str:
    path.write_bytes(b"".join((x if isinstance(x, bytes) else msgspec.json.encode(x)) + b"\n" for x in lines))
    return str(path)


def read(path: Path, *lines: dict[str, Any] | bytes, **settings: Any) -> list[TraceRequest]:
    return list(TraceFile(write(path, *lines), **settings)())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


def test_prompts_as_tokens(path: Path) -> None:
    (request,) = read(
        path, {"arrival_s": 0, "prompt_token_ids": [5, 6, 7], "output_length": 4, "priority": -3, "tenant": "a"}
    )
    assert request.prompt.tolist() == [5, 6, 7]
    assert request.prompt.dtype == np.int32
    assert (request.arrival, request.output_length, request.priority, request.tenant) == (0.0, 4, -3, "a")


def test_prompts_as_hash_ids_share_exactly_what_their_ids_share(path: Path) -> None:
    first, second = read(
        path,
        {"timestamp": 0, "hash_ids": [1, 2, 3], "input_length": 10, "output_length": 1},
        {"timestamp": 1500, "hash_ids": [1, 2, 4], "input_length": 12, "output_length": 1},
        hash_block=4,
    )
    assert (len(first.prompt), len(second.prompt)) == (10, 12)
    assert first.prompt[:8].tolist() == second.prompt[:8].tolist()
    assert not set(first.prompt[8:].tolist()) & set(second.prompt[8:].tolist())
    assert second.arrival == 1.5


def test_the_largest_hash_id_has_a_token(path: Path) -> None:
    (request,) = read(path, {"timestamp": 0, "hash_ids": [2**30 - 1], "input_length": 2, "output_length": 1})
    assert request.prompt.tolist() == [2**31 - 1] * 2


def test_prompts_by_shared_prefix(path: Path) -> None:
    one, two, other = read(
        path,
        *(
            {"arrival_s": 0, "prefix_id": p, "prefix_length": 3, "input_length": 5, "output_length": 1}
            for p in (0, 0, 1)
        ),
    )
    assert one.prompt[:3].tolist() == two.prompt[:3].tolist()
    assert one.prompt[3:].tolist() != two.prompt[3:].tolist()
    assert other.prompt[:3].tolist() != one.prompt[:3].tolist()


def test_prompts_of_a_length_alone_share_nothing(path: Path) -> None:
    one, two = read(path, *({"arrival_s": 0, "input_length": 4, "output_length": 1} for _ in range(2)))
    assert not set(one.prompt.tolist()) & set(two.prompt.tolist())


def test_times_count_from_the_first_line_and_are_divided_by_the_speed(path: Path) -> None:
    lines = [{"arrival_s": at, "input_length": 1, "output_length": 1} for at in (1000.0, 1001.0, 1005.0)]
    assert [request.arrival for request in read(path, *lines, speed=2.0)] == [0.0, 0.5, 2.5]


def test_timestamps_in_seconds(path: Path) -> None:
    lines = [{"timestamp": at, "input_length": 1, "output_length": 1} for at in (0, 2)]
    assert [request.arrival for request in read(path, *lines, unit_s=1.0)] == [0.0, 2.0]


def test_blank_lines_are_passed_over_and_count(path: Path) -> None:
    good: dict[str, Any] = {"arrival_s": 0, "input_length": 1, "output_length": 1}
    assert len(read(path, good, b"  ", good)) == 2
    with pytest.raises(ConfigError, match=r"trace\.jsonl:3: "):
        read(path, good, b"", {"arrival_s": 0})


def test_a_byte_order_mark_is_passed_over_at_the_start_alone(path: Path) -> None:
    good = b'{"arrival_s": 0, "input_length": 1, "output_length": 1}'
    assert len(read(path, b"\xef\xbb\xbf" + good, good)) == 2
    with pytest.raises(ConfigError, match=r"trace\.jsonl:2: JSON is malformed"):
        read(path, good, b"\xef\xbb\xbf" + good)


@pytest.mark.parametrize(("last", "speed"), [(1e308, 1.0), (1e300, 1e-6), (2e9, 1e-6)])
def test_arrivals_beyond_all_time_are_named(path: Path, last: float, speed: float) -> None:
    lines = [{"arrival_s": at, "input_length": 1, "output_length": 1} for at in (0, last)]
    with pytest.raises(ConfigError, match=r"trace\.jsonl:2: it arrives .* s after the first line.*--speed"):
        read(path, *lines, speed=speed)


def test_keys_that_nobody_reads_are_remembered(path: Path) -> None:
    trace = TraceFile(write(path, {"arrival_s": 0, "input_length": 1, "output_length": 1, "turn": 2, "priorty": 1}))
    assert len(list(trace())) == 1
    assert trace.ignored == {"turn", "priorty"}


def test_a_trace_can_be_replayed_again(path: Path) -> None:
    trace = TraceFile(write(path, {"arrival_s": 0, "input_length": 1, "output_length": 1}))
    assert len(list(trace())) == len(list(trace())) == 1


GOOD: dict[str, Any] = {"arrival_s": 1.0, "input_length": 8, "output_length": 2}


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (b"{", "Input data was truncated"),
        (b"[1, 2]", "Expected `object`, got `array`"),
        (b'"text"', "Expected `object`, got `str`"),
        (b"\xff\xfe", "JSON is malformed"),
        ({**GOOD, "tenant": 4}, "Expected `str`"),
        (GOOD | {"arrival_s": -1}, "Expected `float` >= 0"),
        (GOOD | {"arrival_s": "soon"}, "Expected `float | null`"),
        (GOOD | {"output_length": 0}, "Expected `int` >= 1"),
        (GOOD | {"output_length": 1.5}, "Expected `int`"),
        (GOOD | {"output_length": 2**40}, "Expected `int` <="),
        (GOOD | {"input_length": 0}, "Expected `int` >= 1"),
        (GOOD | {"priority": 2**40}, "Expected `int`"),
        (GOOD | {"tenant": "x" * 300}, "Expected `str` of length <= 256"),
        (GOOD | {"hash_ids": [-1]}, "Expected `int` >= 0"),
        (GOOD | {"hash_ids": [2**30]}, "Expected `int` <"),
        (GOOD | {"prompt_token_ids": []}, "length >= 1"),
        (GOOD | {"prompt_token_ids": [2**31]}, "Expected `int` <"),
        ({"arrival_s": 1.0, "input_length": 8}, "missing required field `output_length`"),
        ({"input_length": 8, "output_length": 2}, "needs either 'arrival_s' .* or 'timestamp'"),
        (GOOD | {"timestamp": 5}, "needs either 'arrival_s' .* and not both"),
        (b'{"arrival_s": 1e999, "input_length": 1, "output_length": 1}', "finite|out of range"),
        ({"arrival_s": 1.0, "output_length": 2}, "needs 'input_length' or 'prompt_token_ids'"),
        (GOOD | {"prompt_token_ids": [1, 2]}, "'input_length' is 8, but there are 2 'prompt_token_ids'"),
        ({"arrival_s": 1, "output_length": 1, "prompt_token_ids": [1], "hash_ids": [1]}, "no room for 'hash_ids'"),
        (GOOD | {"hash_ids": [1], "prefix_id": 1}, "no room for 'prefix_id'"),
        (
            GOOD | {"hash_ids": [1, 2]},
            "2 'hash_ids' for 'input_length' 8; blocks of 512 tokens make 1; set --hash-block",
        ),
        (GOOD | {"prefix_length": 3}, "'prefix_length' without 'prefix_id'"),
        (GOOD | {"prefix_id": 3}, "'prefix_length' is None"),
        (GOOD | {"prefix_id": 3, "prefix_length": 9}, "'prefix_length' is 9; with 'prefix_id' it is 0 to .* 8"),
        (GOOD | {"arrival_s": 0.5}, "arrives before the line above"),
    ],
)
def test_faulty_lines_are_named(path: Path, line: dict[str, Any] | bytes, fault: str) -> None:
    with pytest.raises(ConfigError, match=rf"trace\.jsonl:2: .*({fault})"):
        read(path, GOOD, line)


def test_faulty_lines_of_standard_input_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def reading(*lines: bytes) -> None:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"".join(lines))))

    reading(b'{"arrival_s": 0, "input_length": 4, "output_length": 1}\n', b"{}\n")
    with pytest.raises(ConfigError, match="^standard input:2: Object missing required field `output_length`"):
        list(TraceFile("-")())
    reading()
    with pytest.raises(ConfigError, match="'standard input' holds no request"):
        list(TraceFile("-")())


def test_deep_nesting_is_no_way_out(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trace\.jsonl:1: "):
        read(path, b"[" * 100_000)


def test_an_empty_trace_is_refused(path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no request"):
        read(path)


@pytest.mark.parametrize("name", ["nowhere.jsonl", "."])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="--trace .* cannot be read: (No such file|Is a directory)"):
        list(TraceFile(str(tmp_path / name))())


@settings(max_examples=40, deadline=None)
@given(
    st.builds(
        Mix,
        requests=st.integers(1, 20),
        rate=st.floats(0.5, 1e4),
        prompt_len=st.integers(6, 40),
        output_len=st.integers(1, 20),
        length_spread=st.sampled_from([0.0, 0.7, 2.0]),
        shared_prefix=st.integers(0, 5),
        prefixes=st.integers(1, 4),
        tenants=st.integers(1, 3),
        priorities=st.integers(1, 3),
        seed=st.integers(0, 2**32),
    )
)
def test_made_up_requests_survive_the_file(tmp_path_factory: pytest.TempPathFactory, mix: Mix) -> None:
    """What is replayed at once and what is written and read are the same requests."""
    mix.check()
    path = tmp_path_factory.getbasetemp() / "made-up.jsonl"
    path.write_bytes(b"".join(mix.lines()))
    written, direct = list(TraceFile(str(path))()), list(mix())
    assert len(written) == len(direct) == mix.requests
    for read_back, request in zip(written, direct, strict=True):
        assert read_back.prompt.tolist() == request.prompt.tolist()
        assert (read_back.arrival, read_back.output_length) == (request.arrival, request.output_length)
        assert (read_back.priority, read_back.tenant) == (request.priority, request.tenant)


def test_mixes_have_the_means_that_were_asked_for() -> None:
    requests = list(Mix(4_000, rate=20.0, prompt_len=100, output_len=30, length_spread=0.5, tenants=2, priorities=2)())
    assert np.mean([len(request.prompt) for request in requests]) == pytest.approx(100, rel=0.05)
    assert np.mean([request.output_length for request in requests]) == pytest.approx(30, rel=0.05)
    assert requests[-1].arrival == pytest.approx(200, rel=0.1)
    first = sum(request.tenant == "tenant-0" for request in requests)
    assert first == pytest.approx(4_000 * 2 / 3, rel=0.05)
    assert {request.priority for request in requests} == {0, 1}


def test_a_seed_decides_everything() -> None:
    one, again, other = (
        [(r.arrival, len(r.prompt)) for r in Mix(20, 5.0, 50, 5, length_spread=1.0, seed=seed)()] for seed in (1, 1, 2)
    )
    assert one == again
    assert one != other


@pytest.mark.parametrize(
    ("field", "value", "fault"),
    [
        ("requests", 0, "--requests 0 must be at least 1"),
        ("rate", 0.0, "--rate 0.0"),
        ("rate", float("inf"), "--rate inf"),
        ("rate", float("nan"), "--rate nan"),
        ("prompt_len", 0, "--prompt-len 0"),
        ("output_len", -1, "--output-len -1"),
        ("length_spread", 4.0, "--length-spread 4.0 must be at least 0 and at most 3"),
        ("shared_prefix", 10, "--shared-prefix 10 must be less than --prompt-len 10"),
        ("prefixes", 0, "--prefixes 0"),
        ("tenants", 0, "--tenants 0"),
        ("priorities", 0, "--priorities 0"),
    ],
)
def test_impossible_mixes_are_refused(field: str, value: Any, fault: str) -> None:
    numbers: dict[str, Any] = {"requests": 1, "rate": 1.0, "prompt_len": 10, "output_len": 1, field: value}
    with pytest.raises(ConfigError, match=fault):
        Mix(**numbers).check()
