"""From configuration to a frozen :class:`EngineSpec`: plan, platform, files, model facts, limits. Starts nothing.

Everything that can be wrong with names and files is found here, in the launcher, as one message.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from hardpoint.config import AppConfig, EngineConfig
from hardpoint.config.settle import settle
from hardpoint.engine.spec import EngineSpec
from hardpoint.errors import ConfigError, ModelFormatError, ModelNotFoundError, PluginNotFoundError
from hardpoint.interfaces.block_size import BLOCK_SIZES_CAPABILITY, BlockSizeRule, smallest_block_size
from hardpoint.interfaces.engine import ModelLimits
from hardpoint.interfaces.model import WHOLE_PROMPTS_CAPABILITY
from hardpoint.interfaces.model_source import ModelArtifact, ModelInfo, ModelSource, WeightLoader, WeightLoaderContext
from hardpoint.interfaces.platform import EngineSettings, Platform
from hardpoint.interfaces.plugin import PluginContext
from hardpoint.interfaces.scheduler import SchedulerLimits
from hardpoint.interfaces.worker import ParallelSlice, WorkerConfig
from hardpoint.plugins.discovery import discover
from hardpoint.plugins.hooks import HookRunner
from hardpoint.plugins.kinds import no_candidate
from hardpoint.plugins.manifest import load_manifest
from hardpoint.plugins.plan import PluginPlan, SelectedBy
from hardpoint.plugins.platform_selection import select_platform
from hardpoint.plugins.records import DiscoveredPlugin
from hardpoint.plugins.resolve import build_plan
from hardpoint.plugins.runtime import PluginRuntime
from hardpoint.plugins.selection import PluginSelection, parse_pins
from hardpoint.roles import ProcessRole

_logger = logging.getLogger("hardpoint.launch")
_DEFAULT_MAX_NUM_SEQS = 64
_DEFAULT_BATCHED_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Launch:
    """What starting an engine takes. ``runtime`` is this process's share of the plan."""

    spec: EngineSpec
    runtime: PluginRuntime


Launcher = Callable[[str, Mapping[str, Any], frozenset[ProcessRole]], Launch]


def launch_model(model: str, settings: Mapping[str, Any], roles: frozenset[ProcessRole]) -> Launch:
    """``settings`` are the command line's in their Python spelling, and ``plugins``: options by kind and name.

    Raises what ``prepare`` raises.
    """
    engine = EngineConfig.sections(model, **{key: settings[key] for key in settings if key != "plugins"})
    engines = {str(engine["model"].get("served_name") or model): engine}
    return launch_config(settle({"engines": engines, "plugins": settings.get("plugins", {})}), roles)


def launch_config(config: AppConfig, roles: frozenset[ProcessRole]) -> Launch:
    """The one engine of ``config``. Raises what ``prepare`` raises."""
    (name,) = config.engines
    return prepare(config, name, environ=dict(os.environ), roles=roles)


def plugin_selection(
    config: AppConfig, engine: EngineConfig, environ: dict[str, str], *, serves: bool
) -> PluginSelection:
    """What the configuration asks of plugins. Unset choices stay open for the platform; only servers ask for routes."""
    execution, cache, model = engine.execution, engine.cache, engine.model
    named = {kind: getattr(execution, kind) for kind in ("platform", "executor", "attention_backend", "compiler")}
    named |= {"quantization": model.quantization, "weight_loader": model.loader}
    defaults = {"kv_layout": cache.kv_layout, "hash": cache.hash_algorithm, "chat_renderer": model.chat_renderer}
    policy = config.plugin_policy
    return PluginSelection.from_environment(
        environ,
        allow=policy.allow,
        endpoints=config.server.endpoints if serves else (),
        choices={kind: name for kind, name in named.items() if name is not None},
        defaults=defaults | {"scheduler": engine.scheduler.scheduler},
        pins=parse_pins(policy.pins),
        options=config.plugins,
        strict=policy.strict,
    )


