"""``docs/models.md``: what comes of comparing each architecture with ``transformers``, from an actual run.

python tests/support/generate_models_table.py                     run all cases and say what differs from the page
python tests/support/generate_models_table.py --write             write the page
python tests/support/generate_models_table.py --write ARCH ...    run these architectures, and keep the other rows

Afterwards ``python tests/support/generate_docs.py --write`` puts what the page says into the packages.
"""

from __future__ import annotations

import gc
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import transformers

import models_page
from hardpoint_testing_torch import MODES, ParityCase, ParityReport, run_parity
from model_cases import CASES
from models_page import PAGE, REAL_WEIGHTS, Cell, RealWeights, page_of, read_page, read_reasons, reasons_of, rows_of
from workspace import plugin_distributions

__all__ = [
    "PAGE",
    "REAL_WEIGHTS",
    "Cell",
    "RealWeights",
    "differences",
    "merged_page",
    "model_architectures",
    "page",
    "read_page",
    "rows_of",
    "run_cases",
]


def model_architectures() -> list[str]:
    """Every architecture that a distribution of this repository has a plugin for, and ``transformers`` a class.

    Others are published with code of their own, which is not run; their tests have an oracle of few lines.
    """
    names = [name for dist in plugin_distributions() for name in dist.entry_points.get("hardpoint.model.v1", {})]
    return sorted(name for name in names if hasattr(transformers, name))


def run_cases(cases: Iterable[ParityCase] = CASES, modes: Sequence[str] = MODES) -> list[ParityReport]:
    """Run ``cases`` in ``modes``."""
    transformers.utils.logging.disable_progress_bar()
    # Engines collect garbage when they end: going through all imported libraries each time takes longer than the rest.
    gc.collect()
    gc.freeze()
    try:
        return [_run(case, modes) for case in cases]
    finally:
        gc.unfreeze()


def _run(case: ParityCase, modes: Sequence[str]) -> ParityReport:
    with tempfile.TemporaryDirectory() as folder:
        return run_parity(case, Path(folder), modes=modes)


def differences(reports: Iterable[ParityReport]) -> list[str]:
    """How the page differs from ``reports``, in a reader's words."""
    written, now = read_page(), rows_of(reports)
    found = [f"{' '.join(key)}: not on the page" for key in now.keys() - written.keys()]
    found += [f"{' '.join(key)}: on the page, but no such case" for key in written.keys() - now.keys()]
    for key in now.keys() & written.keys():
        for mode, cell in now[key].items():
            if not cell.is_like(written[key][mode]):
                found.append(f"{' '.join(key)}, {mode}: {cell}, the page says {written[key][mode]}")
    return sorted(found)


def page(reports: Sequence[ParityReport]) -> str:
    """The page of ``reports``."""
    return page_of(rows_of(reports), reasons_of(reports))


def merged_page(reports: Sequence[ParityReport], cases: Sequence[ParityCase] = CASES) -> str:
    """The page as it is, with what ``reports`` say of their architectures, in the order of ``cases``."""
    anew = {report.architecture for report in reports}
    order = list(dict.fromkeys(case.architecture for case in cases))
    rows = {key: cells for key, cells in read_page().items() if key[0] not in anew} | dict(rows_of(reports))
    reasons = {key: told for key, told in read_reasons().items() if key[0] not in anew} | dict(reasons_of(reports))
    known = [(case.architecture, case.name) for case in cases]
    placed = {key: rows[key] for key in known if key in rows}
    return page_of(placed, dict(sorted(reasons.items(), key=lambda item: order.index(item[0][0]))))


def main() -> None:
    chosen = {word for word in sys.argv[1:] if not word.startswith("--")}
    if unknown := chosen - {case.architecture for case in CASES}:
        sys.exit(f"no case of {', '.join(sorted(unknown))}; add it to tests/support/model_cases.py")
    reports = run_cases([case for case in CASES if not chosen or case.architecture in chosen])
    print("\n".join(map(str, reports)))
    if "--write" in sys.argv[1:]:
        models_page.PAGE.write_text(merged_page(reports) if chosen else page(reports), encoding="utf-8")
    elif found := [line for line in differences(reports) if not chosen or line.split()[0] in chosen]:
        sys.exit("\n".join(["the page differs:", *found]))


if __name__ == "__main__":
    main()
