"""``python -m hardpoint_testing_torch Qwen3ForCausalLM --config head_dim=16``: an installed model beside its oracle."""

from __future__ import annotations

import argparse
import difflib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import transformers

from hardpoint_testing_torch.engine_parity import run_parity
from hardpoint_testing_torch.model_record import record
from hardpoint_testing_torch.parity_case import MODES, ParityCase
from hardpoint_testing_torch.tiny_models import tiny_fields

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """0 when every mode that was run is within its limit, 1 otherwise."""
    parser = argparse.ArgumentParser(
        prog="python -m hardpoint_testing_torch",
        description="Compare an installed architecture with transformers, on tiny random weights, through the engine.",
    )
    parser.add_argument("architecture", help="as in config.json; it names the model plugin and the class of the oracle")
    parser.add_argument(
        "--config", metavar="FIELD=JSON", action="append", default=[], type=_field, help="a field; may be repeated"
    )
    parser.add_argument(
        "--mode", action="append", choices=MODES, type=str.lower, help="only this mode; may be repeated"
    )
    parser.add_argument("--block-size", type=int, default=4, help="tokens per KV block (default: 4)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and prompts (default: 0)")
    parser.add_argument("--name", default="plain", help="of the configuration, in the record (default: plain)")
    parser.add_argument("--record", type=Path, metavar="FILE", help="add the report to this file, such as models.json")
    given = parser.parse_args(arguments)
    if (fault := _fault(given.architecture, dict(given.config))) is not None:
        parser.error(fault)
    # The bars of saving a checkpoint of kilobytes only hide the report.
    transformers.utils.logging.disable_progress_bar()
    case = ParityCase(given.architecture, dict(given.config), given.name, block_size=given.block_size)
    with tempfile.TemporaryDirectory() as folder:
        report = run_parity(case, Path(folder), modes=given.mode or MODES, seed=given.seed)
    print(report)
    if given.record is not None:
        record(given.record, report)
    return 0 if report.is_ok else 1


def _fault(architecture: str, config: dict[str, Any]) -> str | None:
    """Why there can be no oracle: the class is not there, or its configuration refuses the fields."""
    model_class = getattr(transformers, architecture, None)
    if model_class is None or not hasattr(model_class, "config_class"):
        models = [name for name in dir(transformers) if "For" in name or name.endswith("Model")]
        near = difflib.get_close_matches(architecture, models, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        return f"transformers {transformers.__version__} has no model class {architecture!r}{hint}"
    try:
        model_class.config_class(**tiny_fields(config))
    except Exception as error:  # Its own kinds, which differ with its version.
        return f"{architecture} does not take these sizes, set others with --config: {error}"
    return None


def _field(text: str) -> tuple[str, Any]:
    name, sign, value = text.partition("=")
    if not name or not sign:
        raise argparse.ArgumentTypeError(f"{text!r} is no FIELD=JSON, such as head_dim=16")
    try:
        return name, json.loads(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"the value of {name!r} is no JSON: {value!r}; texts need quotes") from None


if __name__ == "__main__":
    sys.exit(main())
