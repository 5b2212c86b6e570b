"""``/v1/completions``: whole answers and streams, several prompts, echo and the older form of log-probabilities."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from msgspec import UNSET, UnsetType

from hardpoint.interfaces.engine import CompletionOutput, PositionLogprobs, RequestOutput
from hardpoint.interfaces.tokenizer import Tokenizer
from hardpoint_serving.openai.answer import Counter, finish_reason, raise_on_error
from hardpoint_serving.openai.protocol import CompletionRequest, StreamOptions
from hardpoint_serving.openai.translate import Identity
from hardpoint_serving.openai.wire import Completion, CompletionChoice, CompletionLogprobs, Usage
from hardpoint_serving.outputs import Numbered, OutputStream
from hardpoint_serving.sse import event

__all__ = ["CompletionWriter"]

Key = tuple[int, int]


@dataclass(slots=True)
class _Sequence:
    """Where one sequence stands. ``offset`` is the place of the next token in its whole text.

    It runs ahead of the text sent so far, part of which may be held back for a stop string.
    """

    offset: int = 0
    started: bool = False
    finished: bool = False


@dataclass(slots=True)
class CompletionWriter:
    """Builds the answer of one request. ``tokenizer`` spells echoed prompts that were given as ids."""

    request: CompletionRequest
    identity: Identity
    tokenizer: Tokenizer
    counter: Counter = field(default_factory=Counter)
    sequences: dict[Key, _Sequence] = field(default_factory=dict)

    def whole(self, outputs: list[Numbered]) -> Completion:
        """Raises ``RequestFailed`` when a sequence ended with an error."""
        choices: dict[int, CompletionChoice] = {}
        for prompt_index, output in outputs:
            raise_on_error(output)
            self.counter.add(prompt_index, output)
            for sequence in output.outputs:
                choice = self._choice(prompt_index, output, sequence, finish_reason(sequence))
                choices[choice.index] = choice
        return self._completion([choices[index] for index in sorted(choices)], self.counter.usage())

    async def frames(self, stream: OutputStream) -> AsyncIterator[bytes]:
        """Chunks of text per sequence, the last one with the finish reason; then the usage."""
        options = self.request.stream_options or StreamOptions()
        async for prompt_index, output in stream:
            raise_on_error(output)
            self.counter.add(prompt_index, output)
            for sequence in output.outputs:
                state = self._state(prompt_index, sequence)
                if state.finished:
                    continue
                state.finished = sequence.finish_reason is not None
                reason = finish_reason(sequence) if state.finished else None
                choice = self._choice(prompt_index, output, sequence, reason)
                if choice.text or choice.logprobs or reason or self.request.return_token_ids:
                    yield event(self._completion([choice], self._chunk_usage(options)))
        if options.include_usage:
            yield event(self._completion([], self.counter.usage()))

    def _chunk_usage(self, options: StreamOptions) -> Usage | UnsetType | None:
        if not options.include_usage:
            return UNSET
        return self.counter.usage() if options.continuous_usage_stats else None

    def _completion(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> Completion:
        return Completion(
            id=self.identity.id,
            created=self.identity.created,
            model=self.identity.model,
            system_fingerprint=self.identity.system_fingerprint,
            choices=choices,
            usage=usage,
        )

    def _state(self, prompt_index: int, sequence: CompletionOutput) -> _Sequence:
        return self.sequences.setdefault((prompt_index, sequence.index), _Sequence())

    def _choice(
        self, prompt_index: int, output: RequestOutput, sequence: CompletionOutput, reason: str | None
    ) -> CompletionChoice:
        state = self._state(prompt_index, sequence)
        first, state.started = not state.started, True
        with_ids = bool(self.request.return_token_ids)
        echoed = self._echo(output) if first and self.request.echo else ""
        logprobs = None
        if sequence.logprobs is not None or (echoed and output.prompt_logprobs is not None):
            logprobs = CompletionLogprobs([], [], [], [])
            if echoed and output.prompt_logprobs is not None:
                self._add_prompt(logprobs, output)
            state.offset = self._add(logprobs, sequence.logprobs or (), state.offset + len(echoed))
        return CompletionChoice(
            index=prompt_index * (self.request.n or 1) + sequence.index,
            text=echoed + sequence.text,
            logprobs=logprobs,
            finish_reason=reason,
            stop_reason=UNSET if reason is None else sequence.stop_reason,
            token_ids=sequence.token_ids if with_ids else UNSET,
            prompt_token_ids=output.prompt_token_ids if with_ids and first else UNSET,
        )

    def _echo(self, output: RequestOutput) -> str:
        if output.prompt is not None:
            return output.prompt
        return self.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=True)

    def _add_prompt(self, logprobs: CompletionLogprobs, output: RequestOutput) -> None:
        offset = 0
        for token_id, position in zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=False):
            if position is None:
                text = self.tokenizer.token_text(token_id)
                logprobs.tokens.append(text)
                logprobs.token_logprobs.append(None)
                logprobs.top_logprobs.append(None)
                logprobs.text_offset.append(offset)
                offset += len(text)
            else:
                offset = self._add(logprobs, (position,), offset)

    def _add(self, logprobs: CompletionLogprobs, positions: Sequence[PositionLogprobs], offset: int) -> int:
        """Append ``positions``; returns the offset behind them. Equal spellings keep the likelier entry."""
        for position in positions:
            chosen = position.chosen
            top: dict[str, float] = {}
            for entry in (*position.top, chosen):
                top.setdefault(entry.text, entry.logprob)
            logprobs.tokens.append(chosen.text)
            logprobs.token_logprobs.append(chosen.logprob)
            logprobs.top_logprobs.append(top)
            logprobs.text_offset.append(offset)
            offset += len(chosen.text)
        return offset
