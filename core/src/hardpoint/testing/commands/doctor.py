"""``hardpoint plugins doctor``: examines the installation, or asks a running server."""

from __future__ import annotations

import argparse

from hardpoint.errors import ConfigError
from hardpoint.testing.commands import list as listing
from hardpoint.testing.commands.list import print_report, wants_color


def add_arguments(parser: argparse.ArgumentParser) -> None:
    listing.add_arguments(parser)
    add = parser.add_argument
    add("--probe", action="store_true", help="import attention_backend, custom_op and hooks plugins too, in a child")
    add("--server", metavar="URL", help="show what each process of this running server made of its plugins")
    add("--admin-key-file", metavar="FILE", help="file with an admin key for --server (or HARDPOINT_ADMIN_KEY)")


def run(arguments: argparse.Namespace) -> int:
    """1 when there are problems. Raises ``ConfigError`` for flags that would have no effect, and as reading does."""
    # Deferred: what few calls need should cost the others nothing.
    if arguments.server is not None:
        from hardpoint.testing.server_doctor import print_server

        return 1 if print_server(arguments, color=wants_color()) else 0
    if arguments.admin_key_file is not None:
        raise ConfigError("--admin-key-file is for --server; name the server, or leave the key out")
    if arguments.probe:
        from hardpoint.testing.probing import probe_in_child

        return 1 if print_report(arguments, probe=True, probe_workers=probe_in_child) else 0
    return 1 if print_report(arguments, probe=True) else 0
