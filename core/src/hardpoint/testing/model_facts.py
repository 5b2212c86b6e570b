"""What is known of installed architectures without importing any: entry points, manifests, and records of comparisons.

A package with model plugins may ship ``models.json`` beside its manifest. It says, for each architecture, how it was
compared with an oracle and what came of it: configurations, and for each mode a verdict with the power of ten that the
largest relative error stays below (``ok 1e-5``); why modes were not run; and what else tests show.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from hardpoint.errors import PluginError
from hardpoint.plugins.discovery import discover
from hardpoint.plugins.manifest import Manifest, PluginManifest, read_manifest
from hardpoint.plugins.records import DiscoveredPlugin, Discovery, RefusedPlugin

__all__ = [
    "FACTS_FILE",
    "Claim",
    "Comparison",
    "FactsFile",
    "InstalledModel",
    "InstalledModels",
    "ModelFacts",
    "facts_text",
    "installed_models",
    "parse_cell",
    "read_facts",
]

FACTS_FILE = "models.json"
ARCHITECTURES_CAPABILITY = "architectures"
"""Key of a weight loader's capabilities: the architectures that it knows the form of, or ``"any"``."""

_MAX_BYTES = 2**22
_CELL = re.compile(r"(ok|over limit|not run)(?: 1e(-?\d{1,3}))?")
_LOW_PRECISION = ("bfloat16", "float16")


