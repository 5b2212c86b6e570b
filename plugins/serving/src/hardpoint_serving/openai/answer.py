"""What chat and completions share when they turn engine outputs into an answer."""

from __future__ import annotations

from dataclasses import dataclass, field

from hardpoint.errors import InvalidRequestError
from hardpoint.interfaces.engine import CompletionOutput, RequestOutput
from hardpoint.interfaces.request import FinishReason
from hardpoint_serving.openai.wire import Usage

__all__ = ["Counter", "RequestFailed", "finish_reason", "raise_on_error"]


class RequestFailed(InvalidRequestError):
    """The engine ended this one request with an error; its text is written for clients."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="request_failed", status=500)


def raise_on_error(output: RequestOutput) -> None:
    """Raise ``RequestFailed`` if any sequence of ``output`` ended with an error."""
    if any(sequence.finish_reason is FinishReason.ERROR for sequence in output.outputs):
        raise RequestFailed(output.error or "the request failed in the engine")


def finish_reason(sequence: CompletionOutput) -> str:
    return str(sequence.finish_reason or FinishReason.ABORT)


@dataclass(slots=True)
class Counter:
    """Tokens of one request: prompts are counted once, generated tokens per sequence (prompt index, index)."""

    prompts: dict[int, tuple[int, int]] = field(default_factory=dict)
    generated: dict[tuple[int, int], int] = field(default_factory=dict)

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        self.prompts[prompt_index] = (len(output.prompt_token_ids), output.num_cached_tokens)
        for sequence in output.outputs:
            self.generated[prompt_index, sequence.index] = sequence.num_generated_tokens

    def usage(self) -> Usage:
        return Usage.of(
            sum(count for count, _ in self.prompts.values()),
            sum(self.generated.values()),
            sum(cached for _, cached in self.prompts.values()),
        )
