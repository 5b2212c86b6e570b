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
    add("--model", metavar="MODEL", help="show which attention backend this model would get, and why no other")
    add("--device", metavar="TEXT", help='with --model: on such a device, absent or not, as "cuda sm_90 80GiB"')
    text = "with --model: a setting as of `hardpoint serve`, such as kv-cache-dtype=fp8; repeatable"
    add("--setting", action="append", default=[], metavar="NAME[=VALUE]", help=text)
    add("--admin-key-file", metavar="FILE", help="file with an admin key for --server (or HARDPOINT_ADMIN_KEY)")


def run(arguments: argparse.Namespace) -> int:
    """1 when there are problems. Raises ``ConfigError`` for flags that would have no effect, and as reading does."""
    # Deferred: what few calls need should cost the others nothing.
    if arguments.server is not None:
        from hardpoint.testing.server_doctor import print_server

        return 1 if print_server(arguments, color=wants_color()) else 0
    if arguments.admin_key_file is not None:
        raise ConfigError("--admin-key-file is for --server; name the server, or leave the key out")
    if arguments.model is not None:
        _refuse_idle(arguments, "--model shows one decision", "probe", "endpoints", "kind")
        from hardpoint.testing.doctor_attention import print_decision

        return 1 if print_decision(arguments, color=wants_color()) else 0
    _refuse_idle(arguments, "no --model is given", "device", "setting")
    if arguments.probe:
        from hardpoint.testing.probing import probe_in_child

        return 1 if print_report(arguments, probe=True, probe_workers=probe_in_child) else 0
    return 1 if print_report(arguments, probe=True) else 0


def _refuse_idle(arguments: argparse.Namespace, why: str, *flags: str) -> None:
    given = [flag for flag in flags if getattr(arguments, flag) not in (None, [], False)]
    if given:
        idle = ", ".join("KIND" if flag == "kind" else f"--{flag}" for flag in given)
        raise ConfigError(f"{why}, so {idle} would have no effect; leave it out")
