"""Plugin kind ``io_processor``: turns a raw task input into engine prompts and engine outputs into a task result."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from hardpoint.interfaces.engine import Prompt, RequestOutput


class IOProcessor(ABC):
    @abstractmethod
    def parse(self, data: Any) -> Sequence[Prompt]:
        """Raise ``InvalidRequestError`` for data this processor does not understand."""

    @abstractmethod
    def finish(self, outputs: Sequence[RequestOutput]) -> Any:
        """JSON-able result from the outputs in the order of :meth:`parse`."""
