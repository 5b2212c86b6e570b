"""Calls on a worker as messages. Only methods of the given table exist, on both sides; types come from the table."""

from __future__ import annotations

import traceback
import types
from collections.abc import Mapping
from typing import Any

import msgspec

from hardpoint.errors import ConfigError
from hardpoint.interfaces.worker import WORKER_RPC, RpcMethod
from hardpoint.ipc import CodecError, Decoder, encode
from hardpoint.process import LoadReport

__all__ = ["LOAD_REPORT", "PROCESS_RPC", "RpcCall", "RpcCodec", "RpcFailure", "RpcReply"]

LOAD_REPORT = "load_report"
"""Answered by a worker process itself, whatever its worker is."""

PROCESS_RPC: Mapping[str, RpcMethod] = {**WORKER_RPC, LOAD_REPORT: RpcMethod((), LoadReport)}
"""What a worker process answers."""


class RpcCall(msgspec.Struct, frozen=True, array_like=True):
    """``arguments`` stay encoded until :meth:`RpcCodec.arguments`. ``ranks`` are to run it, ``reply_ranks`` of them are
    to answer; None means all. A rank that need not answer still answers when it fails.
    """

    call_id: int
    method: str
    arguments: msgspec.Raw
    ranks: tuple[int, ...] | None = None
    reply_ranks: tuple[int, ...] | None = None


class RpcFailure(msgspec.Struct, frozen=True):
    """An exception in a worker: class name, message and the original traceback text."""

    kind: str
    message: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> RpcFailure:
        return cls(type(error).__name__, str(error), "".join(traceback.format_exception(error)))


class RpcReply(msgspec.Struct, frozen=True, array_like=True):
    """``result`` stays encoded until :meth:`RpcCodec.result`; it is empty when ``failure`` is set."""

    call_id: int
    rank: int
    method: str
    result: msgspec.Raw
    failure: RpcFailure | None = None


_NOTHING = msgspec.Raw(encode(None))


class RpcCodec:
    """Encoders and decoders for one table of methods. Build it once per process."""

    def __init__(self, methods: Mapping[str, RpcMethod] = PROCESS_RPC) -> None:
        self._arguments = {name: Decoder[tuple[Any, ...]](_arguments_type(rpc)) for name, rpc in methods.items()}
        self._results = {name: Decoder[Any](rpc.result) for name, rpc in methods.items()}
        self._counts = {name: len(rpc.arguments) for name, rpc in methods.items()}
        self._call = Decoder[RpcCall](RpcCall)
        self._reply = Decoder[RpcReply](RpcReply)

    def check(self, method: str, args: tuple[Any, ...] | None = None) -> None:
        """Raises ``ConfigError`` for a method outside the table or a wrong number of arguments."""
        if method not in self._counts:
            raise ConfigError(f"worker method {method!r} is not callable; allowed: {', '.join(sorted(self._counts))}")
        if args is not None and len(args) != self._counts[method]:
            raise ConfigError(f"worker method {method!r} takes {self._counts[method]} arguments, got {len(args)}")

    def encode_call(
        self,
        call_id: int,
        method: str,
        args: tuple[Any, ...] = (),
        *,
        ranks: tuple[int, ...] | None = None,
        reply_ranks: tuple[int, ...] | None = None,
    ) -> bytes:
        """Raises ``ConfigError`` as :meth:`check`, ``CodecError`` for an argument without a wire form."""
        self.check(method, args)
        return encode(RpcCall(call_id, method, msgspec.Raw(encode(args)), ranks, reply_ranks))

    def decode_call(self, data: bytes) -> RpcCall:
        """The envelope; the method is not checked yet, so that a refusal can be answered."""
        return self._call.decode(data)

    def arguments(self, call: RpcCall) -> tuple[Any, ...]:
        """Raises ``ConfigError`` for a method outside the table, ``CodecError`` for arguments of other types."""
        self.check(call.method)
        return self._arguments[call.method].decode(memoryview(call.arguments))

    def encode_result(self, call: RpcCall, rank: int, result: Any) -> bytes:
        return encode(RpcReply(call.call_id, rank, call.method, msgspec.Raw(encode(result))))

    def encode_failure(self, call: RpcCall, rank: int, failure: RpcFailure) -> bytes:
        return encode(RpcReply(call.call_id, rank, call.method, _NOTHING, failure))

    def decode_reply(self, data: bytes) -> RpcReply:
        return self._reply.decode(data)

    def result(self, reply: RpcReply) -> Any:
        """The typed result. Raises ``CodecError`` for another type, or for a method outside the table."""
        if reply.method not in self._results:
            raise CodecError(f"a worker answered for the unknown method {reply.method!r}")
        return self._results[reply.method].decode(memoryview(reply.result))


def _arguments_type(rpc: RpcMethod) -> Any:
    return types.GenericAlias(tuple, rpc.arguments)
