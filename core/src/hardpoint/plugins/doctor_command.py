"""``hardpoint plugins doctor``: examines the installation, asking platforms for what they find."""

from __future__ import annotations

import argparse

from hardpoint.plugins.selection_arguments import add_selection, print_report

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_selection(parser)


def run(arguments: argparse.Namespace) -> int:
    """1 when there are problems."""
    return 1 if print_report(arguments, probe=True) else 0
