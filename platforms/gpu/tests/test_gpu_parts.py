"""Masks, builds, files and memory: the small parts that platforms of graphics processors are made of."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_doubles import GIB, gpu, nobody, write_host
from hardpoint.errors import ConfigError
from hardpoint_gpu import memory
from hardpoint_gpu.framework import FrameworkBuild, version_number
from hardpoint_gpu.host import Host, NodeState
from hardpoint_gpu.inventory import Inventory
from hardpoint_gpu.masks import first_set, hides_everything, physical_numbers

SIZES = st.integers(0, 1 << 40)


@pytest.mark.parametrize(
    ("value", "hides"),
    [
        (None, False),
        ("", True),
        (" ", True),
        ("-1", True),
        ("-1,0", True),
        ("none", True),
        ("0", False),
        ("GPU-1", False),
    ],
)
def test_what_hides_everything(value: str | None, hides: bool) -> None:
    assert hides_everything(value) is hides


@pytest.mark.parametrize(
    ("value", "below", "numbers"),
    [("", "3,1", "3,1"), ("1,0", "3,1", "1,3"), ("0", "3,1", "3"), ("GPU-7", "7,1", "7"), ("1", "GPU-5,GPU-7", "7")],
)
def test_two_masks_in_a_row(value: str, below: str, numbers: str) -> None:
    """R12.32: numbers of the upper mask count what the lower one lets through."""
    assert physical_numbers(value, below, lambda text: int(text.removeprefix("GPU-"))) == numbers


def test_a_number_beyond_the_lower_mask_is_named() -> None:
    with pytest.raises(ValueError, match="'2' counts beyond the 2 devices that '3,1' lets through"):
        physical_numbers("2", "3,1", int)


def test_the_first_variable_that_is_set_counts() -> None:
    assert first_set({"B": "1", "A": " "}, ("A", "B")) == "1"
    assert first_set({}, ("A",)) is None


def test_uuids_are_found_by_their_beginning() -> None:
    """R12.37: a text that names no device, or several, is an error that lists what there is."""
    found = Inventory(
        library="x", driver_version="1", devices=(gpu(0, uuid="GPU-aab"), gpu(1, uuid="GPU-aac"), gpu(2, uuid="GPU-aa"))
    )
    assert [found.number_of(text) for text in ("GPU-aab", "gpu-AAC", "GPU-aa")] == [0, 1, 2]
    with pytest.raises(LookupError, match="more than one UUID begins so; UUIDs: GPU-aab, GPU-aac"):
        found.number_of("GPU-a")
    with pytest.raises(LookupError, match="no UUID begins so"):
        found.number_of("GPU-b")


@pytest.mark.parametrize(
    ("text", "build"),
    [
        (
            "__version__ = '2.9.0+cu128'\ncuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n",
            FrameworkBuild("2.9.0+cu128", cuda="12.8"),
        ),
        ("__version__ = '2.9'\nhip = '6.4'", FrameworkBuild("2.9", hip="6.4")),
        ("debug = False", None),
        ("not python (", None),
    ],
)
def test_builds_are_read_without_importing(tmp_path: Path, text: str, build: FrameworkBuild | None) -> None:
    place = tmp_path / "version.py"
    place.write_text(text)
    assert FrameworkBuild.read(place) == build
    assert FrameworkBuild.read(tmp_path / "nothing.py") is None


def test_the_installed_build_is_found() -> None:
    found = FrameworkBuild.installed()
    assert found is not None
    assert found.version.startswith("2.")


@pytest.mark.parametrize(("text", "number"), [("12.8", (12, 8)), ("6.4.434-0f2", (6, 4)), ("13", (13, 0))])
def test_version_numbers(text: str, number: tuple[int, int]) -> None:
    assert version_number(text) == number


def test_device_files_are_looked_at_and_never_opened(tmp_path: Path) -> None:
    host = write_host(tmp_path, {"dev/a": ""})
    assert [host.node_state(path) for path in ("/dev/a", "/dev/b")] == [NodeState.USABLE, NodeState.MISSING]
    assert host.unusable(["/dev/a"]) is None
    assert Host(tmp_path, nobody).unusable(["/dev/a"]) == ("/dev/a", NodeState.DENIED)
    assert host.read("/dev/none") is None
    assert host.folders("/nowhere") == []


@given(total=SIZES, fraction=st.floats(0.01, 1), reserve=SIZES, device_used=SIZES, reserved=SIZES, peak=SIZES)
def test_the_cache_fits_beside_the_worst_step_and_the_reserve(
    total: int, fraction: float, reserve: int, device_used: int, reserved: int, peak: int
) -> None:
    """Cache = share of the device - what is in use - what the step needed more at its worst - reserve."""
    if int(total * fraction) <= reserve:
        with pytest.raises(ConfigError, match="memory_fraction"):
            memory.budget(total, fraction, reserve)
        return
    room = memory.budget(total, fraction, reserve) - memory.used(device_used, reserved, peak)
    worst = device_used + max(0, peak - reserved)
    assert room + worst + reserve == int(total * fraction)


def test_a_reserve_that_takes_everything_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"raise the one or lower the other"):
        memory.budget(GIB, 0.5, GIB)
