"""Plugin kind ``cli_command``: a subcommand of ``hardpoint``, imported only when it is the one called."""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod


class CliCommand(ABC):
    help: str = ""

    @abstractmethod
    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    @abstractmethod
    def run(self, arguments: argparse.Namespace) -> int:
        """Exit status."""
