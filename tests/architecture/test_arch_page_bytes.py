"""P1.3: what a page of the KV cache is made of is known to its spec; everybody else asks for ``page_size_bytes``."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from workspace import ROOT, distributions

SPECS = "core/src/hardpoint/interfaces/"
"""Where pages are computed: the specs and the dtypes they are made of."""

STRIDES = "plugins/torch_runtime/src/hardpoint_torch_runtime/runner/kv_memory.py"
"""Views need a page's dimensions, one by one, and multiply none."""

KITS = "core/src/hardpoint/testing/"
"""The kit for specs checks the product that a spec makes."""

MADE_OF = ("DTYPE_BYTES", "dtype_bytes", "content_bytes", "states_per_block", "unpadded_page_size_bytes")
TOKENS = ("block_size",)
SHAPES = ("head_size", "num_kv_heads", "heads")


def sources() -> list[Path]:
    files = [path for one in distributions() for path in one.python_files()]
    return [*files, *ROOT.glob("examples_plugins/*/src/**/*.py")]


def names_in(node: ast.AST) -> set[str]:
    return {
        n.attr if isinstance(n, ast.Attribute) else n.id
        for n in ast.walk(node)
        if isinstance(n, ast.Attribute | ast.Name)
    }


def page_products(tree: ast.AST) -> Iterator[int]:
    """Lines with a product of a block's tokens and the shape of a head."""
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            names = names_in(node)
            if names.intersection(TOKENS) and names.intersection(SHAPES):
                yield node.lineno


def knowledge_of(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    if not any(word in text for word in (*MADE_OF, *TOKENS)):
        return []
    tree = ast.parse(text)
    found = [f"line {line}: a product of block and head" for line in page_products(tree)]
    if STRIDES not in path.as_posix():
        used = {n.attr: n.lineno for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
        used |= {n.id: n.lineno for n in ast.walk(tree) if isinstance(n, ast.Name)}
        found += [f"line {used[name]}: {name}" for name in MADE_OF if name in used]
    return found


def test_nobody_else_computes_what_a_page_takes() -> None:
    """P1.3: a new kind of page would be missed wherever its bytes are computed a second time."""
    checked, guilty = 0, {}
    for path in sources():
        place = path.relative_to(ROOT).as_posix()
        if place.startswith((SPECS, KITS)):
            continue
        checked += 1
        found = knowledge_of(path)
        # Phase 2 and 3 of alignment compare what a page holds with what it takes.
        if place.endswith("hardpoint_scheduling/kv_cache/alignment.py"):
            found = [one for one in found if not one.endswith("unpadded_page_size_bytes")]
        if found:
            guilty[place] = found
    assert guilty == {}
    assert checked > 100


@pytest.mark.parametrize(
    "source",
    [
        "size = 2 * spec.block_size * spec.num_kv_heads * spec.head_size",
        "size = block_size * (2 * head_size)",
        "item = DTYPE_BYTES[spec.dtype]",
        "size = spec.heads * spec.states_per_block",
    ],
)
def test_a_second_computation_is_found(source: str, tmp_path: Path) -> None:
    path = tmp_path / "second.py"
    path.write_text(source)
    assert knowledge_of(path)


def test_products_of_a_head_alone_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "layer.py"
    path.write_text("width = num_kv_heads * head_size\nslots = num_blocks * spec.block_size\n")
    assert knowledge_of(path) == []
