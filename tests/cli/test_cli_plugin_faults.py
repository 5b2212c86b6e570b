"""What installed plugins do to a command line: they are named in it, and whatever is wrong with them breaks nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from cli_support import Finished, run_process
from hardpoint.plugins.kinds import KINDS
from hardpoint.testing.fake_platform import STATE_VARIABLE, install_fake_platform
from scratch_install import write_metadata

pytestmark = pytest.mark.timeout(180)

LOUD = "import os\nopen(os.environ['WHO_WAS_IMPORTED'], 'a').write(__name__ + chr(10))\nraise SystemExit(7)\n"
FEW = ("--prompt", "Hi", "--max-tokens", "2", "--num-kv-blocks", "64")


class Place:
    """A folder of installed packages that comes first on the path of the commands."""

    def __init__(self, folder: Path) -> None:
        self.site = folder / "site"
        self.site.mkdir()
        self.imported = folder / "imported.txt"

    def install(self, name: str, module: str, kinds: Mapping[str, str], requires: str = "hardpoint-core") -> None:
        """``kinds`` maps groups to names of plugins, which all lead to ``module``; importing it is written down."""
        (self.site / f"{module}.py").write_text(LOUD)
        points = {group: {plugin: f"{module}:create"} for group, plugin in kinds.items()}
        write_metadata({"name": name, "version": "1.0", "dependencies": [requires], "entry-points": points}, self.site)

    def run(self, *arguments: object, **environ: str) -> Finished:
        path = os.pathsep.join([str(self.site), *filter(None, [os.environ.get("PYTHONPATH")])])
        given = {"PYTHONPATH": path, "WHO_WAS_IMPORTED": str(self.imported), **environ}
        return run_process(*arguments, environ=given, timeout=120)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def install_every_fault(place: Place) -> None:
    """Whatever a distribution can have wrong, for each kind there is."""
    everywhere = {spec.group: f"faulty_{kind}" for kind, spec in KINDS.items()}
    place.install("raises-at-import", "raises_at_import", everywhere)
    place.install(
        "wants-another-core", "wants_another", {group: f"x_{name}" for group, name in everywhere.items()}, LATER
    )
    place.install("other-major", "other_major", {f"hardpoint.{kind}.v99": f"y_{kind}" for kind in KINDS})
    place.install("of-no-kind", "of_no_kind", {"hardpoint.flux_capacitor.v1": "z"})
    place.install("damaged-manifest", "damaged", {"hardpoint.hash.v1": "damaged"})
    (place.site / "damaged_package").mkdir()
    (place.site / "damaged_package/__init__.py").write_text(LOUD)
    (place.site / "damaged_package/hardpoint.json").write_text("{{{")
    points = {"hardpoint.kv_layout.v1": {"torn": "damaged_package:create"}}
    write_metadata({"name": "torn-manifest", "version": "1.0", "entry-points": points}, place.site)
    for name, text in (("torn-points", "[hardpoint.hooks.v1\nx = :"), ("noise", "\x00[]=\nnothing")):
        folder = write_metadata({"name": name, "version": "1.0"}, place.site)
        (folder / "entry_points.txt").write_text(text)


LATER = "hardpoint-core>=99"


@pytest.mark.parametrize(
    "command",
    [
        ("--version",),
        ("--help",),
        ("serve", "--help"),
        ("serve", "--help=plugins"),
        ("generate", "--help"),
        ("plugins", "list"),
        ("plugins", "list", "--json"),
    ],
    ids=" ".join,
)
def test_no_installed_fault_breaks_it(place: Place, command: tuple[str, ...]) -> None:
    """L12.9: neither another core's plugin nor one that ends the process at import is ever imported for it."""
    install_every_fault(place)
    done = place.run(*command)
    assert done.status == 0, done.err
    assert "Traceback" not in done.err
    assert not place.imported.exists(), place.imported.read_text()


def test_what_is_refused_is_listed_with_the_reason(place: Place) -> None:
    """L12.9, L12.11: seen, and never imported."""
    install_every_fault(place)
    told = place.run("plugins", "list").out
    assert f"it requires '{LATER}'" in told
    assert "written for API version 99 of 'scheduler'; this core speaks version 1" in told
    assert "unknown plugin kind 'flux_capacitor'" in told
    assert not place.imported.exists()


def test_help_names_what_is_installed(place: Place) -> None:
    """L12.16: choices come from metadata, so plugins need not be imported to be shown."""
    place.install("acme", "acme_parts", {KINDS[kind].group: "rivet" for kind in ("scheduler", "hash", "platform")})
    told = " ".join(place.run("serve", "--help").out.split())
    assert "installed: fcfs, policy, priority, rivet" in told
    assert "installed: rivet, sha256, xxhash" in told
    assert "installed: cpu, cuda, rivet, rocm" in told
    assert not place.imported.exists()


