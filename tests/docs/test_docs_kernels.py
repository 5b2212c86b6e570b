"""The page on kernels lists the seams that exist, with their parameters."""

from __future__ import annotations

import re

from hardpoint_torch_runtime.ops import SEAMS
from workspace import ROOT

PAGE = ROOT / "docs/extend/kernels.md"


def test_the_table_of_seams_is_the_codes() -> None:
    section = PAGE.read_text(encoding="utf-8").partition("\n## Seams\n")[2]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| `")]
    listed = {row[0].strip(" `"): tuple(re.findall(r"`(\w+)`", row[1])) for row in rows}
    assert listed == {name: row.parameters for name, row in SEAMS.items()}
    assert {row[0].strip(" `"): row[3].strip() for row in rows}["silu_and_mul"] == SEAMS["silu_and_mul"].used_by
