"""The kit for hash functions accepts a sound one and rejects each mutant."""

from __future__ import annotations

import hashlib
import zlib
from pathlib import Path
from typing import ClassVar

import pytest

from hardpoint.interfaces import BlockHash, HashContext, HashFunction, NoOptions, plugin
from hardpoint.testing.hash_suite import HashSuite
from hardpoint.testing.suite_runner import run_suite


class Blake:
    name = "blake2b"
    cryptographic = True

    def __call__(self, parent: BlockHash, token_bytes: bytes, extra_keys: bytes) -> BlockHash:
        size = len(token_bytes).to_bytes(4, "big")
        return BlockHash(hashlib.blake2b(parent + size + token_bytes + extra_keys, digest_size=32).digest())


@plugin("hash")
def create(ctx: HashContext, options: NoOptions) -> HashFunction:
    return Blake()


def make_suite(kind: type[Blake]) -> type[HashSuite]:
    class Suite(HashSuite):
        def create_hash(self, ctx: HashContext) -> HashFunction:
            return kind()

    return Suite


class TestBlake(make_suite(Blake)):  # type: ignore[misc]
    pass


class NotChained(Blake):
    def __call__(self, parent: BlockHash, token_bytes: bytes, extra_keys: bytes) -> BlockHash:
        return super().__call__(BlockHash(b""), token_bytes, extra_keys)


class WithoutExtraKeys(Blake):
    def __call__(self, parent: BlockHash, token_bytes: bytes, extra_keys: bytes) -> BlockHash:
        return super().__call__(parent, token_bytes, b"")


class Joins(Blake):
    def __call__(self, parent: BlockHash, token_bytes: bytes, extra_keys: bytes) -> BlockHash:
        return BlockHash(hashlib.sha256(parent + token_bytes + extra_keys).digest())


class Checksum(Blake):
    def __call__(self, parent: BlockHash, token_bytes: bytes, extra_keys: bytes) -> BlockHash:
        whole = super().__call__(parent, token_bytes, extra_keys)
        return BlockHash(bytes(4) + (zlib.crc32(whole) % 50_000).to_bytes(4, "big"))


class Salted(Blake):
    """Differs from one object to the next, as a random seed would."""

    def __call__(self, parent: BlockHash, token_bytes: bytes, extra_keys: bytes) -> BlockHash:
        return super().__call__(parent, token_bytes, extra_keys + id(self).to_bytes(8, "big"))


class Boasts(Blake):
    def __call__(self, parent: BlockHash, token_bytes: bytes, extra_keys: bytes) -> BlockHash:
        return BlockHash(super().__call__(parent, token_bytes, extra_keys)[:8])


MUTANTS: dict[type[Blake], str] = {
    NotChained: "test_hashes_are_chained",
    WithoutExtraKeys: "test_every_input_counts",
    Joins: "test_tokens_and_extra_keys_are_kept_apart",
    Checksum: "test_many_blocks_do_not_collide",
    Boasts: "test_what_it_says_of_itself",
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_mutant_fails(mutant: type[Blake]) -> None:
    assert MUTANTS[mutant] in run_suite(make_suite(mutant), only=MUTANTS[mutant]).failed


def test_a_function_that_differs_between_objects_fails() -> None:
    kept: list[HashFunction] = []

    class Suite(HashSuite):
        def create_hash(self, ctx: HashContext) -> HashFunction:
            # Kept alive, so that no two have one address.
            kept.append(Salted())
            return kept[-1]

    assert "test_equal_input_gives_equal_bytes" in run_suite(Suite).failed


@pytest.mark.slow
def test_a_function_that_differs_between_processes_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = (
        "class Own:\n"
        "    name = 'own'\n"
        "    def __call__(self, parent, tokens, extra):\n"
        "        return hash((parent, tokens, extra)).to_bytes(8, 'big', signed=True)\n"
        "def create(ctx, options):\n"
        "    return Own()\n"
    )
    (tmp_path / "own_hash_plugin.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))

    class Suite(HashSuite):
        entry: ClassVar[str | None] = "own_hash_plugin:create"

        def create_hash(self, ctx: HashContext) -> HashFunction:
            return Blake()

    failed = run_suite(Suite, only="test_all_processes_agree").failed
    assert "hash the same block differently" in failed["test_all_processes_agree"]
