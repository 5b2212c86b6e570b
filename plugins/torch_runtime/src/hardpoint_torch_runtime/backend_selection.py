"""Chooses the attention backend at start-up, so that no unsupported combination waits in the first forward (R5.5)."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hardpoint.errors import ConfigError, PluginError, PluginNotFoundError
from hardpoint.interfaces.attention import AttentionBackend, AttentionNeed, BlockSizeRule
from hardpoint_torch_runtime.attention_needs import bare_need, describe_need, layer_needs
from hardpoint_torch_runtime.layers.toolkit import LayerToolkit

__all__ = ["AttentionChoice", "AttentionSelector", "Verdict", "common_rule", "largest_fitting"]

CHOSEN, REFUSES, NOT_ASKED = "chosen", "refuses", "not asked"
ACCEPTS = "would accept"
_LISTED_LAYERS = 2

Needs = Mapping[AttentionNeed, Sequence[str]]
"""Distinct needs, each with the names of the layers that have it; none where they are not known yet."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one candidate. ``outcome`` is one of the constants above, ``reason`` a refusal's."""

    name: str
    outcome: str
    reason: str = ""

    @property
    def is_chosen(self) -> bool:
        return self.outcome == CHOSEN

    def __str__(self) -> str:
        return f"{self.outcome}: {self.reason}" if self.reason else self.outcome


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """The backend that serves all needs.

    Attributes:
        name: the plugin's.
        block_sizes: what its kernels take for every layer.
        verdicts: of all candidates in their order, each refusal with its reason (R5.3).
        needs: what it accepted.
    """

    name: str
    backend: AttentionBackend
    block_sizes: BlockSizeRule
    verdicts: tuple[Verdict, ...]
    needs: tuple[AttentionNeed, ...]

    @property
    def keeps_prompt(self) -> bool:
        """Whether some layer treats prompts apart from what follows them."""
        return any(need.keeps_prompt for need in self.needs)

    @property
    def uses_mm_prefix(self) -> bool:
        """Whether tokens of one media item see each other in both directions in some layer."""
        return any(need.uses_mm_prefix for need in self.needs)

    @property
    def refused(self) -> tuple[tuple[str, str], ...]:
        return tuple((verdict.name, verdict.reason) for verdict in self.verdicts if verdict.outcome == REFUSES)

    def kernel_block_size(self, block_size: int) -> int:
        """The part of ``block_size`` tokens that kernels take at a time. Raises ``ConfigError`` for none (R5.15)."""
        size = largest_fitting(block_size, self.block_sizes)
        if size is None:
            reason = _unfit(self.block_sizes, block_size)
            raise ConfigError(f"attention backend {self.name!r}: {reason}")
        return size

    def table(self) -> str:
        """One line per candidate, for the log."""
        return _table(self.verdicts)


class AttentionSelector:
    """Asks ``candidates`` in order, or ``forced`` alone. ``create`` loads one by its plugin name, at most once.

    ``absence`` says of a candidate that accepts why it cannot run here all the same, or None; ``installed`` is for
    messages.
    """

    def __init__(
        self,
        create: Callable[[str], AttentionBackend],
        candidates: Sequence[str],
        *,
        absence: Callable[[str], str | None] = lambda name: None,
        installed: Sequence[str] = (),
        forced: str | None = None,
        logger: logging.Logger | None = None,
    ) -> None:
        self._create = create
        self._absence = absence
        self._names = (forced,) if forced is not None else tuple(candidates)
        self._installed = installed
        self._forced = forced
        self._logger = logger
        self._loaded: dict[str, AttentionBackend | PluginError] = {}

    def choose(self, needs: Needs) -> AttentionChoice:
        """The first candidate that accepts every need.

        Raises ``ConfigError`` with every candidate's reason when none is left, or with that of the forced one. A
        forced backend that is not installed or fails to load raises its ``PluginError``.
        """
        refusals: list[Verdict] = []
        for place, name in enumerate(self._names):
            reason = self._reason(name, needs)
            if reason is None:
                untried = [Verdict(other, NOT_ASKED) for other in self._names[place + 1 :]]
                verdicts = (*refusals, Verdict(name, CHOSEN), *untried)
                backend = self._backend(name)
                return AttentionChoice(name, backend, _rule(backend, needs), verdicts, tuple(needs))
            refusals.append(Verdict(name, REFUSES, reason))
        raise self._nobody(refusals, needs)

    def examine(self, needs: Needs) -> tuple[Verdict, ...]:
        """Every candidate's answer, those behind the one that is taken included. Raises nothing of its own."""
        verdicts: list[Verdict] = []
        for name in self._names:
            try:
                reason = self._reason(name, needs)
            except PluginError as error:
                reason = str(error)
            is_first = all(verdict.outcome == REFUSES for verdict in verdicts)
            outcome = REFUSES if reason is not None else CHOSEN if is_first else ACCEPTS
            verdicts.append(Verdict(name, outcome, reason or ""))
        return tuple(verdicts)

    def serve(self, toolkit: LayerToolkit, base: AttentionNeed) -> AttentionChoice:
        """Choose for the layers that a model has made with ``toolkit``, bind them, and log the table of candidates.

        Raises as :meth:`choose` does.
        """
        needs = layer_needs(base, toolkit.attention_layers.values()) or {bare_need(base): ()}
        choice = self.choose(needs)
        toolkit.bind_attention(choice.backend)
        if self._logger is not None:
            layers = "; ".join(describe_need(need) for need in needs)
            device = base.device.name
            self._logger.info("attention backend: %s on %s for %s\n%s", choice.name, device, layers, choice.table())
        return choice

    def _reason(self, name: str, needs: Needs) -> str | None:
        """Why the candidate cannot serve, or None. Raises the ``PluginError`` of a forced one that does not load."""
        try:
            backend = self._backend(name)
        except PluginError as error:
            if self._forced is not None:
                raise
            return "it is not installed" if isinstance(error, PluginNotFoundError) else str(error)
        reasons = dict.fromkeys(_refusals(backend, needs))
        return "; ".join(reasons) or self._absence(name)

    def _backend(self, name: str) -> AttentionBackend:
        if name not in self._loaded:
            try:
                self._loaded[name] = self._create(name)
            except PluginError as error:
                self._loaded[name] = error
        found = self._loaded[name]
        if isinstance(found, PluginError):
            raise found
        return found

    def _nobody(self, refusals: Sequence[Verdict], needs: Needs) -> ConfigError:
        if self._forced is not None:
            return ConfigError(
                f"attention backend {self._forced!r} was asked for but refuses: {refusals[0].reason}; choose another "
                "one with --attention-backend, or leave it unset for an automatic choice"
            )
        table = "\n".join(f"  {line}" for line in _rows([(row.name, row.reason) for row in refusals]))
        advice = "change the setting that they refuse, or name another one" if refusals else "name one"
        return ConfigError(
            f"no attention backend can serve this model on {next(iter(needs)).device.name}:\n"
            f"{table or '  no candidates'}\n"
            f"installed: {', '.join(self._installed) or 'none'}; {advice} with --attention-backend"
        )


