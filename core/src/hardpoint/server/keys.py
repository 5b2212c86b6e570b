"""Where API keys come from, and when a server may run without one."""

from __future__ import annotations

import ipaddress
from pathlib import Path

from hardpoint.config import ServerConfig
from hardpoint.errors import ConfigError

__all__ = ["is_loopback", "load_keys", "require_safe_binding"]

_SHORTEST = 8


def load_keys(config: ServerConfig) -> tuple[str, ...]:
    """Keys given directly and in the key file, without duplicates. Raises ``ConfigError`` for an unusable one."""
    keys = list(config.api_key)
    if config.api_key_file is not None:
        try:
            if not Path(config.api_key_file).is_file():
                raise OSError("it is not a regular file")
            text = Path(config.api_key_file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--api-key-file {config.api_key_file!r} cannot be read: {error}") from None
        listed = [line for line in map(str.strip, text.splitlines()) if line and not line.startswith("#")]
        if not listed:
            raise ConfigError(f"--api-key-file {config.api_key_file!r} holds no key")
        keys += listed
    for key in keys:
        if len(key) < _SHORTEST or not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigError(f"an API key must be at least {_SHORTEST} printable ASCII characters without spaces")
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
