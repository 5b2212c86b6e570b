"""From settings to a scheduler without an engine: limits, a KV plan of one attention group, and the plugin itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from hardpoint.config import AppConfig, EngineConfig
from hardpoint.errors import ConfigError
from hardpoint.interfaces import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    Scheduler,
    SchedulerLimits,
    spec_to_wire,
)
from hardpoint.testing.installed_scheduler import InstalledScheduler
from hardpoint_bench.bounds import check_option
from hardpoint_bench.scripted_worker import ScriptedWorker

__all__ = ["Rig", "SchedulerSource", "Sizes", "block_size_of", "with_blocks", "with_scheduler"]

_BLOCK_SIZE = 16
_ASYNC_STEPS = 2


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the settings leave open, in requests, tokens, and blocks (the null block included)."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_blocks: int


class SchedulerSource(Protocol):
    """Where schedulers come from; see ``InstalledScheduler``, which is the usual one."""

    @property
    def name(self) -> str: ...
    @property
    def label(self) -> str: ...
    @property
    def capabilities(self) -> Mapping[str, Any]: ...

    def create(self, limits: SchedulerLimits, kv_cache: KVCacheConfig) -> Scheduler: ...


@dataclass(frozen=True, slots=True)
class Rig:
    """Makes schedulers of one kind, and workers that fit them."""

    plugin: SchedulerSource
    limits: SchedulerLimits
    kv_cache: KVCacheConfig
    block_size: int

    @classmethod
    def of(cls, config: AppConfig, sizes: Sizes, *, pipelined: bool) -> Rig:
        """``sizes`` stand in for settings that are not given; ``pipelined`` keeps two steps under way."""
        (engine,) = config.engines.values()
        limits = _limits(engine, sizes)
        if pipelined or engine.scheduler.async_scheduling:
            steps = max(_ASYNC_STEPS, limits.max_inflight_steps)
            limits = msgspec.structs.replace(limits, max_inflight_steps=steps)
        num_blocks = engine.cache.num_kv_blocks or sizes.num_blocks
        return cls.around(InstalledScheduler.of(config), limits, num_blocks, block_size_of(engine))

    @classmethod
    def around(cls, plugin: SchedulerSource, limits: SchedulerLimits, num_blocks: int, block_size: int) -> Rig:
        """One KV group of ``num_blocks`` blocks, the null block included."""
        spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=1, dtype="int8")
        group = KVCacheGroup(("layers.0",), spec_to_wire(spec))
        return cls(plugin, limits, KVCacheConfig(num_blocks=num_blocks, groups=(group,), tensors=()), block_size)

    @property
    def num_blocks(self) -> int:
        """The null block included."""
        return self.kv_cache.num_blocks

    @property
    def caches_prefixes(self) -> bool:
        """Whether equal prefixes share blocks: the scheduler can, and the settings do not forbid it."""
        return bool(self.plugin.capabilities.get("caches_prefixes")) and self.limits.prefix_caching

    def create(self) -> tuple[Scheduler, ScriptedWorker]:
        worker = ScriptedWorker(self.limits, num_blocks=self.num_blocks, block_size=self.block_size)
        return self.plugin.create(self.limits, self.kv_cache), worker


def block_size_of(engine: EngineConfig) -> int:
    """Tokens per block; without a platform the setting or a common size decides."""
    return engine.cache.block_size or _BLOCK_SIZE


def _limits(engine: EngineConfig, sizes: Sizes) -> SchedulerLimits:
    given = {name: value for name, value in engine.scheduler.model_dump().items() if value is not None}
    settled: dict[str, Any] = {
        "max_num_seqs": sizes.max_num_seqs,
        "max_num_batched_tokens": sizes.max_num_batched_tokens,
        "max_model_len": engine.model.max_model_len or sizes.max_model_len,
        "prefix_caching": engine.cache.prefix_caching,
    }
    limits = msgspec.convert({**settled, **given}, SchedulerLimits)
    if limits.chunked_prefill or engine.scheduler.max_num_batched_tokens is not None:
        return limits
    # Whole prompts only: a step must have room for the longest one.
    batched = max(limits.max_num_batched_tokens, limits.max_model_len)
    return msgspec.structs.replace(limits, max_num_batched_tokens=batched)


def with_blocks(config: AppConfig, blocks: int | None) -> AppConfig:
    """``config`` with ``--blocks``, which is another spelling of a setting. Raises ``ConfigError`` if both differ."""
    ((name, engine),) = config.engines.items()
    setting = engine.cache.num_kv_blocks
    if blocks is None:
        return config
    if setting is not None and setting != blocks:
        raise ConfigError(f"--blocks {blocks} and --num-kv-blocks {setting} say different things; give one of them")
    check_option("blocks", blocks)
    cache = engine.cache.model_copy(update={"num_kv_blocks": blocks})
    return config.model_copy(update={"engines": {name: engine.model_copy(update={"cache": cache})}})


def with_scheduler(config: AppConfig, choice: str) -> AppConfig:
    """``config`` with another scheduler. ``choice`` is NAME, or NAME:KEY=VALUE,KEY=VALUE with options.

    A KEY without dots is an option of the scheduler; one of the form KIND.NAME.KEY is that of any other plugin, such as
    the policy it loads. Values are read as JSON where they are JSON, else as text; commas within brackets, braces or
    double quotes part nothing. Raises ``ConfigError`` for another form.
    """
    name, colon, rest = choice.partition(":")
    if not name:
        raise ConfigError(f"--compare {choice!r} names no scheduler; write NAME or NAME:KEY=VALUE,KEY=VALUE")
    ((engine_name, engine),) = config.engines.items()
    scheduler = engine.scheduler.model_copy(update={"scheduler": name})
    plugins: dict[str, Any] = dict(config.plugins)
    for part in _parts(rest) if colon else ():
        kind, plugin, key, value = _option(choice, name, part)
        named = dict(plugins.get(kind, {}))
        named[plugin] = {**named.get(plugin, {}), key: value}
        plugins[kind] = named
    return config.model_copy(
        update={"engines": {engine_name: engine.model_copy(update={"scheduler": scheduler})}, "plugins": plugins}
    )


def _parts(text: str) -> list[str]:
    """``text`` cut at the commas outside brackets, braces and double quotes."""
    parts, start, depth, quoted, escaped = [], 0, 0, False, False
    for at, letter in enumerate(text):
        if quoted:
            quoted = escaped or letter != '"'
            escaped = letter == "\\" and not escaped
        elif letter == '"':
            quoted = True
        elif letter in "[{":
            depth += 1
        elif letter in "]}":
            depth -= 1
        elif letter == "," and depth <= 0:
            parts.append(text[start:at])
            start = at + 1
    return [*parts, text[start:]]


def _option(choice: str, scheduler: str, part: str) -> tuple[str, str, str, Any]:
    """Kind and name of the plugin, key and value."""
    path, equals, text = part.partition("=")
    kind, dot, rest = path.partition(".")
    plugin, _, key = rest.rpartition(".") if dot else (scheduler, "", path)
    if not (equals and kind and plugin and key):
        form = "KEY=VALUE, nor of KIND.NAME.KEY=VALUE for another plugin"
        raise ConfigError(f"--compare {choice!r}: {part!r} is not of the form {form}")
    kind = kind if dot else "scheduler"
    try:
        return kind, plugin, key, msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        if text.startswith(("{", "[", '"')):
            fault = f"{text!r} is not JSON ({error}); keys and texts stand in double quotes"
            raise ConfigError(f"--compare {choice!r}: {fault}") from None
        return kind, plugin, key, text
