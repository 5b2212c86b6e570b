"""Where API and admin keys come from, and when a server may run without one."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from pathlib import Path

from hardpoint.config import ServerConfig
from hardpoint.errors import ConfigError

_SHORTEST = 8


def load_keys(config: ServerConfig) -> tuple[str, ...]:
    """API keys given directly and in the key file, without duplicates. Raises ``ConfigError`` for an unusable one."""
    return read_keys(config.api_key, config.api_key_file, "--api-key-file", "an API key")


def load_admin_keys(config: ServerConfig) -> tuple[str, ...]:
    """The same for admin keys. Raises ``ConfigError`` also for one that is an API key as well."""
    keys = read_keys(config.admin_key, config.admin_key_file, "--admin-key-file", "an admin key")
    if not set(keys).isdisjoint(load_keys(config)):
        raise ConfigError(
            "a key is both an API key and an admin key, so that users of the API could use the admin routes; "
            "an admin key opens the other routes too: take it off --api-key and --api-key-file"
        )
    return keys


def read_keys(given: Iterable[str], path: str | None, option: str, title: str) -> tuple[str, ...]:
    """``given`` and the lines of the file ``path``. ``option`` and ``title`` are for the message of ``ConfigError``."""
    keys = list(given)
    if path is not None:
        try:
            if not Path(path).is_file():
                raise OSError("it is not a regular file")
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{option} {path!r} cannot be read: {error}") from None
        listed = [line for line in map(str.strip, text.splitlines()) if line and not line.startswith("#")]
        if not listed:
            raise ConfigError(f"{option} {path!r} holds no key")
        keys += listed
    for key in keys:
        if len(key) < _SHORTEST or not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigError(f"{title} must be at least {_SHORTEST} printable ASCII characters without spaces")
    return tuple(dict.fromkeys(keys))


def require_safe_binding(config: ServerConfig, keys: tuple[str, ...]) -> None:
    """Raises ``ConfigError`` for an address beyond loopback without a key, unless that is explicitly allowed."""
    if keys or config.allow_anonymous or is_loopback(config.host):
        return
    raise ConfigError(
        f"binding {config.host} without a key would let anybody use the model; set --api-key or --api-key-file, "
        "bind --host 127.0.0.1, or accept it with --allow-anonymous"
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``. A name other than ``localhost`` counts as reachable."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
