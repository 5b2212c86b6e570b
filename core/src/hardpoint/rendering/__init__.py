"""Chat messages as clients send them to checked plain data, the same for every chat renderer."""

from hardpoint.rendering.messages import normalize_messages, plain_copy

__all__ = ["normalize_messages", "plain_copy"]
