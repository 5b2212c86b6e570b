"""Values and files that no settings need: refused in one short line, whatever the reader makes of them."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from hardpoint.config import add_arguments, load_config
from hardpoint.errors import ConfigError

BOMB = "[&a [x,x,x,x,x,x,x,x,x,x], " + ", ".join(
    f"&{name} [{','.join([f'*{chr(ord(name) - 1)}'] * 10)}]" for name in "bcdefghi"
)
HOSTILE = {
    "digits": "9" * 5000,
    "hexadecimal": "0x" + "f" * 5000,
    "deep": "[" * 5000 + "]" * 5000,
    "unclosed": "[" * 3000,
    "itself": "&a [*a]",
    "bomb": BOMB + "]",
}


def load(*arguments: str) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser, with_server=True)
    load_config(parser.parse_args(["m", *arguments]), {})


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_value_is_a_fault_of_the_configuration(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="--plugin 'hash.none.key=.*the value cannot be read: ") as caught:
        load("--plugin", f"hash.none.key={text}")
    assert len(str(caught.value)) < 1000
    path = tmp_path / "c.yaml"
    path.write_text(f"plugins: {{hash: {{none: {{key: {text}}}}}}}\n")
    with pytest.raises(ConfigError, match="configuration file .* cannot be read: ") as caught:
        load("--config", str(path))
    assert len(str(caught.value)) < 1000


def test_a_long_value_is_cut_short_in_messages(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"server: {{port: {'x' * 5000}}}\nlog_level: {'y' * 5000}\ncache: {'z' * 5000}\n")
    with pytest.raises(ConfigError, match="'cache' must be a section") as caught:
        load("--config", str(path), "--block-size", "8")
    assert len(str(caught.value)) < 1000
    with pytest.raises(ConfigError, match=r"server\.port: .*given: 'xxx.*log_level: .*given: 'yyy") as caught:
        load("--config", str(path))
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("given", [f"{'9' * 400}GiB", "99999999999999999999999GiB", "1.0001KiB"])
def test_a_number_that_no_integer_of_a_machine_holds(given: str) -> None:
    with pytest.raises(ConfigError, match=r"cache\.kv_cache_memory: .* is not a whole number below 2\*\*63"):
        load("--kv-cache-memory", given)
    with pytest.raises(ConfigError, match=r"cache\.block_size: .*less than 2147483648"):
        load("--block-size", "99999999999999999999999")
