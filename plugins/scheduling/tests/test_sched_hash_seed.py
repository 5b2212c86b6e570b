"""Hash algorithms and the seed of the first block (spec 11 section 1), within one process and between processes."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from itertools import combinations

import pytest

from hardpoint.errors import PluginNotFoundError
from hardpoint.interfaces import BlockHash, HashContext, HashFunction, NoOptions
from hardpoint.interfaces.plugin import ProcessRole
from hardpoint_scheduling.kv_cache.hash_seed import (
    ProcessSeed,
    environment_seed,
    is_cryptographic,
    load_hash_function,
    resolve_hash,
    root_hash,
)
from hardpoint_scheduling.kv_cache.hashing import Sha256, create_sha256
from hardpoint_scheduling.kv_cache.xxhash128 import Xxh3, create_xxhash


class WeakHash:
    """Declares nothing about cryptography."""

    name = "weak"

    def __call__(self, parent: BlockHash, token_bytes: bytes, extra_keys: bytes) -> BlockHash:
        return Sha256()(parent, token_bytes, extra_keys)


WEAK: HashFunction = WeakHash()  # type: ignore[assignment]
ALGORITHMS: tuple[HashFunction, ...] = (Sha256(), Xxh3(), WEAK)


def test_the_seed_is_the_operators_if_given() -> None:
    """R11.7: for every algorithm."""
    for function in ALGORITHMS:
        assert root_hash(function, "1") == root_hash(function, "1", process=ProcessSeed())
        assert root_hash(function, "1") != root_hash(function, "2")


def test_a_cryptographic_hash_has_a_fixed_seed() -> None:
    """R11.8: whatever the process draws for others."""
    assert root_hash(Sha256(), None, process=ProcessSeed()) == root_hash(Sha256(), None, process=ProcessSeed())
    assert len(root_hash(Sha256(), None)) == 32


def test_another_hash_gets_a_seed_drawn_per_process() -> None:
    """R11.9, P11.3: 32 random bytes, so nobody computes colliding blocks ahead; equal for all who ask here."""
    process = ProcessSeed()
    assert len(process.secret) == 32
    for function in (Xxh3(), WEAK):
        assert root_hash(function, None, process=process) == root_hash(function, None, process=process)
        assert root_hash(function, None, process=process) != root_hash(function, None, process=ProcessSeed())
        assert root_hash(function, None) == root_hash(function, None)


def test_the_warning_comes_once(caplog: pytest.LogCaptureFixture) -> None:
    """R11.10, P11.2: one per process and algorithm; none with a seed, none for a cryptographic algorithm."""
    process = ProcessSeed()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            root_hash(Xxh3(), None, process=process)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "'xxhash' is not cryptographic and PYTHONHASHSEED is not set" in caplog.text
    assert "cannot be shared between instances" in caplog.text
    root_hash(WEAK, None, process=process)
    assert len(caplog.records) == 2
    caplog.clear()
    root_hash(Xxh3(), "7", process=ProcessSeed())
    root_hash(Sha256(), None, process=ProcessSeed())
    assert not caplog.records


def test_an_undeclared_hash_counts_as_not_cryptographic() -> None:
    """R11.12: and so does one that says anything but True."""
    assert is_cryptographic(Sha256())
    assert not is_cryptographic(Xxh3())
    assert not is_cryptographic(WEAK)

    class Talkative(WeakHash):
        cryptographic = "very"

    assert not is_cryptographic(Talkative())  # type: ignore[arg-type]


def test_engines_with_different_plugins_share_no_blocks() -> None:
    """L12.22: cache keys ignore plugin kernels. The operator's seed does not undo the difference."""
    for function in ALGORITHMS:
        for seed in (None, "1"):
            roots = {root_hash(function, seed, fingerprint=fingerprint) for fingerprint in ("", "a", "b")}
            assert len(roots) == 3
            assert root_hash(function, seed, fingerprint="a") == root_hash(function, seed, fingerprint="a")


def test_pythons_own_random_setting_is_no_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """R11.7."""
    for text, seed in (("random", None), ("", None), ("0", "0"), ("42", "42")):
        monkeypatch.setenv("PYTHONHASHSEED", text)
        assert environment_seed() == seed
    monkeypatch.delenv("PYTHONHASHSEED")
    assert environment_seed() is None


def test_the_resolved_value_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """R11.11: a change of the environment after that reaches nobody."""
    monkeypatch.setenv("PYTHONHASHSEED", "11")
    resolved = resolve_hash(None, "sha256")
    monkeypatch.setenv("PYTHONHASHSEED", "12")
    assert resolved.seed == "11"
    assert resolved.hasher(4).root == resolved.hasher(16).root == resolved.root
    assert resolved.root == root_hash(Sha256(), "11")
    assert resolve_hash(None, "sha256").root != resolved.root


def test_the_plugin_factories_and_the_way_without_plugins() -> None:
    """R11.12."""
    context = HashContext(name="x", api_version=1, roles=frozenset({ProcessRole.ENGINE}))
    made = [create_sha256(context, NoOptions()), create_xxhash(context, NoOptions())]
    assert [(function.name, function.cryptographic) for function in made] == [("sha256", True), ("xxhash", False)]
    assert isinstance(load_hash_function(None, "sha256", None), Sha256)
    with pytest.raises(PluginNotFoundError, match="'xxhash'"):
        load_hash_function(None, "xxhash", None)


def test_known_value_of_xxhash_does_not_drift() -> None:
    """R11.6: canonical bytes, so the value is written down."""
    found = Xxh3()(BlockHash(bytes(32)), b"\1\0\0\0\2\0\0\0", b"extra")
    assert found.hex() == "f04f5beeb4a9a373a9e847d009c4e440"
    assert len(found) == 16


_PRINT_HASH = """
import sys
import numpy as np
from hardpoint.interfaces import EngineRequest, SamplingParams
from hardpoint_scheduling.kv_cache.hash_seed import environment_seed, root_hash
from hardpoint_scheduling.kv_cache.hashing import ChainedHasher, Sha256
from hardpoint_scheduling.kv_cache.xxhash128 import Xxh3

ids = np.arange(8, dtype=np.int32)
record = EngineRequest(request_id="r", prompt_token_ids=ids, sampling=SamplingParams())
for function in (Sha256(), Xxh3()):
    found = []
    ChainedHasher(function, 4, root_hash(function, environment_seed())).extend(record, ids, found)
    print(found[-1].hex())
"""


def hashes_elsewhere(seed: str | None) -> tuple[str, str]:
    """The last hash of one prompt with ``sha256`` and with ``xxhash``, computed by a process of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    if seed is not None:
        environment["PYTHONHASHSEED"] = seed
    command = [sys.executable, "-c", _PRINT_HASH]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    strong, weak = done.stdout.split()
    return strong, weak


@pytest.mark.slow
def test_two_processes_agree_if_the_seed_is_set_or_the_algorithm_cryptographic_and_only_then() -> None:
    """I11.5, R11.7, R11.8, R11.9, P11.2."""
    unset, again, drawn = hashes_elsewhere(None), hashes_elsewhere(None), hashes_elsewhere("random")
    seeded, seeded_again, other = hashes_elsewhere("5"), hashes_elsewhere("5"), hashes_elsewhere("6")
    assert unset[0] == again[0] == drawn[0]
    assert len({unset[1], again[1], drawn[1]}) == 3
    assert seeded == seeded_again
    for one, two in combinations((unset, seeded, other), 2):
        assert not set(one) & set(two)
