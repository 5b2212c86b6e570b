"""``hardpoint serve``: settings from flags, environment and file, then the server."""

from __future__ import annotations

import argparse
import importlib.util
import os

from hardpoint.config.arguments import add_arguments as add_setting_arguments
from hardpoint.config.arguments import load_config
from hardpoint.errors import ConfigError
from hardpoint.logging import configure_logging


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_setting_arguments(parser, with_server=True)


def run(arguments: argparse.Namespace) -> int:
    """Raises ``ConfigError`` and whatever stops the start."""
    configure_logging("api", getattr(arguments, "setting::log_level", None))  # Hooks come before the settings count.
    config = load_config(arguments, os.environ)
    configure_logging("api", config.log_level)
    missing = [name for name in ("fastapi", "uvicorn", "httptools") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"serving needs {', '.join(missing)}; install hardpoint-core[server]")
    from hardpoint.server.run import serve

    return serve(config, os.environ)
