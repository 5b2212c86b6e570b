"""One format, one variable."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from hardpoint.errors import ConfigError
from hardpoint.logging import LEVEL_VARIABLE, configure_logging, get_logger


@pytest.fixture(autouse=True)
def restore(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    logger = logging.getLogger("hardpoint")
    before = (logger.level, list(logger.handlers))
    monkeypatch.delenv(LEVEL_VARIABLE, raising=False)
    yield
    logger.setLevel(before[0])
    logger.handlers[:] = before[1]


@contextmanager
def bare_root() -> Iterator[None]:
    """No root handlers (pytest adds some), as in a process of ours."""
    root = logging.getLogger()
    before = list(root.handlers)
    root.handlers[:] = []
    yield
    root.handlers[:] = before


def test_lines_carry_process_name_id_and_logger(capsys: pytest.CaptureFixture[str]) -> None:
    with bare_root():
        configure_logging("api 100%")
        get_logger("hardpoint_serving.app").info("ready")
    line = capsys.readouterr().err
    assert f"INFO    api 100%[{os.getpid()}] hardpoint.serving.app: ready" in line


def test_configuring_again_replaces(capsys: pytest.CaptureFixture[str]) -> None:
    with bare_root():
        configure_logging("first")
        configure_logging("second")
        get_logger("x").warning("once")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "second[" in lines[0]


def test_the_variable_sets_the_level_and_an_argument_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("hardpoint")
    configure_logging("x")
    assert logger.level == logging.INFO
    monkeypatch.setenv(LEVEL_VARIABLE, "debug")
    configure_logging("x")
    assert logger.level == logging.DEBUG
    configure_logging("x", "ERROR")
    assert logger.level == logging.ERROR


def test_an_unknown_level_names_the_variable_and_the_choices() -> None:
    with pytest.raises(ConfigError, match="'LOUD' is unknown; set HARDPOINT_LOG_LEVEL to one of DEBUG, INFO"):
        configure_logging("x", "loud")


def test_an_application_with_its_own_handlers_keeps_them() -> None:
    with bare_root():
        logging.getLogger().addHandler(logging.NullHandler())
        configure_logging("x", "DEBUG")
    assert logging.getLogger("hardpoint").handlers == []
    assert logging.getLogger("hardpoint").level == logging.DEBUG


@pytest.mark.parametrize(
    ("name", "logger"),
    [("hardpoint.process", "hardpoint.process"), ("hardpoint_x.y", "hardpoint.x.y"), ("acme", "hardpoint.acme")],
)
def test_every_logger_hangs_below_one_name(name: str, logger: str) -> None:
    assert get_logger(name).name == logger
