"""Typed messages between processes: the codec, private addresses, and memory to hand over.

Nothing here can run code from data. Plugins may use everything exported here.
"""

from __future__ import annotations

from hardpoint.ipc.codec import CodecError, Decoder, encode
from hardpoint.ipc.endpoints import create_runtime_dir, private_ipc_address
from hardpoint.ipc.memory import anonymous_file

__all__ = ["CodecError", "Decoder", "anonymous_file", "create_runtime_dir", "encode", "private_ipc_address"]
