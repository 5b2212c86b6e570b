"""The three name spaces of device ids (spec 12 section 4)."""

from __future__ import annotations

import copy
import pickle
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hardpoint.errors import ConfigError
from hardpoint.interfaces import DeviceMap, LogicalDevice, PhysicalDevice

VARIABLE = "ACME_VISIBLE_DEVICES"
UUIDS = {"GPU-a": 7, "GPU-b": 2}


def device_map(value: str | None = None, assigned: list[int] | None = None) -> DeviceMap:
    environment = {} if value is None else {VARIABLE: value}
    physical = None if assigned is None else [PhysicalDevice(device) for device in assigned]
    return DeviceMap(VARIABLE, environment, physical, UUIDS.__getitem__)


def physical(devices: DeviceMap, logical: int) -> int:
    return devices.logical_to_physical(LogicalDevice(logical))


def visible(devices: DeviceMap, number: int) -> int:
    return devices.physical_to_visible(PhysicalDevice(number))


def test_an_assignment_comes_before_the_variable_and_that_before_the_number_itself() -> None:
    """R12.31, R12.32."""
    assert [physical(device_map("1,5,3", [3, 5]), i) for i in (0, 1)] == [3, 5]
    assert [physical(device_map("1, 5,3"), i) for i in (0, 1, 2)] == [1, 5, 3]
    assert [physical(device_map(), i) for i in (0, 9)] == [0, 9]


@pytest.mark.parametrize("value", ["", "  "])
def test_an_empty_variable_counts_as_unset(value: str) -> None:
    """R12.33."""
    assert physical(device_map(value), 3) == 3
    assert visible(device_map(value), 3) == 3


def test_physical_to_visible_is_the_position_in_the_variable() -> None:
    """R12.34, P12.8."""
    assert [visible(device_map("6,2,4"), i) for i in (6, 2, 4)] == [0, 1, 2]
    assert visible(device_map(), 6) == 6
    with pytest.raises(RuntimeError, match=f"physical device 3 is not visible to this process.*{VARIABLE}='6,2,4'"):
        visible(device_map("6,2,4"), 3)
    with pytest.raises(RuntimeError, match=r"\[9\] are assigned"):
        device_map("6,2,4", [9]).logical_to_visible(LogicalDevice(0))


def test_the_worked_case() -> None:
    """R12.35."""
    devices = device_map("4,5", [4, 5])
    assert [(physical(devices, i), devices.logical_to_visible(LogicalDevice(i))) for i in (0, 1)] == [(4, 0), (5, 1)]


def test_an_assignment_is_final() -> None:
    """R12.36, P12.8."""
    devices = device_map()
    devices.set_assigned([PhysicalDevice(4), PhysicalDevice(5)])
    devices.set_assigned([PhysicalDevice(4), PhysicalDevice(5)])
    for other in ([5, 4], [4], []):
        with pytest.raises(RuntimeError, match=r"devices \[4, 5\] are assigned"):
            devices.set_assigned([PhysicalDevice(device) for device in other])
    assert devices.assigned == (4, 5)


def test_an_empty_assignment_is_one_too() -> None:
    devices = device_map("1", [])
    with pytest.raises(ConfigError, match="logical device 0 does not exist"):
        physical(devices, 0)
    with pytest.raises(RuntimeError):
        devices.set_assigned([PhysicalDevice(1)])


def test_of_concurrent_assignments_one_wins() -> None:
    """R12.36, P12.8: every loser is told, and nobody overwrites the winner."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(50):
            devices, start, lost = device_map(), threading.Barrier(4), list[int]()

            def assign(
                number: int, devices: DeviceMap = devices, start: threading.Barrier = start, lost: list[int] = lost
            ) -> None:
                start.wait()
                try:
                    devices.set_assigned([PhysicalDevice(number)])
                except RuntimeError:
                    lost.append(number)

            threads = [threading.Thread(target=assign, args=(number,)) for number in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert devices.assigned is not None
            assert sorted([*lost, *devices.assigned]) == [0, 1, 2, 3]
    finally:
        sys.setswitchinterval(interval)


def test_items_that_are_no_numbers_need_a_resolver() -> None:
    """R12.37."""
    assert [physical(device_map("GPU-b,GPU-a,1"), i) for i in range(3)] == [2, 7, 1]
    for value in ("GPU-c", "0,,1", "0,", "1.5", "-1", "0,0", "GPU-a,7"):
        with pytest.raises(ConfigError) as caught:
            physical(device_map(value), 0)
        assert VARIABLE in str(caught.value)
        assert value in str(caught.value)
    with pytest.raises(ConfigError, match=f"{VARIABLE}='GPU-a': 'GPU-a' is no known device"):
        DeviceMap(VARIABLE, {VARIABLE: "GPU-a"}).logical_to_physical(LogicalDevice(0))


@pytest.mark.parametrize(("value", "assigned", "index"), [("4,5", None, 2), ("4,5", None, -1), (None, [4], 1)])
def test_an_index_out_of_range_is_an_error(value: str | None, assigned: list[int] | None, index: int) -> None:
    """R12.37: it names variable, value and assignment."""
    with pytest.raises(ConfigError, match=f"logical device {index} does not exist.*{VARIABLE}") as caught:
        physical(device_map(value, assigned), index)
    assert str(value or assigned) in str(caught.value)


def test_an_assignment_names_each_device_once() -> None:
    for wrong in ([1, 1], [-1]):
        with pytest.raises(ConfigError, match="name each device once"):
            device_map(assigned=wrong)


def test_maps_can_be_copied() -> None:
    """I12.7: no lock inside."""
    devices = DeviceMap(VARIABLE, {VARIABLE: "4,5"}, [PhysicalDevice(5)])
    for again in (pickle.loads(pickle.dumps(devices)), copy.deepcopy(devices)):  # noqa: S301 (own bytes)
        assert again.assigned == (5,)
        assert again.logical_to_visible(LogicalDevice(0)) == 1


@given(st.lists(st.integers(0, 99), unique=True, min_size=1), st.data())
def test_ids_translate_back_and_forth(listed: list[int], data: st.DataObject) -> None:
    """I12.4: visible to physical after physical to visible is the identity; logical to visible is injective."""
    text = ",".join(map(str, listed))
    assigned = data.draw(st.none() | st.lists(st.sampled_from(listed), unique=True))
    devices = device_map(text, assigned)
    mask_only = device_map(text)
    for number in listed:
        # Without an assignment a logical index is an ordinal of the mask.
        assert physical(mask_only, visible(devices, number)) == number
    count = len(listed if assigned is None else assigned)
    ordinals = [devices.logical_to_visible(LogicalDevice(index)) for index in range(count)]
    assert len(set(ordinals)) == count
    assert all(0 <= ordinal < len(listed) for ordinal in ordinals)


@given(st.lists(st.integers(0, 99), unique=True), st.integers(0, 99))
def test_without_a_mask_numbers_stay(assigned: list[int], number: int) -> None:
    """I12.4 where the variable is unset."""
    assert visible(device_map(assigned=assigned), number) == number
    assert [physical(device_map(assigned=assigned), i) for i in range(len(assigned))] == assigned
