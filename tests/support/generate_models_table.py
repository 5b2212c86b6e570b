"""``docs/models/parity.md``: what comes of comparing each architecture with ``transformers``, from an actual run.

python tests/support/generate_models_table.py           run all cases and say what differs from the page
python tests/support/generate_models_table.py --write   write the page
"""

from __future__ import annotations

import gc
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import transformers

from hardpoint_testing_torch import MODES, ModeResult, ParityCase, ParityReport, Verdict, run_parity
from model_cases import CASES
from workspace import ROOT, plugin_distributions

__all__ = [
    "PAGE",
    "REAL_WEIGHTS",
    "Cell",
    "RealWeights",
    "differences",
    "model_architectures",
    "page",
    "read_page",
    "run_cases",
]

PAGE = ROOT / "docs/models/parity.md"
HEADINGS: Mapping[str, str] = {"tp2": "TP2"}
_CELL = re.compile(r"(?P<verdict>ok|over limit|not run)(?: 1e(?P<magnitude>-?\d+))?")
_NEAR = 1
"""Powers of ten by which an error may differ from that on the page: other processors round in another order."""


@dataclass(frozen=True, slots=True)
class Cell:
    """What the page says of one mode: ``magnitude`` is the power of ten that the error stays below."""

    verdict: Verdict
    magnitude: int | None = None

    @classmethod
    def of(cls, result: ModeResult) -> Cell:
        return cls(result.verdict, result.magnitude)

    @classmethod
    def parse(cls, text: str) -> Cell:
        """Raises ``ValueError`` for a text that no cell is written as."""
        match = _CELL.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"{PAGE}: the cell {text!r} is not understood; write the page anew")
        magnitude = match["magnitude"]
        return cls(Verdict(match["verdict"]), None if magnitude is None else int(magnitude))

    def __str__(self) -> str:
        return str(self.verdict) if self.magnitude is None else f"{self.verdict} 1e{self.magnitude}"

    def is_like(self, other: Cell) -> bool:
        """Equal verdicts, and errors of about the same magnitude."""
        if self.verdict is not other.verdict or (self.magnitude is None) != (other.magnitude is None):
            return False
        return self.magnitude is None or other.magnitude is None or abs(self.magnitude - other.magnitude) <= _NEAR


Rows = Mapping[tuple[str, str], Mapping[str, Cell]]
"""By architecture and configuration, the cell of each mode."""


@dataclass(frozen=True, slots=True)
class RealWeights:
    """A model that everybody can get, with the test that compares it; ``test`` is ``path::name``."""

    model: str
    architecture: str
    claim: str
    test: str


REAL_WEIGHTS = (
    RealWeights(
        "SmolLM2-135M-Instruct, Q4_1",
        "LlamaForCausalLM",
        "64 greedy tokens of twenty prompts, alone and in one batch, are those of `transformers` on the same file",
        "tests/end_to_end/test_e2e_greedy_parity.py::test_prompts_alone_and_all_together_have_the_tokens_of_the_oracle",
    ),
    RealWeights(
        "SmolLM2-135M-Instruct, Q4_1",
        "LlamaForCausalLM",
        "logits within 1e-4 of `transformers` on the same file",
        "tests/parity/test_parity_model_families.py::test_the_demo_model_equals_hugging_face_on_the_same_gguf",
    ),
    RealWeights(
        "Gemma 3 270M, Q4_K_M",
        "Gemma3ForCausalLM",
        "64 greedy tokens of four prompts, one longer than its window, are those of `transformers` on the same file",
        "tests/parity/test_parity_gemma3.py::test_the_real_model_gives_the_tokens_of_transformers",
    ),
    RealWeights(
        "all-MiniLM-L6-v2",
        "BertModel",
        "embeddings through the engine are those of `transformers`, to 1e-5 in cosine distance",
        "tests/parity/test_parity_minilm.py::test_embeddings_through_the_engine",
    ),
)


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


def rows_of(reports: Iterable[ParityReport]) -> Rows:
    """Several reports of one case, in other modes, are one row."""
    found: dict[tuple[str, str], dict[str, Cell]] = {}
    for report in reports:
        cells = {result.mode: Cell.of(result) for result in report.results}
        found.setdefault((report.architecture, report.name), {}).update(cells)
    return found


def read_page() -> Rows:
    """The first table of the page."""
    found = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("| `"):
            architecture, name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            if len(cells) == len(MODES):
                texts = zip(MODES, cells, strict=True)
                found[architecture.strip("`"), name] = {mode: Cell.parse(text) for mode, text in texts}
    return found


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
    headings = ["architecture", "configuration", *(HEADINGS.get(mode, mode) for mode in MODES)]
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    for (architecture, name), cells in rows_of(reports).items():
        lines.append(f"| `{architecture}` | {name} | {' | '.join(str(cells[mode]) for mode in MODES)} |")
    notes: dict[str, list[str]] = {}
    for report in reports:
        for result in report.results:
            if result.verdict is Verdict.NOT_RUN:
                told = notes.setdefault(f"of {report.architecture}: {result.note}", [])
                told.append(HEADINGS.get(result.mode, result.mode))
    reasons = [f"- {', '.join(dict.fromkeys(modes))} {why}" for why, modes in notes.items()]
    weights = ["| model | architecture | what is compared | test |", "|---|---|---|---|"]
    weights += [f"| {one.model} | `{one.architecture}` | {one.claim} | `{one.test}` |" for one in REAL_WEIGHTS]
    parts = [_HEAD.strip(), "\n".join(lines), *(("Not run:", "\n".join(reasons)) if reasons else ()), _REAL.strip()]
    return "\n\n".join([*parts, "\n".join(weights)]) + "\n"


_HEAD = """
<!-- Written by tests/support/generate_models_table.py from tests/support/model_cases.py; run it with --write. -->

# Architectures beside transformers

Each row is a tiny model with random weights, computed by the whole engine and by `transformers`. A cell says whether
the mode is within its limit, and the power of ten that the largest error stays below.
[How to read it](index.md#how-to-read-the-table).
"""

_REAL = """
## Real weights

These are too large to be compared in every mode; the tests below compare them.
"""


def main() -> None:
    reports = run_cases()
    print("\n".join(map(str, reports)))
    if "--write" in sys.argv[1:]:
        PAGE.write_text(page(reports), encoding="utf-8")
    elif found := differences(reports):
        sys.exit("\n".join(["the page differs:", *found]))


if __name__ == "__main__":
    main()
