"""The committed table of what kernels use, one JSON file beside a distribution, and how it is compared."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from hardpoint_testing_torch.triton_aot import Resources

__all__ = ["ResourceTable"]


@dataclass(frozen=True, slots=True)
class ResourceTable:
    """``rows``: resources by case and target. ``triton``: the version that compiled them."""

    triton: str
    rows: Mapping[str, Mapping[str, Resources]]

    @property
    def num_rows(self) -> int:
        return sum(len(by_target) for by_target in self.rows.values())

    @property
    def hashes(self) -> dict[str, dict[str, str]]:
        return {name: {target: row.hash for target, row in rows.items()} for name, rows in self.rows.items()}

    @classmethod
    def read(cls, path: Path) -> ResourceTable:
        """Raises ``FileNotFoundError`` where there is none and ``ValueError`` for another form."""
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            rows = {
                name: {target: Resources(**values) for target, values in targets.items()}
                for name, targets in raw["kernels"].items()
            }
            return cls(raw["triton"], rows)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{path} is no table of kernel resources: {error!r}; write it again") from error

    def write(self, path: Path) -> None:
        """One line per kernel and target, in order of name."""
        lines = []
        for name in sorted(self.rows):
            targets = [f"   {json.dumps(target)}: {json.dumps(asdict(row))}" for target, row in self.rows[name].items()]
            lines.append(f"  {json.dumps(name)}: {{\n" + ",\n".join(targets) + "\n  }")
        kernels = ",\n".join(lines)
        text = f'{{\n "triton": {json.dumps(self.triton)},\n "kernels": {{\n{kernels}\n }}\n}}\n'
        path.write_text(text, encoding="utf-8")

    def differences(self, committed: ResourceTable) -> list[str]:
        """What the ``committed`` table says otherwise, in words; of stale rows only that they are stale."""
        found = stale_rows(committed, self.triton, self.hashes)
        for name, targets in self.rows.items():
            for target, row in targets.items():
                known = committed.rows.get(name, {}).get(target)
                if known is not None and known.hash == row.hash and known != row:
                    found.append(f"{name} on {target} uses {row}, but the table says {known}")
        return found


def stale_rows(committed: ResourceTable, triton: str, hashes: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Rows of ``committed`` that are not of the sources whose ``hashes`` by case and target are given."""
    if committed.triton != triton:
        return [f"the table is of triton {committed.triton}, installed is {triton}; write it again"]
    known = committed.hashes
    found = [f"{name} is in the table, but no case has that name" for name in sorted(set(known) - set(hashes))]
    for name, targets in hashes.items():
        for target in sorted(set(targets) | set(known.get(name, {}))):
            here, there = targets.get(target), known.get(name, {}).get(target)
            if there is None:
                found.append(f"{name} on {target} is not in the table")
            elif here is None:
                found.append(f"{name} on {target} is in the table, but the case does not name that target")
            elif here != there:
                found.append(f"{name} on {target} has changed since the table was written")
    return found