def start_runtime(
    config: AppConfig, engine: EngineConfig, environ: dict[str, str], roles: frozenset[ProcessRole]
) -> PluginRuntime:
    """Plan, choose and create the platform, and take this process's share.

    A process that is not the engine itself serves: only it may open routes. An executor that no plugin is called may
    be the path of a class, which joins the plan like a plugin, of no distribution.
    """
    installed, name = discover(), engine.execution.executor or ""
    if {".", ":"} & set(name) and name not in {plugin.name for plugin in installed.of("executor")}:
        path = name if ":" in name else ":".join(name.rsplit(".", 1))
        named = DiscoveredPlugin("executor", name, 1, "", "by name", path, "")
        installed = msgspec.structs.replace(installed, plugins=(*installed.plugins, named))
    selection = plugin_selection(config, engine, environ, serves=ProcessRole.ENGINE not in roles)
    plan = build_plan(installed, selection)
    runtime = PluginRuntime(plan, roles | {ProcessRole.LAUNCHER}, installed=installed)
    HookRunner.from_runtime(runtime)  # Before anything that may touch hardware or import a framework.
    chosen, probes = select_platform(plan, engine.execution.platform, installed=installed)
    reason = "; ".join(f"{probe.name}: {probe.result.status} ({probe.result.reason})" for probe in probes)
    selected_by = SelectedBy.DEFAULT if engine.execution.platform is None else SelectedBy.NAMED
    runtime.plan = plan.choose("platform", chosen, selected_by, reason)
    for notice in plan.notices:
        _logger.info("%s", notice)
    for notice in selection.without_effect():
        _logger.warning("%s", notice)
    runtime.platform = runtime.make("platform", chosen)
    return runtime


def prepare(
    config: AppConfig,
    name: str,
    *,
    environ: dict[str, str],
    roles: frozenset[ProcessRole],
    runtime_dir: str = "",
    show_progress: bool = True,
    runtime: PluginRuntime | None = None,
) -> Launch:
    """Resolve engine ``name`` of ``config``; in ``runtime``, which has its platform, or in one started for it.

    Raises ``ConfigError``, ``ModelNotFoundError``, ``ModelFormatError``, ``UnsupportedModelError`` and the plugin
    errors, each with what to change.
    """
    engine = config.engines[name]
    runtime = runtime or start_runtime(config, engine, environ, roles)
    artifact = _resolve_model(runtime, engine)
    loader, info = _describe_model(runtime, engine, artifact)
    tokenizer = _find_tokenizer(runtime, artifact)
    settings = _settle(runtime, engine, info)
    _logger.info("model %s: %s, %s, read by %s", artifact.name, info.architecture, artifact.root, loader)
    io_processor = str(engine.model.io_processor or info.config.get("io_processor_plugin") or "")
    plan = _final_plan(runtime.plan, settings, loader, tokenizer, io_processor)
    runtime.plan = plan = msgspec.structs.replace(plan, tasks=info.tasks)
    for planned in (planned for planned in plan.plugins if planned.active):
        _logger.debug("plugin %s: %s", planned.label, planned.reason)
    limits = _limits(engine, settings, info)
    require_capabilities(plan, limits)
    threads = runtime.platform.thread_plan(settings.world_size, environ)  # type: ignore[union-attr]
    spec = EngineSpec(
        model_name=name,
        plan=plan.to_bytes(),
        model=info,
        worker_config=_worker_config(engine, settings, info, limits, threads=threads, show_progress=show_progress),
        limits=limits,
        model_limits=ModelLimits(
            info.vocab_size,
            limits.max_model_len,
            max_num_seqs=limits.max_num_seqs,
            embedding_size=(info.config.get("text_config") or info.config).get("hidden_size"),
            decoder_prompt=tuple(info.generation.get("decoder_prompt_token_ids", ())),
            max_step_tokens=_step_bound(plan, info, limits),
            **config.server.model_dump(include={"max_logprobs", "max_n", "max_prompts"}),
        ),
        num_blocks=engine.cache.num_kv_blocks,
        hybrid_kv_cache=engine.cache.hybrid_kv_cache,
        block_size_rules=_block_size_rules(runtime, runtime.platform, settings),  # type: ignore[arg-type]
        chat_template=_read_template(engine.model.chat_template_file),
        runtime_dir=runtime_dir,
        log_level=config.log_level,
        drain_timeout_s=config.server.drain_timeout_s,
    )
    return Launch(spec, runtime)


def _create_each(
    runtime: PluginRuntime, kind: str, only: str | None = None, context: type[PluginContext] = PluginContext
) -> Iterator[tuple[str, Any]]:
    """Each plugin of ``kind``, or ``only`` one, by name. Raises ``PluginNotFoundError`` when there is none."""
    names = (only,) if only else runtime.names(kind)
    if not names:
        raise PluginNotFoundError(no_candidate(kind))
    for name in names:
        yield name, runtime.make(kind, name, context)


