"""The shared-memory ring: every reader gets every frame, whole and in order, however slow, sleepy or dead it is."""

from __future__ import annotations

import gc
import hashlib
import os
import random
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardpoint.ipc import CodecError
from hardpoint.process import spawn
from hardpoint_executors.ring import RingReader, RingWriter

SLOT_BYTES = 1 << 16
NUM_SLOTS = 16
SIZES = (0, 1, 100, SLOT_BYTES - 9, SLOT_BYTES - 8, SLOT_BYTES - 7, 200_000, 1_500_000)
Open = Callable[[int], tuple[RingWriter, list["Reader"]]]


class Reader:
    """A reader in this process, with a bell and a writer that can be gone."""

    def __init__(self, descriptor: int, index: int, num_readers: int) -> None:
        self.bell = threading.Event()
        self.num_rings = 0
        self.writer_is_gone = False
        self.end = RingReader(os.dup(descriptor), index, num_readers, self.wait)

    def ring(self) -> None:
        self.num_rings += 1
        self.bell.set()

    def wait(self, seconds: float) -> bool:
        if not self.writer_is_gone and self.bell.wait(seconds):
            self.bell.clear()
        return not self.writer_is_gone

    def leave(self) -> None:
        self.writer_is_gone = True
        self.bell.set()


def connect(num_readers: int) -> tuple[RingWriter, list[Reader]]:
    readers: list[Reader] = []
    writer = RingWriter(num_readers, lambda index: readers[index].ring())
    readers += [Reader(writer.descriptor, index, num_readers) for index in range(num_readers)]
    return writer, readers


@pytest.fixture
def open_ring() -> Iterator[Open]:
    opened: list[tuple[RingWriter, list[Reader]]] = []

    def create(num_readers: int) -> tuple[RingWriter, list[Reader]]:
        opened.append(connect(num_readers))
        return opened[-1]

    yield create
    for writer, readers in opened:
        for reader in readers:
            reader.end.close()
        writer.close()
        writer.close()


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 3),
    st.lists(
        st.sampled_from((0, 1, 100, SLOT_BYTES - 9, SLOT_BYTES - 8, SLOT_BYTES - 7, 200_000, 1_500_000)), max_size=30
    ),
    st.randoms(use_true_random=False),
)
def test_every_reader_gets_every_frame(num_readers: int, sizes: list[int], rng: random.Random) -> None:
    """More frames and larger frames than the ring holds; readers of random speed."""
    writer, readers = connect(num_readers)
    frames = [bytes([i % 251]) * size for i, size in enumerate(sizes)]
    delays = [rng.choice([0.0, 0.0005]) for _ in readers]
    received: list[list[bytes | None]] = [[] for _ in readers]

    def consume(index: int) -> None:
        for _ in frames:
            time.sleep(delays[index])
            received[index].append(readers[index].end.receive())

    threads = [threading.Thread(target=consume, args=(index,)) for index in range(num_readers)]
    for thread in threads:
        thread.start()
    for frame in frames:
        writer.send(frame, 20.0)
    for thread in threads:
        thread.join()
    assert received == [frames] * num_readers
    for reader in readers:
        reader.end.close()
    writer.close()


def test_a_sleeping_reader_is_woken_by_its_bell_and_a_busy_one_is_left_alone(open_ring: Open) -> None:
    writer, (reader,) = open_ring(1)
    writer.send(b"first")
    assert reader.end.receive() == b"first"
    assert reader.num_rings == 0
    got: list[tuple[bytes | None, float]] = []
    thread = threading.Thread(target=lambda: got.append((reader.end.receive(), time.monotonic())))
    thread.start()
    time.sleep(0.2)
    sent = time.monotonic()
    writer.send(b"second")
    thread.join()
    assert got[0][0] == b"second"
    assert got[0][1] - sent < 0.2
    assert reader.num_rings == 1