def _refusals(backend: AttentionBackend, needs: Needs) -> Iterator[str]:
    """Every need's reason, with the layers it is about unless it is that of all; else what is wrong with blocks."""
    reasons = {need: reason for need in needs if (reason := backend.objection(need)) is not None}
    concerns_all = len(reasons) == len(needs) and len(set(reasons.values())) == 1
    for need, reason in reasons.items():
        yield reason if concerns_all else f"{_named(needs[need])} ({describe_need(need)}): {reason}"
    if reasons:
        return
    try:
        reason = _unfit(_rule(backend, needs), next(iter(needs)).block_size)
    except ConfigError as error:
        reason = str(error)
    if reason is not None:
        yield reason


def _named(layers: Sequence[str]) -> str:
    shown = ", ".join(layers[:_LISTED_LAYERS])
    more = len(layers) - _LISTED_LAYERS
    return f"{shown} and {more} more layers" if more > 0 else shown or "the model"


def _unfit(rule: BlockSizeRule, block_size: int | None) -> str | None:
    """Blocks may be split for kernels, never joined (R5.15)."""
    if block_size is None or largest_fitting(block_size, rule) is not None:
        return None
    return f"blocks of {block_size} tokens cannot be divided into any that its kernels take ({rule}); set --block-size"


def _rule(backend: AttentionBackend, needs: Needs) -> BlockSizeRule:
    return common_rule([backend.block_sizes(need) for need in needs])


def common_rule(rules: Sequence[BlockSizeRule]) -> BlockSizeRule:
    """The sizes that every one of ``rules`` accepts. Raises ``ConfigError`` when there are none (R5.15)."""
    multiples = [rule.multiple_of for rule in rules if rule.multiple_of is not None]
    multiple = math.lcm(*multiples) if len(multiples) == len(rules) else None
    named = {size for rule in rules for size in rule.exact}
    exact = tuple(sorted(size for size in named if all(rule.accepts(size) for rule in rules)))
    if multiple is None and not exact:
        listed = "; ".join(dict.fromkeys(str(rule) for rule in rules))
        raise ConfigError(f"its layers have no block size in common ({listed})")
    return BlockSizeRule(multiple, exact)


def largest_fitting(block_size: int, rule: BlockSizeRule) -> int | None:
    """``block_size`` if the rule accepts it, else its largest divisor that it does; None without any (R1.45)."""
    divisors = (size for size in range(block_size, 0, -1) if block_size % size == 0)
    return next((size for size in divisors if rule.accepts(size)), None)


def _table(verdicts: Sequence[Verdict]) -> str:
    return "\n".join(f"  {line}" for line in _rows([(verdict.name, str(verdict)) for verdict in verdicts]))


def _rows(rows: Sequence[tuple[str, str]]) -> Iterator[str]:
    width = max((len(name) for name, _ in rows), default=0)
    for name, text in rows:
        yield f"{name:<{width}}  {text}"
