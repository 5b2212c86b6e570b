"""Chat messages to a prompt: normalization, bounded template rendering, and ids in which text stays text."""

from hardpoint.rendering.chat import ChatRenderer
from hardpoint.rendering.messages import normalize_messages
from hardpoint.rendering.template import ChatTemplate

__all__ = ["ChatRenderer", "ChatTemplate", "normalize_messages"]
