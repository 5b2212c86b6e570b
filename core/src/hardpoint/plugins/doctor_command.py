"""``hardpoint plugins doctor``: examines the installation, or asks a running server."""

from __future__ import annotations

import argparse

from hardpoint.plugins.selection_arguments import add_selection, print_report, wants_color

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_selection(parser)
    add = parser.add_argument
    add("--probe", action="store_true", help="import attention_backend, custom_op and hooks plugins too, in a child")
    add("--server", metavar="URL", help="show what each process of this running server made of its plugins")
    add("--admin-key-file", metavar="FILE", help="file with an admin key for --server (or HARDPOINT_ADMIN_KEY)")


def run(arguments: argparse.Namespace) -> int:
    """1 when there are problems."""
    if arguments.server is not None:
        return _ask_server(arguments)
    if not arguments.probe:
        return 1 if print_report(arguments, probe=True) else 0
    from hardpoint.testing.probing import probe_in_child

    return 1 if print_report(arguments, probe=True, probe_workers=probe_in_child) else 0


def _ask_server(arguments: argparse.Namespace) -> int:
    from hardpoint.plugins.discovery import discover
    from hardpoint.plugins.render import painter
    from hardpoint.testing.server_doctor import admin_key, examine_server, render_live

    report = examine_server(arguments.server, admin_key(arguments.admin_key_file), discover())
    lines = render_live(report, painter(wants_color()), arguments.verbose, arguments.kind)
    print(report.to_json() if arguments.json else "\n".join(lines))
    return 1 if report.problems else 0
