"""``/v1/chat/completions``: whole answers and streams of chunks."""

from __future__ import annotations

from collections.abc import AsyncIterator

from msgspec import UNSET

from hardpoint.interfaces.engine import CompletionOutput, PositionLogprobs, RequestOutput
from hardpoint_serving.openai.answer import Counter, finish_reason, raise_on_error
from hardpoint_serving.openai.protocol import ChatRequest, StreamOptions
from hardpoint_serving.openai.translate import Identity
from hardpoint_serving.openai.wire import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprob,
    ChatLogprobs,
    ChatMessage,
    ChatTopLogprob,
    Delta,
)
from hardpoint_serving.outputs import Numbered, OutputStream
from hardpoint_serving.sse import event

__all__ = ["chat_completion", "chat_frames"]


def _logprobs(positions: tuple[PositionLogprobs, ...] | None) -> ChatLogprobs | None:
    if positions is None:
        return None
    return ChatLogprobs([_position(position) for position in positions])


def _position(position: PositionLogprobs) -> ChatLogprob:
    chosen = position.chosen
    top = [ChatTopLogprob(entry.text, entry.logprob, list(entry.token_bytes)) for entry in position.top]
    return ChatLogprob(chosen.text, chosen.logprob, list(chosen.token_bytes), top)


def chat_completion(request: ChatRequest, identity: Identity, outputs: list[Numbered]) -> ChatCompletion:
    """The whole answer. Raises ``RequestFailed`` when a sequence ended with an error."""
    counter = Counter()
    choices: dict[int, ChatChoice] = {}
    prompt_ids: tuple[int, ...] = ()
    for _, output in outputs:
        raise_on_error(output)
        counter.add(0, output)
        prompt_ids = output.prompt_token_ids
        for sequence in output.outputs:
            choices[sequence.index] = ChatChoice(
                index=sequence.index,
                message=ChatMessage("assistant", sequence.text),
                logprobs=_logprobs(sequence.logprobs),
                finish_reason=finish_reason(sequence),
                stop_reason=sequence.stop_reason,
                token_ids=sequence.token_ids if request.return_token_ids else UNSET,
            )
    return ChatCompletion(
        id=identity.id,
        created=identity.created,
        model=identity.model,
        system_fingerprint=identity.system_fingerprint,
        choices=[choices[index] for index in sorted(choices)],
        usage=counter.usage(),
        prompt_token_ids=prompt_ids if request.return_token_ids else UNSET,
    )


async def chat_frames(request: ChatRequest, identity: Identity, stream: OutputStream) -> AsyncIterator[bytes]:
    """Per sequence a chunk with the role, chunks of text, and one with the finish reason; then the usage."""
    writer = _ChunkWriter(request, identity)
    async for _, output in stream:
        raise_on_error(output)
        for frame in writer.frames(output):
            yield frame
    if writer.include_usage:
        yield writer.usage_frame()


class _ChunkWriter:
    def __init__(self, request: ChatRequest, identity: Identity) -> None:
        options = request.stream_options or StreamOptions()
        self.include_usage = bool(options.include_usage)
        self._continuous = self.include_usage and bool(options.continuous_usage_stats)
        self._with_ids = bool(request.return_token_ids)
        self._identity = identity
        self._counter = Counter()
        self._started: set[int] = set()
        self._finished: set[int] = set()

    def frames(self, output: RequestOutput) -> list[bytes]:
        self._counter.add(0, output)
        frames = []
        for sequence in output.outputs:
            if sequence.index in self._finished:
                continue
            if sequence.index not in self._started:
                self._started.add(sequence.index)
                choice = ChatChunkChoice(sequence.index, Delta("assistant", ""))
                frames.append(self._frame(choice, output.prompt_token_ids if self._with_ids else None))
            if sequence.text or sequence.logprobs or (self._with_ids and sequence.token_ids):
                frames.append(self._frame(self._text(sequence)))
            if sequence.finish_reason is not None:
                self._finished.add(sequence.index)
                frames.append(self._frame(self._end(sequence)))
        return frames

    def _text(self, sequence: CompletionOutput) -> ChatChunkChoice:
        return ChatChunkChoice(
            sequence.index,
            Delta(content=sequence.text),
            None if sequence.logprobs is None else _logprobs(sequence.logprobs),
            token_ids=sequence.token_ids if self._with_ids else UNSET,
        )

    def _end(self, sequence: CompletionOutput) -> ChatChunkChoice:
        return ChatChunkChoice(
            sequence.index, Delta(), finish_reason=finish_reason(sequence), stop_reason=sequence.stop_reason
        )

    def _frame(self, choice: ChatChunkChoice, prompt_ids: tuple[int, ...] | None = None) -> bytes:
        identity = self._identity
        usage = None if self.include_usage else UNSET
        return event(
            ChatChunk(
                id=identity.id,
                created=identity.created,
                model=identity.model,
                system_fingerprint=identity.system_fingerprint,
                choices=[choice],
                usage=self._counter.usage() if self._continuous else usage,
                prompt_token_ids=UNSET if prompt_ids is None else prompt_ids,
            )
        )

    def usage_frame(self) -> bytes:
        identity = self._identity
        return event(
            ChatChunk(
                id=identity.id,
                created=identity.created,
                model=identity.model,
                system_fingerprint=identity.system_fingerprint,
                choices=[],
                usage=self._counter.usage(),
            )
        )
