"""Which peers are installed, where, and which converted models there are."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hardpoint.errors import ConfigError
from hardpoint_bench.classes import AS_IT_IS, PrecisionClass, variant_of
from hardpoint_bench.peers import PEERS, ChosenPeer
from hardpoint_bench.sides import Program

__all__ = ["MODELS", "Inventory"]

MODELS = "models"
"""Folder of converted models beside those of the peers' environments."""
_FIND = "import importlib.util, sys; sys.exit(any(importlib.util.find_spec(name) is None for name in sys.argv[1:]))"
_FIND_S = 120


@dataclass(frozen=True, slots=True)
class Inventory:
    """``programs``: peers that can run, by name. ``missing``: those that cannot, and what to do about it.

    ``folder`` holds an environment per peer, named like it, and :data:`MODELS`; None where there is none.
    """

    programs: Mapping[str, Program]
    missing: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None

    @classmethod
    def take(cls, names: Sequence[str] | None, folder: Path | None, pythons: Mapping[str, str]) -> Inventory:
        """Looks for the peers ``names``, for all of them with None. ``pythons``: interpreters that were given.

        A peer is looked for in its environment in ``folder``, else beside us. Raises ``ConfigError`` for a peer that
        was named and is not installed, and for an unknown one.
        """
        if folder is not None and not folder.is_dir():
            raise ConfigError(f"--peers {str(folder)!r}: there is no such folder; make it, or leave the option out")
        found, missing = {}, {}
        for name in PEERS if names is None else names:
            if name not in PEERS:
                raise ConfigError(f"--compare {name!r}: no such peer; there are: {', '.join(PEERS)}")
            program = replace(PEERS[name], python=pythons.get(name) or _own_python(name, folder))
            if _is_installed(program):
                found[name] = program
                continue
            advice = _advice(program, folder)
            if names is not None:
                raise ConfigError(f"--compare {name}: {program.python} does not have it; {advice}")
            missing[name] = advice
        return cls(found, missing, folder)

    def peers_for(self, chosen: PrecisionClass) -> tuple[list[ChosenPeer], dict[str, str]]:
        """Those with a model for the class; and why the others take no part."""
        taking, absent = [], {}
        models = None if self.folder is None else self.folder / MODELS
        for name, program in self.programs.items():
            path = variant_of(chosen, name, models)
            if path is not None:
                taking.append(ChosenPeer(program, path or None))
            elif name in chosen.variants:
                wanted = " or ".join(variant for variant in chosen.variants[name] if variant != AS_IT_IS)
                absent[name] = f"no converted model {wanted} in {models or 'a folder given with --peers'}"
            else:
                absent[name] = "has nothing in this class"
        return taking, absent


def _own_python(name: str, folder: Path | None) -> str:
    python = None if folder is None else folder / name / "bin" / "python"
    return str(python) if python is not None and python.exists() else sys.executable


def _is_installed(program: Program) -> bool:
    command = [program.python, "-c", _FIND, *program.modules]
    try:
        done = subprocess.run(command, env=program.environment(None), capture_output=True, check=False, timeout=_FIND_S)
    except OSError as error:
        raise ConfigError(f"--peer-python {program.python!r} cannot be run ({error.strerror})") from None
    return done.returncode == 0


def _advice(program: Program, folder: Path | None) -> str:
    packages = " ".join(dict.fromkeys(program.modules.values()))
    place = (folder or Path("PEERS")) / program.name
    further = "" if folder else " and name the folder with --peers PEERS"
    return f"python3 -m venv {place} && {place}/bin/pip install {packages}{further}"
