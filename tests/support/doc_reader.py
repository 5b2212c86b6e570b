"""Somebody who follows a page of the documentation: writes its files, runs its commands, in order, in an empty folder.

The reader has an environment of their own, so what a page installs, editable packages too, reaches nobody else.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

from doc_blocks import Block, blocks_of
from partial_environment import make_environment
from workspace import ROOT

__all__ = ["TUTORIALS", "Reader", "page_id", "runs_something", "story"]

TUTORIALS = ("add-a-model", "write-an-attention-backend", "write-a-quantization-method", "ship-an-endpoint")
"""Pages below ``docs/extend`` that go from the scaffold, or from nothing, to a package that passes its kit."""

START_S = 240
STOP_S = 60
_COMMANDS = {"hardpoint": "hardpoint.cli", "pip": "pip"}


def page_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def story(page: Path, *, slow: bool) -> list[Block]:
    """The page's steps; without ``slow`` only those that take a moment."""
    return [block for block in blocks_of(page) if block.is_step and (slow or not block.is_slow)]


def runs_something(page: Path, *, slow: bool) -> bool:
    steps = story(page, slow=slow)
    return any(block.is_slow if slow else block.words for block in steps)


class Reader:
    """Somebody with an environment activated. ``desk`` is the folder they work in."""

    def __init__(self, folder: Path) -> None:
        self.desk = folder / "desk"
        self.desk.mkdir()
        self.python = make_environment(folder / "environment", [])
        self.server: subprocess.Popen[bytes] | None = None
        self.log = folder / "server.log"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        programs = self.python.parent
        for command, module in _COMMANDS.items():
            script = programs / command
            script.write_text(f'#!/bin/sh\nexec "{self.python}" -m {module} "$@"\n', encoding="utf-8")
            script.chmod(0o755)
        settings = {name: value for name, value in os.environ.items() if not name.startswith("HARDPOINT_")}
        self.environment = {
            **settings,
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "PIP_NO_DEPS": "1",
            # pip reads this one upside down: 0 means that the build environment is not isolated.
            "PIP_NO_BUILD_ISOLATION": "0",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }

    def follow(self, block: Block) -> str:
        """What the block printed. Raises ``AssertionError`` when it fails."""
        if block.file is not None:
            path = self.desk / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
        if "server" in block.words:
            self.stop()
            self.start(block)
        elif "test" in block.words:
            return self.run(block)
        return ""

    def run(self, block: Block) -> str:
        text = re.sub(r"(127\.0\.0\.1|localhost):8000", rf"\1:{self.port}", block.text)
        program = (
            [str(self.python), "-c", text] if block.language == "python" else ["bash", "-euo", "pipefail", "-c", text]
        )
        done = subprocess.run(
            program, cwd=self.desk, env=self.environment, capture_output=True, text=True, timeout=START_S, check=False
        )
        assert done.returncode == 0, f"{block.where} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

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
