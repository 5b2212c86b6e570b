"""``hardpoint bench document RESULT.json --output PAGE.md``: the page, its pictures and the result beside them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from hardpoint.errors import ConfigError
from hardpoint_bench.charts import draw_charts
from hardpoint_bench.document import chart_names, page
from hardpoint_bench.documents import read_result, write_text
from hardpoint_bench.suite_command import known_values

__all__ = ["RESULT", "run_document"]

RESULT = "result.json"
"""Name of the copy beside the pictures, from which the page can be written again."""


def run_document(arguments: argparse.Namespace, source: str | None) -> int:
    """Pictures and a copy of the result go into a folder named like the page. Raises ``ConfigError``."""
    values = known_values(arguments, "document", ("output",))
    if source is None:
        raise ConfigError("no result is named; write `hardpoint bench document RESULT.json --output PAGE.md`")
    target = Path(values["output"] or "")
    if target.suffix != ".md":
        raise ConfigError(f"--output {values['output']!r}: name the page to write, a file that ends with .md")
    result = read_result(Path(source), must_exist=True)
    folder = target.with_suffix("")
    draw_charts(result, folder)
    write_text(folder / RESULT, json.dumps(result, indent=1) + "\n")
    write_text(target, page(result, f"{folder.name}/{RESULT}"))
    for path in folder.glob("*.svg"):
        if path.name not in chart_names(result):
            path.unlink()
    print(json.dumps({"page": str(target), "charts": chart_names(result)}) if arguments.json else str(target))
    return 0
