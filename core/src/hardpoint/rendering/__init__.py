"""Chat messages as clients send them to checked plain data, the same for every chat renderer."""

from hardpoint.rendering.messages import plain_copy, plain_messages

__all__ = ["plain_copy", "plain_messages"]