def _resolve_model(runtime: PluginRuntime, engine: EngineConfig) -> ModelArtifact:
    sources: list[ModelSource] = [source for _, source in _create_each(runtime, "model_source")]
    for source in sorted(sources, key=lambda source: source.priority):
        artifact = source.resolve(engine.model.name, engine.model.revision)
        if artifact is not None:
            return artifact
    known = sorted({name for source in sources for name in source.known_names()})
    asked = ", ".join(runtime.names("model_source"))
    hint = f"; known names: {', '.join(known)}" if known else ""
    raise ModelNotFoundError(
        f"no model source knows {engine.model.name!r} (asked: {asked}){hint}; "
        "give a folder with config.json, a .gguf file, a known name or a hub id such as org/name"
    )


def _describe_model(runtime: PluginRuntime, engine: EngineConfig, artifact: ModelArtifact) -> tuple[str, ModelInfo]:
    loader: WeightLoader
    for name, loader in _create_each(runtime, "weight_loader", engine.model.loader, WeightLoaderContext):
        if engine.model.loader or loader.accepts(artifact):
            return name, loader.describe(artifact)
    fault = f"no weight loader accepts these files ({', '.join(artifact.files[:8])})"
    advice = "give a folder with config.json and *.safetensors, or a .gguf file"
    raise _unreadable(runtime, "weight_loader", artifact, fault, advice)


def _find_tokenizer(runtime: PluginRuntime, artifact: ModelArtifact) -> str:
    for name, provider in _create_each(runtime, "tokenizer"):
        if provider.accepts(artifact):
            return name
    advice = "a folder needs tokenizer.json beside its weights, a GGUF file its own vocabulary"
    raise _unreadable(runtime, "tokenizer", artifact, f"no tokenizer found for {artifact.name!r}", advice)


def _unreadable(
    runtime: PluginRuntime, kind: str, artifact: ModelArtifact, fault: str, advice: str
) -> ModelFormatError:
    return ModelFormatError(f"{artifact.root}: {fault}; asked: {', '.join(runtime.names(kind))}; {advice}")


def _flat(engine: EngineConfig) -> dict[str, Any]:
    """Settings by name; records made of them take those that they have a field for."""
    execution = engine.execution.model_dump()
    execution["world_size"] = execution["tensor_parallel_size"] * execution["pipeline_parallel_size"]
    return {**execution, **engine.scheduler.model_dump(), **engine.cache.model_dump()}


def _settle(runtime: PluginRuntime, engine: EngineConfig, info: ModelInfo) -> EngineSettings:
    """Let the platform fill what the user left open, and refuse what cannot be."""
    platform: Platform = runtime.platform  # type: ignore[assignment]
    facts = {"architecture": info.architecture, "model": info.config, "kv_cache_bytes": engine.cache.kv_cache_memory}
    given = {**_flat(engine), "dtype": engine.model.dtype}
    settings = msgspec.convert({key: given[key] for key in given if given[key] != "auto"} | facts, EngineSettings)
    platform.check_and_update(settings)
    if not settings.worker:
        raise ConfigError(f"platform {platform.name!r} set no worker; its check_and_update must name one")
    settings.dtype = settings.dtype or info.dtype
    settings.kv_cache_dtype = settings.kv_cache_dtype or settings.dtype
    settings.block_size = settings.block_size or _choose_block_size(runtime, platform, settings)
    return settings


def _attention_candidates(platform: Platform, settings: EngineSettings) -> Sequence[str]:
    return [settings.attention_backend] if settings.attention_backend else platform.attention_candidates()


def _block_size_rules(runtime: PluginRuntime, platform: Platform, settings: EngineSettings) -> dict[str, BlockSizeRule]:
    """The sizes that manifests of the attention backends in question state. Imports no backend.

    Backends whose manifest states none have no say here; the worker still refuses a size that they cannot use.
    """
    candidates = _attention_candidates(platform, settings)
    rules = {}
    for planned in runtime.plan.of("attention_backend"):
        manifest = load_manifest(planned) if planned.name in candidates else None
        if manifest is not None and (stated := manifest.capabilities.get(BLOCK_SIZES_CAPABILITY)) is not None:
            rules[planned.name] = BlockSizeRule.from_capability(stated, planned.label)
    return rules


