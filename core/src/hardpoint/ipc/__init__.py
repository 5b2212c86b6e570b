"""Typed messages between processes: the codec, remote calls on workers, private addresses and channels.

Nothing here can run code from data. Plugins may use everything exported here.
"""

from __future__ import annotations

from hardpoint.ipc.codec import CodecError, Decoder, encode
from hardpoint.ipc.endpoints import create_runtime_dir, private_ipc_address
from hardpoint.ipc.ring import RingReader, RingWriter
from hardpoint.ipc.rpc import RpcCall, RpcCodec, RpcFailure, RpcReply

__all__ = [
    "CodecError",
    "Decoder",
    "RingReader",
    "RingWriter",
    "RpcCall",
    "RpcCodec",
    "RpcFailure",
    "RpcReply",
    "create_runtime_dir",
    "encode",
    "private_ipc_address",
]
