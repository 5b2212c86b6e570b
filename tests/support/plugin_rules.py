"""What each rule of the plugin specification means here, and the tests that cite it.

A test cites a rule by its number (``R12.3``, ``P12.1``, ``I12.7``) in its own source. Lessons from other engines have
no numbers of their own: a test cites them as ``L12.n`` in the order of :data:`LESSONS`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from workspace import ROOT

__all__ = ["LESSONS", "PAGE", "RULES", "citations", "cited", "files", "page", "statements", "uncited"]

_CITATION = re.compile(r"\b([RPIL]12\.\d+)\b")
_SHOWN = 3
PAGE = "docs/reference/plugin-rules.md"

RULES: Mapping[str, str] = {
    "R12.1": "plugins are entry points: installing the package is all it takes",
    "R12.2": "every kind has its processes, its moment and its default (amended: one table of many kinds)",
    "R12.3": "no kind loads in a process outside its policy",
    "R12.4": "one package may offer plugins of several kinds, each judged alone",
    "R12.5": "further extension points are registries that plugins fill, and all of them work side by side",
    "R12.6": "a kind without plugins is an empty answer, not an error",
    "R12.7": "single plugins are logged quietly, failures and the sum of a process aloud (amended: all kinds alike)",
    "R12.8": "an unset list admits everything, a set one exact names (amended: of what acts merely by being installed)",
    "R12.9": "an empty list admits nothing and differs from an unset one (amended: it has no names at all)",
    "R12.10": "one failure does not stop the others (amended: named or selected plugins stop the start)",
    "R12.11": "order is that of discovery; a name claimed twice is an error that names both",
    "R12.12": "a process activates its plugins once, whatever asks for them, however often (amended: per process id)",
    "R12.13": "factories can be called again without a second effect; equal registration is silent",
    "R12.14": "a failing callable is isolated like a failing import",
    "R12.15": "strict mode turns every failure into a stop (amended: unknown names always are)",
    "R12.16": "each process reports every plugin's state with the reason, and says the sum once",
    "R12.17": "a package without metadata is not found, the scan is counted (amended: nor are archives, which is told)",
    "R12.18": "only the test kit can make a process forget what it loaded",
    "R12.19": "only platforms talk to hardware; core and models never branch on a device's name",
    "R12.20": "platform attributes and their defaults (amended: an instance made by a factory)",
    "R12.21": "predicates follow the platform's kind",
    "R12.22": "the graph pool is made on first request, once per process (amended: by a class method)",
    "R12.23": "missing attributes are the framework's for the device (amended: where loaded), dunder names never",
    "R12.24": "a name in neither place is an error that names both",
    "R12.25": "detection initializes no device (amended: a probe answers, with a reason)",
    "R12.26": "several platforms at once need a choice (amended: fallbacks stand back, broken is fatal)",
    "R12.27": "what an out-of-tree platform must say of itself is enough to run (amended: names to try, no classes)",
    "R12.28": "the platform edits settings early and must leave a worker set (amended: its part of the settings)",
    "R12.29": "all processes of an instance have the launcher's platform, and verify it",
    "R12.30": "a platform from outside the tree runs the whole way",
    "R12.31": "logical, visible and physical device ids are three things",
    "R12.32": "logical to physical: the assigned list, else the mask, else the number itself",
    "R12.33": "an empty mask counts as unset",
    "R12.34": "physical to visible: the position in the mask; not listed is an error",
    "R12.35": "the worked case of two cards behind a mask",
    "R12.36": "an assignment is final, also under concurrent calls",
    "R12.37": "ids out of range and items that are no numbers name variable and value",
    "R12.38": "the three kinds of ids are distinct types",
    "R12.39": "phase 1: the smallest block size that every backend accepts; an explicit one stays",
    "R12.40": "phase 2: attention and state pages of equal size",
    "R12.41": "phase 3: the main page covers the largest padded one",
    "R12.42": "the phases run in this order and the log says which changed the size",
    "R12.43": "an IO processor turns raw input into prompts and outputs into a result",
    "R12.44": "it is the one of the start argument, else of the model, else none",
    "R12.45": "(amended) only the one asked for is loaded, and its factory returns it",
    "R12.46": "a missing one is an error that lists those installed (amended: of one class for all kinds)",
    "R12.47": "it is created once, in the API process, with what it serves (amended: by its factory)",
    "R12.48": "endpoints are denied unless listed",
    "R12.49": "a listed endpoint acts where its tasks meet the server's (amended: one that fails stops the start)",
    "R12.50": "without a list nothing is imported and one notice names what is denied (amended: serving has a list)",
    "R12.51": "an empty list is an explicit none, without a notice (amended: a list always exists when serving)",
    "R12.52": "a task mismatch is a line in the log (amended: a failing listed endpoint stops the start)",
    "R12.53": "where tasks are unknown, only endpoints without required tasks pass",
    "R12.54": "a route that collides with another is refused at the start",
    "R12.55": "one package may offer different endpoints for different tasks",
    "P12.1": "a broken plugin is never silent",
    "P12.2": "what is logged quietly is still in the summary",
    "P12.3": "a failed first attempt does not work sometimes",
    "P12.4": "importing has no side effects, in any process",
    "P12.5": "an incomplete installation is told",
    "P12.6": "unset and empty are kept apart",
    "P12.7": "a forgotten endpoint list is told",
    "P12.8": "device ids cannot be mixed up or overwritten",
    "P12.9": "platforms can be pickled and copied",
    "P12.10": "a platform that sets no worker stops the start",
    "P12.11": "a backend with exact block sizes refuses multiples",
    "P12.12": "all examples installed together pass",
    "I12.1": "loaded is what is installed and listed, whatever subset fails (amended: of kinds that load all)",
    "I12.2": "without a list no endpoint code is imported and only the probes are routes (amended: with an empty one)",
    "I12.3": "loading any number of times anywhere gives equal registries",
    "I12.4": "device ids translate back and forth",
    "I12.5": "the block size equals that of an exhaustive search",
    "I12.6": "without any one package the core starts and passes its tests",
    "I12.7": "platforms and configurations survive pickling and copying",
}

LESSONS: tuple[str, ...] = (
    "a broken platform is fatal unless another was asked for; it never becomes the CPU in silence",
    "unknown names on a list are errors; doctor shows paths and doubled or stale metadata",
    "nothing is resolved at import",
    "one failure policy for all kinds, one report",
    "every process gets the plan, returns a report, and differs at its peril",
    "activation belongs to a process id, so forked children do their own",
    "vendors have an early boot phase",
    "discovery imports nothing and scans once",
    "the command line reads metadata only, so a mismatched plugin cannot break it",
    "a probe never initializes a device",
    "API version in the group, core range in the distribution, both judged before an import",
    "the core does not depend on torch",
    "there is no way to patch, and what was patched is noticed",
    "every method of an interface has an effect that a kit tests",
    "factories get a context and the plugin's own options",
    "choices on the command line come from metadata",
    "names are open strings in registries, never closed sets",
    "the same name twice is an error until it is pinned",
    "two platforms or compilers: the operator names one",
    "declared capabilities are tested both ways",
    "the scheduler kit measures what a step costs",
    "fingerprints of active plugins enter cache keys",
    "the kit runs on a fake device, and built-in plugins run the same kit",
    "statistics are typed events that name the request",
    "plugin routes need the key and cannot shadow others",
    "an operator registered twice is one operator; a foreign one names its owner",
)


@cache
def citations() -> Mapping[str, tuple[str, ...]]:
    """Rule to the tests that cite it, as ``path::name``; a file whose first line cites one counts as ``path``.

    Tests of the conformance kit count as well. They come last: they hold others, while the others hold us.
    """
    found: dict[str, list[str]] = {}
    for path in files():
        source, name = path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix()
        if not _CITATION.search(source):
            continue
        tree = ast.parse(source)
        for rule in cited(ast.get_docstring(tree)):
            found.setdefault(rule, []).append(name)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
                for rule in cited(ast.get_source_segment(source, node)):
                    found.setdefault(rule, []).append(f"{name}::{node.name}")
    return {rule: tuple(sorted(tests, key=_place)) for rule, tests in found.items()}


def cited(text: str | None) -> list[str]:
    """Numbers of rules in ``text``, whether there are such rules or not."""
    return sorted(set(_CITATION.findall(text or "")))


def _place(test: str) -> tuple[bool, bool, str]:
    """Single tests before files, tests of this project before rules for others."""
    return "/src/" in test, "::" not in test, test


def files() -> list[Path]:
    """Every test, and every conformance class."""
    folders = ("core", "platforms", "plugins", "examples_plugins", "tests")
    tests = [path for folder in folders for path in (ROOT / folder).rglob("test_*.py")]
    kits = [*(ROOT / "core/src/hardpoint/testing").glob("*_suite.py")]
    kits += (ROOT / "plugins/testing_torch/src/hardpoint_testing_torch").glob("*.py")
    return sorted({*tests, *kits})


def statements() -> Mapping[str, str]:
    """Every rule and lesson by its number."""
    return {**RULES, **{f"L12.{number}": text for number, text in enumerate(LESSONS, 1)}}


def uncited() -> list[str]:
    """Rules that no test cites."""
    return [rule for rule in statements() if rule not in citations()]


def page() -> str:
    """The table of rules as Markdown, from ``docs/reference``."""
    lines = [
        "<!-- Written by tests/support/generate_docs.py; change the code it reads, then run it with --write. -->",
        "",
        "# Plugin rules and the tests that hold them",
        "",
        "`R12`, `P12` and `I12` are requirements, pitfalls and invariants of the plugin specification; *amended* ones",
        "follow the [deviations](../deviations.md). `L12` are lessons from what authors of plugins suffer elsewhere. A",
        "test cites a rule by its number: `grep -rn R12.3 --include=*.py` finds all of them, this page names a few.",
        "",
        "| rule | holds that | tests |",
        "|---|---|---|",
    ]
    for rule, text in statements().items():
        tests = citations().get(rule, ())
        more = " and others" if len(tests) > _SHOWN else ""
        lines.append(f"| {rule} | {text} | {', '.join(map(_link, tests[:_SHOWN]))}{more} |")
    return "\n".join(lines) + "\n"


def _link(test: str) -> str:
    path, _, name = test.partition("::")
    return f"[`{name or Path(path).name}`](../../{path})"