def _choose_block_size(runtime: PluginRuntime, platform: Platform, settings: EngineSettings) -> int:
    """The first phase of block-size alignment: only where neither user nor platform chose."""
    rules = _block_size_rules(runtime, platform, settings)
    if not rules and settings.preferred_block_size is None:
        named = ", ".join(_attention_candidates(platform, settings)) or "none"
        raise ConfigError(f"neither {platform.name!r} nor a manifest ({named}) states a block size; set --block-size")
    chosen = smallest_block_size(rules, settings.preferred_block_size or 1)
    why = "; ".join(f"{name}: {rule}" for name, rule in rules.items()) or "stated by no attention backend"
    _logger.info("KV block size %d, set by phase 1 of alignment (%s)", chosen, why)
    return chosen


def require_capabilities(plan: PluginPlan, limits: SchedulerLimits) -> None:
    """Refuse a scheduler whose manifest does not claim what is asked of it with ``ConfigError``.

    Routers would wait for events for good, and steps planned ahead would go wrong in ways of their own.
    """
    scheduler = plan.selected("scheduler")
    manifest = load_manifest(scheduler)
    claimed = {} if manifest is None else manifest.capabilities
    fault = ""
    if limits.kv_events and claimed.get("kv_events", manifest is None) is not True:
        fault = "tells no KV cache events; leave --kv-events out"
    elif limits.max_inflight_steps > claimed.get("max_inflight_steps", 1) and manifest is not None:
        fault = "plans no step ahead; leave --async-scheduling out"
    if fault:
        raise ConfigError(f"{scheduler.label} {fault} or change --scheduler")


def _final_plan(
    plan: PluginPlan, settings: EngineSettings, loader: str, tokenizer: str, io_processor: str
) -> PluginPlan:
    for kind, name, reason in (
        ("worker", settings.worker, "the platform's worker"),
        ("weight_loader", loader, "accepts the model's files"),
        ("tokenizer", tokenizer, "accepts the model's files"),
        ("executor", settings.executor, "the platform's or the operator's choice"),
        ("io_processor", io_processor, "named by the operator or by the model"),
    ):
        if name:
            plan = plan.choose(kind, name, SelectedBy.DEFAULT, reason)
    return plan


def _limits(engine: EngineConfig, settings: EngineSettings, info: ModelInfo) -> SchedulerLimits:
    wanted = engine.model.max_model_len
    if wanted is not None and wanted > info.max_position:
        raise ConfigError(
            f"max_model_len {wanted} is more than the {info.max_position} tokens {info.artifact.name!r} was made for; "
            f"set --max-model-len to at most {info.max_position}"
        )
    settled = {
        "max_num_seqs": settings.max_num_seqs or _DEFAULT_MAX_NUM_SEQS,
        "max_num_batched_tokens": settings.max_num_batched_tokens or _DEFAULT_BATCHED_TOKENS,
        "max_model_len": wanted or info.max_position,
        "max_inflight_steps": 2 if engine.scheduler.async_scheduling else 1,
    }
    return msgspec.convert({**_flat(engine), **settled}, SchedulerLimits)


def _step_bound(plan: PluginPlan, info: ModelInfo, limits: SchedulerLimits) -> int | None:
    """Tokens of a step, where the manifest of the model says that a prompt has to be computed in one."""
    models = [load_manifest(planned) for planned in plan.of("model") if planned.name == info.architecture]
    whole = any(manifest and manifest.capabilities.get(WHOLE_PROMPTS_CAPABILITY) is True for manifest in models)
    return limits.max_num_batched_tokens if whole else None


def _worker_config(
    engine: EngineConfig, settings: EngineSettings, info: ModelInfo, limits: SchedulerLimits, **own: Any
) -> WorkerConfig:
    settled = {**_flat(engine), **msgspec.structs.asdict(settings), **msgspec.structs.asdict(limits), **own}
    settled |= {"model": info, "parallel": msgspec.convert(settled, ParallelSlice)}
    return msgspec.convert({**settled, "quantization": engine.model.quantization}, WorkerConfig)


def _read_template(path: str | None) -> str | None:
    try:
        return None if path is None else Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"chat template {path!r} cannot be read: {error}; set --chat-template-file to a text file"
        ) from None
