"""``hardpoint plugins list``: what is installed, from metadata alone. Imports no plugin."""

from __future__ import annotations

import argparse

from hardpoint.plugins.selection_arguments import add_selection, print_report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_selection(parser)


def run(arguments: argparse.Namespace) -> int:
    """Always 0: a list judges nothing."""
    print_report(arguments, probe=False)
    return 0
