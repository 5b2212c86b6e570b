"""Each page is followed as a reader would: its files written, its commands run, in order, in one empty folder.

Blocks are marked by their info strings, see ``doc_blocks``. What a page installs goes to a scratch folder.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from doc_blocks import Block, blocks_of, pages
from workspace import ROOT

START_S = 180
STOP_S = 60


def story(page: Path, *, slow: bool) -> list[Block]:
    return [block for block in blocks_of(page) if block.is_step and (slow or not block.is_slow)]


def runs_something(page: Path, *, slow: bool) -> bool:
    steps = story(page, slow=slow)
    return any(block.is_slow if slow else block.words for block in steps)


def page_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


class Reader:
    """Somebody with the environment activated, in an empty folder."""

    def __init__(self, folder: Path) -> None:
        self.desk = folder / "desk"
        self.desk.mkdir()
        self.site = folder / "site"
        self.server: subprocess.Popen[bytes] | None = None
        self.log = folder / "server.log"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        settings = {name: value for name, value in os.environ.items() if not name.startswith("HARDPOINT_")}
        self.environment = {
            **settings,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(self.site),
            "PIP_TARGET": str(self.site),
            "PIP_NO_DEPS": "1",
            # pip reads this one upside down: 0 means that the build environment is not isolated.
            "PIP_NO_BUILD_ISOLATION": "0",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }

    def follow(self, block: Block) -> None:
        if block.file is not None:
            path = self.desk / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
        if "server" in block.words:
            self.stop()
            self.start(block)
        elif "test" in block.words:
            self.run(block)

    def run(self, block: Block) -> None:
        text = re.sub(r"(127\.0\.0\.1|localhost):8000", rf"\1:{self.port}", block.text)
        program = (
            [sys.executable, "-c", text] if block.language == "python" else ["bash", "-euo", "pipefail", "-c", text]
        )
        done = subprocess.run(
            program, cwd=self.desk, env=self.environment, capture_output=True, text=True, timeout=START_S, check=False
        )
        assert done.returncode == 0, f"{block.where} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"

    def start(self, block: Block) -> None:
        with self.log.open("wb") as log:
            self.server = subprocess.Popen(
                # Without a shell in between, which would keep signals to itself.
                ["bash", "-c", block.text.replace("hardpoint serve", "exec hardpoint serve")],
                cwd=self.desk,
                env={**self.environment, "HARDPOINT_PORT": str(self.port)},
                stdout=log,
                stderr=log,
            )
        until = time.monotonic() + START_S
        while not self.is_ready():
            assert self.server.poll() is None, f"{block.where}: no server\n{self.log.read_text()}"
            assert time.monotonic() < until, f"{block.where}: not ready in time\n{self.log.read_text()}"
            time.sleep(0.2)

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:  # refused while nobody listens; an HTTP error is one, too
            return False

    def stop(self) -> None:
        if self.server is not None:
            server, self.server = self.server, None
            server.send_signal(signal.SIGTERM)
            assert server.wait(STOP_S) == 0, self.log.read_text()


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    someone = Reader(tmp_path)
    yield someone
    someone.stop()


@pytest.mark.parametrize("page", [page for page in pages() if runs_something(page, slow=False)], ids=page_id)
def test_quick_commands_work(page: Path, reader: Reader) -> None:
    for block in story(page, slow=False):
        reader.follow(block)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", [page for page in pages() if runs_something(page, slow=True)], ids=page_id)
def test_the_whole_page_works(page: Path, reader: Reader) -> None:
    for block in story(page, slow=True):
        reader.follow(block)


@pytest.mark.parametrize("page", pages(), ids=page_id)
def test_python_blocks_are_python(page: Path) -> None:
    for block in blocks_of(page):
        if block.language == "python":
            compile(block.text, block.where, "exec", dont_inherit=True)


def test_pages_are_found() -> None:
    assert {"README.md", "docs/quickstart.md", "docs/extend/write-a-plugin.md"} <= {page_id(page) for page in pages()}
    assert any(runs_something(page, slow=False) for page in pages())
    assert any("server" in block.words for page in pages() for block in blocks_of(page))


def test_an_unknown_mark_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("doc_blocks.ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("```bash tset\necho\n```\n")
    with pytest.raises(ValueError, match=r"page.md:2: the info string 'bash tset' is not understood"):
        blocks_of(page)
