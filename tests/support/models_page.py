"""``docs/models.md`` read and written: rows of cells, why modes were not run, and what real weights show.

The page is the record of the runs; ``models.json``, which is packaged with the plugins, is made of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hardpoint.testing.model_facts import Claim, Comparison, ModelFacts, facts_text, parse_cell
from hardpoint_testing_torch import MODES, ModeResult, ParityReport, Verdict
from workspace import ROOT

__all__ = [
    "FACTS",
    "OWN_ORACLES",
    "PAGE",
    "REAL_WEIGHTS",
    "Cell",
    "RealWeights",
    "Reasons",
    "Rows",
    "packaged_facts",
    "page_of",
    "read_page",
    "read_reasons",
    "reasons_of",
    "rows_of",
]

PAGE = ROOT / "docs/models.md"
FACTS = "plugins/models/src/hardpoint_models/models.json"
HEADINGS: Mapping[str, str] = {"tp2": "TP2"}
_NEAR = 1
"""Powers of ten by which an error may differ from that on the page: other processors round in another order."""
_REASON = re.compile(r"- (?P<modes>[\w, ]+) of (?P<architecture>\w+): (?P<why>.+)")


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
        verdict, magnitude = parse_cell(text.strip())
        return cls(Verdict(verdict), magnitude)

    def __str__(self) -> str:
        return str(self.verdict) if self.magnitude is None else f"{self.verdict} 1e{self.magnitude}"

    def is_like(self, other: Cell) -> bool:
        """Equal verdicts, and errors of about the same magnitude."""
        if self.verdict is not other.verdict or (self.magnitude is None) != (other.magnitude is None):
            return False
        return self.magnitude is None or other.magnitude is None or abs(self.magnitude - other.magnitude) <= _NEAR


Rows = Mapping[tuple[str, str], Mapping[str, Cell]]
"""By architecture and configuration, the cell of each mode."""
Reasons = Mapping[tuple[str, str], tuple[str, ...]]
"""By architecture and reason, the modes that were not run for it."""


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
_REWARD_SCORES = "plugins/models/tests/test_models_label_heads.py::test_rewards_are_those_of_two_layers"
OWN_ORACLES: Mapping[str, Claim] = {
    name: Claim("scores are those of the decoder in `transformers` with two layers behind it", _REWARD_SCORES)
    for name in ("Qwen2ForProcessRewardModel", "Qwen2ForRewardModel")
}
"""Architectures published with code of their own, which is not run; their tests have an oracle of few lines."""


def rows_of(reports: Iterable[ParityReport]) -> Rows:
    """Several reports of one case, in other modes, are one row."""
    found: dict[tuple[str, str], dict[str, Cell]] = {}
    for report in reports:
        cells = {result.mode: Cell.of(result) for result in report.results}
        found.setdefault((report.architecture, report.name), {}).update(cells)
    return found


def reasons_of(reports: Iterable[ParityReport]) -> Reasons:
    """Why the modes that ``reports`` do not have were left out."""
    found: dict[tuple[str, str], tuple[str, ...]] = {}
    for report in reports:
        for result in report.results:
            if result.verdict is Verdict.NOT_RUN:
                key = (report.architecture, result.note)
                found[key] = tuple(dict.fromkeys([*found.get(key, ()), result.mode]))
    return found


def read_page(path: Path | None = None) -> Rows:
    """The first table of the page."""
    found = {}
    for line in (path or PAGE).read_text(encoding="utf-8").splitlines():
        if line.startswith("| `"):
            architecture, name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            if len(cells) == len(MODES):
                texts = zip(MODES, cells, strict=True)
                found[architecture.strip("`"), name] = {mode: Cell.parse(text) for mode, text in texts}
    return found


def read_reasons(path: Path | None = None) -> Reasons:
    """The list below that table."""
    modes_of = {HEADINGS.get(mode, mode): mode for mode in MODES}
    matches = map(_REASON.fullmatch, (path or PAGE).read_text(encoding="utf-8").splitlines())
    return {
        (match["architecture"], match["why"]): tuple(modes_of[word] for word in match["modes"].split(", "))
        for match in matches
        if match is not None
    }


def page_of(rows: Rows, reasons: Reasons) -> str:
    """The page, rows and reasons in the order given."""
    headings = ["architecture", "configuration", *(HEADINGS.get(mode, mode) for mode in MODES)]
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    for (architecture, name), cells in rows.items():
        lines.append(f"| `{architecture}` | {name} | {' | '.join(str(cells[mode]) for mode in MODES)} |")
    told = [
        f"- {', '.join(HEADINGS.get(mode, mode) for mode in modes)} of {architecture}: {why}"
        for (architecture, why), modes in reasons.items()
    ]
    own = ["| architecture | what is compared | test |", "|---|---|---|"]
    own += [f"| `{name}` | {one.claim} | `{one.test}` |" for name, one in OWN_ORACLES.items()]
    weights = ["| model | architecture | what is compared | test |", "|---|---|---|---|"]
    weights += [f"| {one.model} | `{one.architecture}` | {one.claim} | `{one.test}` |" for one in REAL_WEIGHTS]
    parts = [_HEAD.strip(), "\n".join(lines), *(("Not run:", "\n".join(told)) if told else ())]
    parts += [_OWN.strip(), "\n".join(own), _REAL.strip(), "\n".join(weights)]
    return "\n\n".join(parts) + "\n"


def packaged_facts() -> str:
    """``models.json`` of the distribution with the models, from the page."""
    comparisons: dict[str, list[Comparison]] = {}
    for (architecture, name), cells in read_page().items():
        texts = {mode: str(cell) for mode, cell in cells.items()}
        comparisons.setdefault(architecture, []).append(Comparison(name, texts))
    not_run: dict[str, dict[str, tuple[str, ...]]] = {}
    for (architecture, why), modes in read_reasons().items():
        not_run.setdefault(architecture, {})[why] = modes
    claims: dict[str, list[Claim]] = {name: [claim] for name, claim in OWN_ORACLES.items()}
    for one in REAL_WEIGHTS:
        claims.setdefault(one.architecture, []).append(Claim(one.claim, one.test, one.model))
    return facts_text(
        {
            name: ModelFacts(tuple(comparisons.get(name, ())), not_run.get(name, {}), tuple(claims.get(name, ())))
            for name in comparisons.keys() | claims.keys()
        }
    )


_HEAD = """
<!-- Written by tests/support/generate_models_table.py from tests/support/model_cases.py; run it with --write. -->

# Models

Which architectures run, and how each one compares with `transformers`. `hardpoint models list` names those that are
installed, further plugins included, and `hardpoint models show ARCH` tells what is known of one. The plugin named
`transformers` is no architecture: it [runs others that have no plugin](models/transformers-fallback.md).
[Where each one lives, and what it serves](models/architectures.md).

Each row is a tiny model with random weights, computed by the whole engine and by `transformers`. A cell says whether
the mode is within its limit, and the power of ten that the largest error stays below.
[How to read it](models/comparing.md#how-to-read-the-table).
"""

_OWN = """
## Without a class in `transformers`

These are published with code of their own, which is never run; a few lines stand in for it.
"""

_REAL = """
## Real weights

These are too large to be compared in every mode; the tests below compare them.
"""
