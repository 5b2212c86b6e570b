"""The reader behind the locks: a lock that sees nothing would pass for ever."""

from import_rules import exported_names, import_cycles, imports_of


def modules(source: str, module: str = "", is_package: bool = False) -> set[str]:
    return {found.module for found in imports_of(source, module, is_package)}


def test_deferred_and_dynamic_imports_are_seen() -> None:
    source = "def f():\n    import torch\n    importlib.import_module('a.b')\n    __import__('c')\n"
    assert modules(source) == {"torch", "a.b", "c"}


def test_relative_imports_are_resolved_for_modules_and_packages() -> None:
    assert modules("from . import x", "p.q.m") == {"p.q"}
    assert modules("from ..r import x", "p.q.m") == {"p.r"}
    assert modules("from .r import x", "p.q", is_package=True) == {"p.q.r"}
    assert modules("import_module('.r', __package__)", "p.m") == {"p.r"}


def test_only_the_body_of_type_checking_is_typing_only() -> None:
    source = "if TYPE_CHECKING:\n    import a\nelse:\n    import b\nif typing.TYPE_CHECKING:\n    import c\n"
    assert {found.module: found.typing_only for found in imports_of(source)} == {"a": True, "b": False, "c": True}


def test_exported_names_reads_plain_and_annotated_lists() -> None:
    assert exported_names("__all__ = ['a', 'b']") == frozenset({"a", "b"})
    assert exported_names("__all__: list[str] = ['a']") == frozenset({"a"})
    assert exported_names("x = 1") is None


def test_cycles_are_found_and_diamonds_are_not() -> None:
    assert import_cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
    assert import_cycles({"a": {"b", "c"}, "b": {"d"}, "c": {"d"}, "d": set()}) == []
    assert import_cycles({"a": {"a"}}) == [["a"]]