class Comparison(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One configuration beside its oracle. ``modes`` are cells such as ``ok 1e-5``, ``over limit 1e0``, ``not run``."""

    configuration: str
    modes: dict[str, str]


class Claim(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a test shows beyond that: ``model`` names real weights, if it has any; ``test`` is ``path::name``."""

    claim: str
    test: str
    model: str = ""


class ModelFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One architecture. ``not_run`` has the modes by the reason why they do not apply."""

    comparisons: tuple[Comparison, ...] = ()
    not_run: dict[str, tuple[str, ...]] = {}
    claims: tuple[Claim, ...] = ()

    @property
    def is_verified(self) -> bool:
        """Whether something was compared, and nothing was over its limit."""
        verdicts = {parse_cell(cell)[0] for one in self.comparisons for cell in one.modes.values()}
        return "ok" in verdicts and "over limit" not in verdicts

    @property
    def passed(self) -> tuple[str, ...]:
        """Modes that were within their limits wherever they were run, in the order of the record."""
        verdicts: dict[str, set[str]] = {}
        for one in self.comparisons:
            for mode, cell in one.modes.items():
                verdicts.setdefault(mode, set()).add(parse_cell(cell)[0])
        return tuple(mode for mode, found in verdicts.items() if found - {"not run"} == {"ok"})

    def worst(self, *, low_precision: bool = False) -> int | None:
        """Power of ten that all errors in float32, or in 16 bits, stay below; None where none was measured."""
        powers = [
            parse_cell(cell)[1]
            for one in self.comparisons
            for mode, cell in one.modes.items()
            if (mode in _LOW_PRECISION) is low_precision
        ]
        return max((power for power in powers if power is not None), default=None)


class FactsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file: facts by architecture."""

    architectures: dict[str, ModelFacts]
    facts_version: int = 1


class InstalledModel(msgspec.Struct, frozen=True):
    """One plugin of kind ``model``.

    ``tasks`` are None where its manifest does not tell. ``formats`` are the weight loaders that know its form.
    ``inputs``: by modality of a feature its arrays, each told as in ``float32 [channels, side, side]``.
    ``whole_prompts``: a prompt is computed in one step. ``faults`` say which file could not be read.
    """

    architecture: str
    distribution: str
    version: str
    entry_point: str
    tasks: tuple[str, ...] | None = None
    whole_prompts: bool = False
    formats: tuple[str, ...] = ()
    inputs: dict[str, dict[str, str]] = {}
    facts: ModelFacts | None = None
    faults: tuple[str, ...] = ()

    @property
    def is_verified(self) -> bool:
        return self.facts is not None and self.facts.is_verified


class InstalledModels(msgspec.Struct, frozen=True):
    """All of them by name, and those that this core refuses."""

    models: tuple[InstalledModel, ...]
    refused: tuple[RefusedPlugin, ...]


def parse_cell(cell: str) -> tuple[str, int | None]:
    """Verdict and power of ten of a cell. Raises ``ValueError`` for a text that none is written as."""
    match = _CELL.fullmatch(cell)
    if match is None:
        raise ValueError(f"the cell {cell!r:.80} is not understood; cells are like 'ok 1e-5' or 'not run'")
    return match[1], None if match[2] is None else int(match[2])


def facts_text(facts: Mapping[str, ModelFacts]) -> str:
    """The file of ``facts``; the same facts give the same text."""
    document = FactsFile(dict(sorted(facts.items())))
    encoded = msgspec.json.encode({"facts_version": document.facts_version, "architectures": document.architectures})
    return msgspec.json.format(encoded, indent=2).decode() + "\n"


def read_facts(path: str | os.PathLike[str]) -> FactsFile:
    """Raises ``PluginError`` naming the file when it cannot be understood."""
    try:
        if not os.path.isfile(path) or os.path.getsize(path) > _MAX_BYTES:
            raise OSError(f"it must be a file of at most {_MAX_BYTES} bytes")
        with open(path, "rb") as stream:
            found = msgspec.json.decode(stream.read(), type=FactsFile)
        for facts in found.architectures.values():
            for one in facts.comparisons:
                for cell in one.modes.values():
                    parse_cell(cell)
    except (OSError, RecursionError, ValueError, msgspec.DecodeError) as error:
        raise PluginError(f"the record of comparisons {os.fspath(path)} is not valid: {error}") from error
    if found.facts_version != 1:
        raise PluginError(
            f"the record of comparisons {os.fspath(path)} has version {found.facts_version}; this core reads 1"
        )
    return found


def installed_models(search_path: Iterable[str] | None = None) -> InstalledModels:
    """Every architecture that an installed distribution has a plugin for, from metadata and files alone."""
    discovery = discover(search_path)
    files = _Files(discovery)
    models = [files.model(plugin) for plugin in discovery.of("model")]
    refused = tuple(entry for entry in discovery.refused if entry.kind == "model")
    return InstalledModels(tuple(sorted(models, key=lambda one: (one.architecture, one.distribution))), refused)


class _Files:
    """Manifests and records by package, each read once."""

    def __init__(self, discovery: Discovery) -> None:
        self._manifests: dict[str, Manifest | PluginError | None] = {}
        self._facts: dict[str, FactsFile | PluginError | None] = {}
        self._readers = {
            plugin.name: reads
            for plugin in discovery.of("weight_loader")
            if (reads := self._entry(plugin).capabilities.get(ARCHITECTURES_CAPABILITY)) is not None
        }

    def model(self, plugin: DiscoveredPlugin) -> InstalledModel:
        entry, package = self._entry(plugin), _package(plugin)
        if package not in self._facts:
            self._facts[package] = _of_package(package)
        record = self._facts[package]
        files = (self._manifests[package], record)
        tasks: Any = entry.capabilities.get("tasks")
        return InstalledModel(
            architecture=plugin.name,
            distribution=plugin.distribution,
            version=plugin.version,
            entry_point=plugin.entry_point,
            tasks=tuple(map(str, tasks)) if isinstance(tasks, list) else None,
            whole_prompts=entry.capabilities.get("whole_prompts") is True,
            formats=tuple(
                sorted(name for name, reads in self._readers.items() if reads == "any" or plugin.name in reads)
            ),
            inputs=_inputs(entry.capabilities.get("inputs")),
            facts=record.architectures.get(plugin.name) if isinstance(record, FactsFile) else None,
            faults=tuple(str(file) for file in files if isinstance(file, PluginError)),
        )

    def _entry(self, plugin: DiscoveredPlugin) -> PluginManifest:
        """What the manifest tells of ``plugin``, which may be nothing."""
        package = _package(plugin)
        if package not in self._manifests:
            try:
                self._manifests[package] = read_manifest(plugin)
            except PluginError as error:
                self._manifests[package] = error
        found = self._manifests[package]
        told = found.plugins if isinstance(found, Manifest) else {}
        return told.get(plugin.kind, {}).get(plugin.name, PluginManifest())


def _inputs(told: Any) -> dict[str, dict[str, str]]:
    """What a manifest, which anybody may have written, tells of arrays, as far as it has the form."""
    by_kind = told if isinstance(told, dict) else {}
    return {
        str(kind): {str(name): str(form) for name, form in arrays.items()}
        for kind, arrays in by_kind.items()
        if isinstance(arrays, dict)
    }


def _package(plugin: DiscoveredPlugin) -> str:
    return plugin.entry_point.partition(":")[0].partition(".")[0]


def _of_package(package: str) -> FactsFile | PluginError | None:
    """The record in the folder of ``package``; only the spec of the top-level package is looked up."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = os.path.join(folder, FACTS_FILE)
        if os.path.exists(path):
            try:
                return read_facts(path)
            except PluginError as error:
                return error
    return None
