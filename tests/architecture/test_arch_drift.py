"""Folders on disk, installation lists, tool configuration, versions and entry-point groups tell one story."""

from __future__ import annotations

import re

import pytest
from packaging.requirements import Requirement

from hardpoint.plugins.kinds import KINDS
from workspace import ROOT, Distribution, core, distributions, root_config

PACKAGES = {distribution.package for distribution in distributions()}
EACH = pytest.mark.parametrize("distribution", distributions(), ids=lambda dist: dist.name)


def editable_lines() -> list[str]:
    lines = (ROOT / "requirements-dev.txt").read_text(encoding="utf-8").splitlines()
    return [line.removeprefix("-e ").split("[")[0].removeprefix("./") for line in lines if line.startswith("-e ")]


def source_roots() -> set[str]:
    return {f"{distribution.relative_folder}/src" for distribution in distributions()}


def test_every_folder_is_installed_editable_and_nothing_else_is() -> None:
    assert sorted(editable_lines()) == sorted([dist.relative_folder for dist in distributions()] + ["."])


def test_every_folder_is_a_distribution() -> None:
    folders = {path for parent in ("platforms", "plugins") for path in (ROOT / parent).iterdir() if path.is_dir()}
    assert folders == {distribution.folder for distribution in distributions()[1:]}


def test_ruff_and_mypy_know_every_source_root() -> None:
    tools = root_config()["tool"]
    assert set(tools["ruff"]["src"]) == source_roots() | {"tests/support"}
    mypy_roots = {path.removeprefix("$MYPY_CONFIG_FILE_DIR/") for path in tools["mypy"]["mypy_path"]}
    assert mypy_roots == source_roots() | {"tests/support"}


def test_import_linter_and_coverage_know_every_package() -> None:
    tools = root_config()["tool"]
    assert set(tools["importlinter"]["root_packages"]) == PACKAGES
    assert set(tools["coverage"]["run"]["source_pkgs"]) == PACKAGES


def test_the_contracts_name_every_package() -> None:
    contracts = {contract["id"]: contract for contract in root_config()["tool"]["importlinter"]["contracts"]}
    platforms = {dist.package for dist in distributions() if dist.relative_folder.startswith("platforms/")}
    families = PACKAGES - platforms - {"hardpoint", "hardpoint_torch_runtime", "hardpoint_testing_torch"}
    assert set(contracts["core-knows-nobody"]["forbidden_modules"]) == PACKAGES - {"hardpoint"} | {
        "torch",
        "transformers",
    }
    assert set(contracts["families-independent"]["modules"]) == families
    apart = platforms | {"hardpoint_testing_torch"}
    assert set(contracts["nobody-imports-a-platform"]["forbidden_modules"]) == apart
    assert set(contracts["nobody-imports-a-platform"]["source_modules"]) == PACKAGES - apart


def test_torch_free_families_are_those_that_do_not_require_torch() -> None:
    contracts = {contract["id"]: contract for contract in root_config()["tool"]["importlinter"]["contracts"]}
    torch_free = {
        dist.package
        for dist in distributions()[1:]
        if not {"torch", "hardpoint-torch-runtime"} & {Requirement(line).name for line in dist.project["dependencies"]}
    }
    assert set(contracts["torch-free-families"]["source_modules"]) == torch_free


@EACH
def test_names_follow_the_folder(distribution: Distribution) -> None:
    assert distribution.name == f"hardpoint-{distribution.folder.name.replace('_', '-')}"
    assert distribution.source.is_dir()


@EACH
def test_packages_are_typed_and_tested(distribution: Distribution) -> None:
    assert (distribution.source / "py.typed").is_file()
    assert (distribution.folder / "tests").is_dir()


@EACH
def test_versions_are_in_lock_step(distribution: Distribution) -> None:
    version = core().project["version"]
    assert distribution.project["version"] == version
    for line in distribution.project["dependencies"]:
        requirement = Requirement(line)
        if requirement.name.startswith("hardpoint"):
            assert str(requirement.specifier) == f"=={version}", line


def test_the_umbrella_requires_the_same_versions_and_leaves_nothing_out() -> None:
    project = root_config()["project"]
    lines = list(project["dependencies"])
    for extra in project["optional-dependencies"].values():
        lines += extra
    requirements = [Requirement(line) for line in lines]
    assert {requirement.name for requirement in requirements} >= {dist.name for dist in distributions()}
    ours = [requirement for requirement in requirements if requirement.name.startswith("hardpoint")]
    assert {str(requirement.specifier) for requirement in ours} == {f"=={project['version']}"}
    assert project["version"] == core().project["version"]


@EACH
def test_python_and_license_are_declared_alike(distribution: Distribution) -> None:
    for key in ("requires-python", "license"):
        assert distribution.project[key] == root_config()["project"][key]


@EACH
def test_every_entry_point_group_is_a_known_kind(distribution: Distribution) -> None:
    known = {kind.group for kind in KINDS.values()}
    assert set(distribution.entry_points) <= known
    for group in distribution.entry_points:
        assert re.fullmatch(r"hardpoint\.[a-z_]+\.v\d+", group)


@EACH
def test_entry_points_stay_within_their_own_package(distribution: Distribution) -> None:
    for names in distribution.entry_points.values():
        for target in names.values():
            assert target.split(":")[0].split(".")[0] == distribution.package
