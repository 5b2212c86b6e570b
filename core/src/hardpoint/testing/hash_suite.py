"""Conformance of the plugin kind ``hash``: derive from :class:`HashSuite` and say how to create yours."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import ClassVar

import numpy as np
import pytest

from hardpoint.interfaces import BlockHash, HashContext, HashFunction
from hardpoint.roles import ProcessRole
from hardpoint.testing.plugin_suite import PluginSuite

__all__ = ["HashSuite"]

PARENT = BlockHash(bytes(range(32)))
_ELSEWHERE = """
import importlib, sys
from hardpoint.interfaces import HashContext, NoOptions, declaration_of
from hardpoint.roles import ProcessRole
module, _, name = sys.argv[1].partition(":")
factory = getattr(importlib.import_module(module), name)
declaration = declaration_of(factory)
options = declaration.options() if declaration is not None else NoOptions()
function = factory(HashContext("under-test", 1, frozenset({ProcessRole.ENGINE})), options)
print(function(bytes(range(32)), b"tokens", b"extra").hex())
"""


def tokens(*ids: int) -> bytes:
    """Token ids as the hasher passes them: little-endian int32."""
    return np.asarray(ids, dtype="<i4").tobytes()


class HashSuite(PluginSuite):
    """The contract of :class:`~hardpoint.interfaces.HashFunction`.

    ``entry`` is the factory's place, ``"module:name"``; with it the suite also compares processes.
    """

    kind: ClassVar[str] = "hash"
    torch_free: ClassVar[bool] = True
    entry: ClassVar[str | None] = None

    def create_hash(self, ctx: HashContext) -> HashFunction:
        """The function under test, as its factory makes it."""
        made: HashFunction = self.create_plugin(ctx)
        return made

    @pytest.fixture
    def function(self) -> HashFunction:
        return self.create_hash(HashContext("under-test", 1, frozenset({ProcessRole.ENGINE})))

    def test_equal_input_gives_equal_bytes(self, function: HashFunction) -> None:
        first = function(PARENT, tokens(1, 2, 3), b"x")
        assert type(first) is bytes
        assert len(first) >= 8, "fewer than 64 bits collide in any busy server"
        assert function(PARENT, tokens(1, 2, 3), b"x") == first
        again = self.create_hash(HashContext("under-test", 1, frozenset({ProcessRole.ENGINE})))
        assert again(PARENT, tokens(1, 2, 3), b"x") == first

    def test_every_input_counts(self, function: HashFunction) -> None:
        """R11.3: parent, tokens and extra keys, down to each bit."""
        base = function(PARENT, tokens(1, 2), b"ab")
        for index in range(32):
            changed = bytearray(PARENT)
            changed[index] ^= 1
            assert function(BlockHash(bytes(changed)), tokens(1, 2), b"ab") != base, f"byte {index} of the parent"
        for index in range(64):
            ids = bytearray(tokens(1, 2))
            ids[index // 8] ^= 1 << index % 8
            assert function(PARENT, bytes(ids), b"ab") != base, f"bit {index} of the tokens"
        for extra in (b"", b"a", b"b", b"ba", b"abc", b"ab\0"):
            assert function(PARENT, tokens(1, 2), extra) != base, f"extra keys {extra!r}"

    def test_the_order_of_tokens_counts(self, function: HashFunction) -> None:
        assert function(PARENT, tokens(1, 2), b"") != function(PARENT, tokens(2, 1), b"")

    def test_tokens_and_extra_keys_are_kept_apart(self, function: HashFunction) -> None:
        """Moving bytes from one to the other is another input."""
        whole = tokens(1, 2, 3, 4)
        found = {function(PARENT, whole[:cut], whole[cut:]) for cut in range(len(whole) + 1)}
        assert len(found) == len(whole) + 1

    def test_hashes_are_chained(self, function: HashFunction) -> None:
        """R11.3, P11.1: the function takes its own result as a parent, and an equal block elsewhere differs."""
        first, other = function(PARENT, tokens(1), b""), function(PARENT, tokens(2), b"")
        chained = function(first, tokens(9), b"")
        assert len(chained) == len(first)
        assert chained != function(other, tokens(9), b"")
        assert chained != function(PARENT, tokens(9), b"")

    def test_many_blocks_do_not_collide(self, function: HashFunction) -> None:
        """Small, similar blocks, which is what prompts are made of."""
        found = {function(PARENT, tokens(i % 200, i // 200, 0, 0), b"") for i in range(20_000)}
        assert len(found) == 20_000

    def test_bits_are_spread(self, function: HashFunction) -> None:
        """A flipped input bit flips about half of the output."""
        base = int.from_bytes(function(PARENT, tokens(0, 0), b""), "big")
        width = 8 * len(function(PARENT, b"", b""))
        flips = [
            (base ^ int.from_bytes(function(PARENT, tokens(1 << bit, 0), b""), "big")).bit_count() / width
            for bit in range(31)
        ]
        assert 0.35 < sum(flips) / len(flips) < 0.65

    def test_what_it_says_of_itself(self, function: HashFunction) -> None:
        """R11.12: undeclared counts as not cryptographic; a cryptographic function needs room for its strength."""
        assert function.name, "the function has no name"
        if getattr(function, "cryptographic", False):
            assert len(function(PARENT, b"", b"")) >= 16

    def test_all_processes_agree(self) -> None:
        """Schedulers, stores and other machines compare hashes; Python's own ``hash`` differs per process."""
        entry = self.entry
        if entry is None and self.plugin is not None:
            entry = self.runtime().plan.find("hash", self.plugin).entry_point
        if entry is None:
            pytest.skip("the author does not say where the factory is: set 'entry' or 'plugin'")
        found = set()
        for seed in ("1", "2"):
            environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
            arguments = [sys.executable, "-c", _ELSEWHERE, entry]
            done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=60, check=False)
            assert done.returncode == 0, done.stderr[-2_000:]
            found.add(done.stdout)
        assert len(found) == 1, "two processes hash the same block differently"
