"""What a decoder architecture costs: code of its own only where it differs from the layer library."""

from __future__ import annotations

from importlib.metadata import entry_points

from model_sizes import LIBRARY, NUM_SMALLEST, PACKAGE, entries, own_modules, path_of, sizes

MAX_LINES = 120


def test_the_library_is_what_it_is_taken_for() -> None:
    assert [module for module in sorted(LIBRARY) if not path_of(module).is_file()] == []
    assert LIBRARY.isdisjoint(entries().values())


def test_the_project_file_names_what_is_installed() -> None:
    points = entry_points(group="hardpoint.model.v1")
    assert {point.name: point.module for point in points if point.module.split(".")[0] == PACKAGE} == entries()


def test_the_smallest_architectures_take_few_lines() -> None:
    smallest = sizes()[:NUM_SMALLEST]
    assert len(smallest) == NUM_SMALLEST
    assert [size for size in smallest if size.num_lines >= MAX_LINES] == []


def test_lines_are_counted_with_what_a_file_brings_along() -> None:
    """A file that leans on one of its own has the lines of both, and none of a neighbor's."""
    by_home = {size.home: size for size in sizes()}
    assert sum(len(size.architectures) for size in by_home.values()) == len(entries())
    for home, size in by_home.items():
        names = {home, *(f"{PACKAGE}.{name}" for name in size.brought)}
        assert names == own_modules(home, set(by_home))
        assert size.num_lines == sum(path_of(name).read_bytes().count(b"\n") for name in names)
        assert names.isdisjoint(LIBRARY | by_home.keys() - {home})