def test_a_lost_ring_only_delays(open_ring: Open) -> None:
    """A reader looks again by itself, so a wake-up that never came costs time and no message."""
    writer, (reader,) = open_ring(1)
    reader.ring = lambda: None  # type: ignore[method-assign]
    got: list[bytes | None] = []
    thread = threading.Thread(target=lambda: got.append(reader.end.receive()))
    thread.start()
    time.sleep(0.1)
    writer.send(b"x")
    thread.join(5)
    assert got == [b"x"]


def test_what_was_sent_before_the_writer_went_is_still_read(open_ring: Open) -> None:
    writer, (reader,) = open_ring(1)
    writer.send(b"one")
    writer.send(b"two")
    reader.leave()
    assert [reader.end.receive() for _ in range(4)] == [b"one", b"two", None, None]


def test_a_frame_the_writer_never_finished_is_no_frame(open_ring: Open) -> None:
    writer, (reader,) = open_ring(1)
    writer._send_part(memoryview(b"begin"), 100, None)
    reader.leave()
    assert reader.end.receive() is None


def test_a_reader_that_lags_a_ring_behind_holds_the_writer_until_it_is_retired(open_ring: Open) -> None:
    writer, (quick, stuck) = open_ring(2)
    for number in range(NUM_SLOTS):
        writer.send(bytes([number]), 1.0)
        assert quick.end.receive() == bytes([number])
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"not taken a message for 0\.2 s"):
        writer.send(b"more", 0.2)
    assert 0.15 < time.monotonic() - began < 2.0
    assert stuck.end.receive() == b"\0"
    writer.send(b"more", 1.0)
    releaser = threading.Timer(0.1, writer.retire, (1,))
    releaser.start()
    writer.send(b"after", 10.0)
    releaser.join()
    assert [quick.end.receive(), quick.end.receive()] == [b"more", b"after"]


def test_memory_that_makes_no_sense_is_an_error(open_ring: Open) -> None:
    for part in (struct.pack("<II", SLOT_BYTES, 0), struct.pack("<II", 5, 2**31), b"\xff" * 8):
        writer, (reader,) = open_ring(1)
        writer._slot(0)[:8] = part
        writer._words[0] = 1
        with pytest.raises(CodecError, match="cannot be in the ring"):
            reader.end.receive()


def _ring_maps() -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "hardpoint-ring" in line]


def test_the_memory_has_no_name_and_goes_with_its_descriptors() -> None:
    gc.collect()  # Rings of other tests may still await it.
    before, mapped = set(os.listdir("/proc/self/fd")), set(_ring_maps())
    writer, readers = connect(2)
    maps = set(_ring_maps()) - mapped
    assert maps
    assert all("(deleted)" in line for line in maps)
    assert not os.get_inheritable(writer.descriptor)
    for reader in readers:
        reader.end.close()
    writer.close()
    assert set(_ring_maps()) == mapped
    assert set(os.listdir("/proc/self/fd")) == before


def test_frames_cross_process_borders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two real processes, frames of all sizes, thousands of wake-ups."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    bells, answers = [os.pipe(), os.pipe()], [os.pipe(), os.pipe()]

    def ring_bell(reader: int) -> None:
        os.write(bells[reader][1], b"!")

    writer = RingWriter(2, ring_bell)
    children = []
    for reader in range(2):
        descriptors = (writer.descriptor, bells[reader][0], answers[reader][1])
        payload = msgspec.msgpack.encode((writer.descriptor, reader, 2, *descriptors[1:]))
        children.append(spawn("exec_ring_entries:consume", payload, name=f"reader-{reader}", pass_fds=descriptors))
    rng = random.Random(7)
    digest = hashlib.sha256()
    for number in range(1500):
        frame = rng.randbytes(rng.choice([1, 50, 3000, 70_000]))
        digest.update(frame)
        writer.send(frame, 20.0)
        if number % 100 == 0:
            time.sleep(0.005)
    writer.send(b"", 20.0)
    assert [os.read(answers[reader][0], 100) for reader in range(2)] == [digest.digest()] * 2
    for child in children:
        assert child.wait(10) == 0
        child.close()
    writer.close()
    for reading, writing in (*bells, *answers):
        os.close(reading)
        os.close(writing)