def test_an_unknown_name_lists_what_is_installed(place: Place, tiny: Path) -> None:
    """L12.16, L12.17: any name is looked for among the installed; none is fixed in the parser."""
    place.install("acme", "acme_parts", {KINDS["scheduler"].group: "rivet"})
    said = place.run("generate", tiny, *FEW, "--scheduler", "rivett").complaint()
    assert "no scheduler plugin 'rivett' (did you mean 'rivet'?)" in said
    assert "installed: fcfs, policy, priority, rivet" in said
    assert not place.imported.exists()


@pytest.mark.slow
def test_a_dtype_of_somebody_reaches_those_who_judge_it(place: Place, tiny: Path) -> None:
    """L12.17: the core has no list of KV dtypes; the attention backends say that none of them has this one."""
    done = place.run("generate", tiny, *FEW, "--kv-cache-dtype", "acme_fp3")
    assert done.status == 1
    assert "no attention backend can serve this model" in done.err
    assert "torch_reference  KV cache dtype acme_fp3 is not one of" in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize("state", ["broken", pytest.param("absent", marks=pytest.mark.slow)])
def test_a_broken_platform_never_becomes_the_cpu(place: Place, tiny: Path, state: str) -> None:
    """L12.1: broken hardware stops the start; absent hardware leaves the fallback, and so does asking for it."""
    install_fake_platform(place.site)
    done = place.run("generate", tiny, *FEW, **{STATE_VARIABLE: state})
    if state == "absent":
        assert done.status == 0, done.err
        return
    said = done.complaint()
    assert "platform fake is broken" in said
    assert "the fake device is broken" in said
    assert "name another platform with --platform" in said
    assert done.out == ""
    assert place.run("generate", tiny, *FEW, "--platform", "cpu", **{STATE_VARIABLE: state}).status == 0


def test_a_platform_that_cannot_be_imported_is_broken_too(place: Place, tiny: Path) -> None:
    """L12.1: the loudest of failures is not swallowed either."""
    place.install("acme", "acme_parts", {KINDS["platform"].group: "rivet"})
    said = place.run("generate", tiny, *FEW).complaint()
    assert "platform rivet is broken" in said
    assert "SystemExit: 7" in said


def test_two_platforms_wait_for_a_name(place: Place, tiny: Path) -> None:
    """L12.19, R12.26: neither is taken for having been found first."""
    install_fake_platform(place.site)
    points = {"hardpoint.platform.v1": {"other": "hardpoint.testing.fake_platform:create"}}
    write_metadata({"name": "other-device", "version": "1.0", "entry-points": points}, place.site)
    said = place.run("generate", tiny, *FEW).complaint()
    assert "several platforms are available: fake, other; name one with --platform" in said


def test_a_name_on_the_list_that_is_nobodys_stops_the_start(place: Place, tiny: Path) -> None:
    """L12.2: in the environment as on the command line."""
    place.install("acme", "acme_parts", {KINDS["hooks"].group: "rivet"})
    for done in (
        place.run("generate", tiny, *FEW, "--plugins", "rivte"),
        place.run("generate", tiny, *FEW, HARDPOINT_PLUGINS="rivte"),
    ):
        assert "'rivte' on the list HARDPOINT_PLUGINS is not installed (did you mean 'rivet'?)" in done.complaint()
    assert not place.imported.exists()


def test_the_doctor_shows_where_doubles_lie(place: Place) -> None:
    """L12.2, L12.18: stale metadata beside the real ones, with both paths, and two owners of one name."""
    place.install("acme", "acme_parts", {KINDS["hash"].group: "rivet"})
    stale = write_metadata({"name": "acme", "version": "0.9"}, place.site)
    for name in ("one", "other"):
        place.install(f"{name}-rival", f"{name}_parts", {KINDS["hooks"].group: "rivet"})
    done = place.run("plugins", "doctor")
    assert done.status == 1
    assert str(stale) in done.out
    assert str(place.site / "acme-1.0.dist-info") in done.out
    assert "several plugins claim hooks:rivet" in done.out


@pytest.mark.slow
def test_single_plugins_are_told_to_those_who_ask(place: Place, tiny: Path) -> None:
    """R12.7 as amended: one line each at DEBUG for every kind, the sum of a process at INFO."""
    told = {level: place.run("generate", tiny, *FEW, "--log-level", level).err for level in ("DEBUG", "INFO")}
    for text in ("plugin scheduler:fcfs (hardpoint-scheduling", "plugin platform:cpu (hardpoint-cpu"):
        assert text in told["DEBUG"]
        assert text not in told["INFO"]
    assert all("plugins in process" in text for text in told.values())
