"""The ``torch`` worker: binds the device, loads the model, owns the KV memory and runs steps through the runner."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from functools import partial

import torch

from hardpoint.errors import ConfigError
from hardpoint.interfaces.communicator import Communicator
from hardpoint.interfaces.graph_backend import GraphBackend
from hardpoint.interfaces.kernel_override import KernelCase, KernelOverride
from hardpoint.interfaces.kv_cache import KVCacheConfig, LayerSpec, spec_to_wire
from hardpoint.interfaces.kv_cache_specs import MambaCacheMode
from hardpoint.interfaces.logits_processor import LogitsProcessor
from hardpoint.interfaces.platform import DeviceDescription, LogicalDevice, Platform
from hardpoint.interfaces.plugin import PluginAccess, plugin
from hardpoint.interfaces.step import Deferred, GrammarMask, NewRow, RunnerOutput, SchedulerOutput
from hardpoint.interfaces.worker import PendingOutput, Worker, WorkerConfig, WorkerContext
from hardpoint_torch_runtime.attention_startup import AttentionReport, attention_for_layers, attention_report
from hardpoint_torch_runtime.batch_invariance import require_batch_invariance
from hardpoint_torch_runtime.communication import create_communicator, require_alike, smallest
from hardpoint_torch_runtime.context_sharing import context_shards
from hardpoint_torch_runtime.layers.context_shards import ContextPlace
from hardpoint_torch_runtime.model_choice import ModelChoice, choose_model
from hardpoint_torch_runtime.model_loading import LoadedModel, load_model, torch_dtype
from hardpoint_torch_runtime.model_lowering import ModelLowering, chosen_compiler
from hardpoint_torch_runtime.ops.dispatch import KernelTable, select_kernels
from hardpoint_torch_runtime.ops.loading import load_custom_ops
from hardpoint_torch_runtime.ops.registry import OPERATORS
from hardpoint_torch_runtime.plugin_access import create_in_worker, label_of
from hardpoint_torch_runtime.plugin_faults import NamedLogitsProcessor, named_kernel
from hardpoint_torch_runtime.runner.assembly import RunnerParts, assemble_runner
from hardpoint_torch_runtime.runner.attention_groups import AttentionGroups
from hardpoint_torch_runtime.runner.buffers import is_host_memory
from hardpoint_torch_runtime.runner.capture import capture_shapes
from hardpoint_torch_runtime.runner.feature_checks import refuse_features
from hardpoint_torch_runtime.runner.forward_setup import GraphChoice, forward_maker
from hardpoint_torch_runtime.runner.kv_memory import KVMemory
from hardpoint_torch_runtime.runner.pooling_plan import PoolingPlan, check_options
from hardpoint_torch_runtime.runner.runner import ModelRunner, profile_forward
from hardpoint_torch_runtime.runner.streams import device_streams
from hardpoint_torch_runtime.runner.warm_up import run_warm_up
from hardpoint_torch_runtime.sampling.sampler import Sampler
from hardpoint_torch_runtime.worker_options import TorchWorkerOptions

__all__ = ["TorchWorker", "TorchWorkerOptions", "create"]


class TorchWorker(Worker):
    """Methods must be called in the order of :class:`Worker`; a call out of order raises ``RuntimeError``.

    Workers of other plugins may derive from it. Raises ``ConfigError`` for a context without configuration, platform
    or plugins, and for ranks that divide nothing.
    """

    def __init__(self, ctx: WorkerContext, options: TorchWorkerOptions) -> None:
        if ctx.config is None or ctx.platform is None or ctx.plugins is None:
            raise ConfigError("the torch worker needs a worker configuration, a platform and access to plugins")
        self.config: WorkerConfig = ctx.config
        self.options = options
        self._platform: Platform = ctx.platform
        self._plugins: PluginAccess = ctx.plugins
        self._logger = ctx.logger
        self._shards = context_shards(self.config, options.context_ranks, options.context_interleave)
        self._device: torch.device | None = None
        self._communicator: Communicator | None = None
        self._loaded: LoadedModel | None = None
        self._kernels: KernelTable | None = None
        self._runner: ModelRunner | None = None
        self.lowering: ModelLowering | None = None
        self._pooling: PoolingPlan | None = None
        check_options(options, self.config.model)
        parallel = self.config.parallel
        if parallel.world_size > parallel.tensor_parallel_size * parallel.pipeline_parallel_size:
            raise ConfigError(
                f"{parallel.world_size} ranks were asked for, but nothing divides the model among them: each would "
                "compute all of it; set --tensor-parallel-size"
            )

    @property
    def device(self) -> torch.device:
        if self._device is None:
            raise RuntimeError("the device is not bound yet; call init_device first")
        return self._device

    @property
    def loaded(self) -> LoadedModel:
        if self._loaded is None:
            raise RuntimeError("no model is loaded; call load_model first")
        return self._loaded

    @property
    def kernels(self) -> KernelTable:
        """The kernel of every seam, and why it is that one."""
        if self._kernels is None:
            raise RuntimeError("the kernels are not chosen yet; call load_model first")
        return self._kernels

    @property
    def runner(self) -> ModelRunner:
        if self._runner is None:
            raise RuntimeError("the KV cache does not exist yet; call initialize_kv_cache first")
        return self._runner

    @property
    def _logical_device(self) -> LogicalDevice:
        return LogicalDevice(self.config.parallel.device)

    def init_device(self) -> None:
        torch_dtype(self.config.dtype)
        self._device = self._platform.init_worker(self._logical_device, self.config.threads)
        self._communicator = create_communicator(
            self._plugins, self._platform, self.config, self._device, self.options.communicator
        )
        require_alike(self.config, self._communicator, self._device)

    def load_model(self) -> None:
        started = time.perf_counter()
        for name in self.options.custom_ops:
            load_custom_ops(self._plugins, name, config=self.config, device=self.device)
        self._kernels = self._select_kernels()
        self.lowering = self._create_lowering()
        choice = self._choose_model()
        if self.config.parallel.rank == 0:
            choice.log(self._logger, self.config.model.architecture)
        described = self._platform.describe(self._logical_device)
        attend = attention_for_layers(self._plugins, self._platform, self.config, described, self.device, self._logger)
        self._loaded = load_model(
            self._plugins,
            self.config,
            attend,
            self.device,
            self._kernels.kernels,
            self._communicator,
            MambaCacheMode(self.options.recurrent_states),
            self._shards,
            choice,
        )
        self._pooling = PoolingPlan.settle(self._loaded.model, self.options, torch_dtype(self.config.dtype))
        OPERATORS.verify()
        self._logger.info(
            "loaded %s (%s) in %.1f s: %d tensors, %.0f MB stored, attention %s, %s",
            self.config.model.artifact.name,
            self.config.model.architecture,
            time.perf_counter() - started,
            self._loaded.report.num_tensors,
            self._loaded.report.num_bytes / 1e6,
            self._loaded.attention.name,
            self.config.dtype,
        )
        if self.lowering is not None:
            self._plugins.notify("startup_phase", phase="packing")
            self.lowering.lower(self._loaded.model)
        if self.config.batch_invariant:
            ranks, overrides = self.config.parallel.tensor_parallel_size, self.kernels.overrides
            require_batch_invariance(self._loaded.model, ranks, has_linear_kernel="linear" in overrides)

    def explain_attention(self, device: DeviceDescription) -> AttentionReport:
        """What a start on ``device``, which need not be there, would decide. Works before any other method."""
        return attention_report(self._plugins, self._platform, self.config, device, self._shards, self._choose_model())

    def _choose_model(self) -> ModelChoice:
        return choose_model(self.config.model.architecture, self._plugins.names("model"), self.options)

    def _create_lowering(self) -> ModelLowering | None:
        name = chosen_compiler(self.config.compiler, self._platform, self._plugins, self._logger)
        if name is None:
            return None
        overrides = self.options.kernel_overrides if self.options.use_kernel_overrides else {}
        if overrides and self.config.compiler is None:
            self._logger.info("not lowered by %s: kernels of %s were chosen by hand", name, ", ".join(overrides))
            return None
        compiler = create_in_worker(self._plugins, "compiler", name, self.config, self.device)
        return ModelLowering(compiler, self._logger)

    def kv_cache_specs(self) -> list[LayerSpec]:
        return [LayerSpec(name, spec_to_wire(spec)) for name, spec in self.loaded.model.kv_cache_specs().items()]

    def kv_cache_budget(self) -> int:
        """The configured size, or what is left of the device's budget after a forward of the largest step.

        Equal on all ranks, the least that any of them has: engines that plan for themselves must plan alike.
        """
        return smallest(self._own_budget(), self._communicator, self.device)

    def _own_budget(self) -> int:
        if self.config.kv_cache_bytes is not None:
            return self.config.kv_cache_bytes
        config = self.config
        profile_forward(
            self.loaded.model,
            config.max_num_batched_tokens,
            config.max_model_len,
            self.device,
            num_rows=config.max_num_seqs,
        )
        self._platform.synchronize(self._logical_device)
        budget = self._platform.memory_budget(self._logical_device)
        return max(0, budget - self._platform.memory_used(self._logical_device))

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        """Allocate the planned memory and everything whose size depends on it. Called once."""
        if self._runner is not None:
            raise RuntimeError("the KV cache exists already; its plan is fixed for the worker's lifetime")
        attention = self.loaded.attention
        worker, specs = self.config, config.layer_specs(self.loaded.model.kv_cache_specs())
        groups = AttentionGroups(
            config,
            specs,
            attention.backend,
            attention.block_sizes,
            max_rows=worker.max_num_seqs,
            max_tokens=worker.max_num_batched_tokens,
            max_model_len=worker.max_model_len,
            device=self.device,
            keeps_prompt=attention.keeps_prompt,
            uses_mm_prefix=attention.uses_mm_prefix,
            place=None if self._shards is None else ContextPlace(self._shards, self.loaded.toolkit.parallel.rank),
        )
        kv = KVMemory(config, specs, self.device, groups.kernel_block_size_by_layer, rank=worker.parallel.rank)
        parts = self.runner_parts()
        sampler = Sampler(
            parts.processors,
            checks_invariance=self.options.check_logits_processors,
            truncate=self.kernels.kernels.top_k_top_p,
        )
        num_drafts = 0 if parts.proposer is None else parts.proposer.num_drafts
        forwards = forward_maker(
            worker, self._platform, self.loaded.model, groups, kv, self._graphs(), num_drafts=num_drafts
        )
        self._runner = assemble_runner(worker, self.loaded.model, groups, kv, sampler, self.device, parts, forwards)

    def runner_parts(self) -> RunnerParts:
        """What the runner has beyond model and cache; workers that derive from this one may add to it."""
        is_asynchronous = self.options.asynchronous_output
        if is_asynchronous is None:
            is_asynchronous = not is_host_memory(self.device)
        return RunnerParts(
            processors=self._logits_processors(),
            refuse=partial(refuse_row, tasks=self.config.model.tasks, model=self.loaded.model),
            streams=device_streams(self._platform, self.device) if is_asynchronous else None,
            takes_embeddings=self.options.prompt_embeddings,
            pooling=self._pooling,
        )

    def warm_up(self) -> None:
        config = self.config
        num_graphs = capture_shapes(self.runner)
        if num_graphs:
            self._logger.info("captured %d shapes of decoding steps", num_graphs)
        longest = min(config.max_num_batched_tokens, config.max_model_len - 1)
        if longest > 0:
            run_warm_up(self.runner, min(self.options.warm_up_tokens, longest))

    def execute(self, step: SchedulerOutput) -> RunnerOutput | Deferred | PendingOutput:
        if self.lowering is not None and self.lowering.is_waiting:
            self.lowering.between_steps()
        return self.runner.execute(step)

    def sample(self, step_id: int, grammar: GrammarMask | None) -> RunnerOutput | PendingOutput:
        return self.runner.sample(step_id, grammar)

    def supported_tasks(self) -> list[str]:
        """Those of the model, and ``classify`` where what it makes of a text is scores."""
        judges = self._pooling is not None and self._pooling.judges
        return [
            *self.config.model.tasks,
            *(["classify"] if judges and "classify" not in self.config.model.tasks else []),
        ]

    def check_health(self) -> None:
        self._platform.synchronize(self._logical_device)
        if self._loaded is None:
            raise RuntimeError("the worker holds no model: it was not loaded, or it was shut down")

    def shutdown(self) -> None:
        """Drop model and memory, and leave the other ranks; idempotent."""
        if self._communicator is not None:
            self._communicator.close()
            self._communicator = None
        if self._runner is not None:
            self._runner.forwards.release()
        self._runner = None
        self._loaded = None
        self.lowering = None
        gc.collect()

    def _select_kernels(self) -> KernelTable:
        def create(name: str) -> KernelOverride:
            override: KernelOverride = create_in_worker(
                self._plugins, "kernel_override", name, self.config, self.device
            )
            return named_kernel(override, label_of(self._plugins, "kernel_override", name))

        case = KernelCase("", self.device.type, self.config.dtype, self.config.batch_invariant)
        return select_kernels(
            create,
            self.options.named_overrides(),
            case,
            candidates=self._platform.kernel_candidates,
            enabled=self.options.use_kernel_overrides,
            logger=self._logger,
        )

    def _graphs(self) -> GraphChoice | None:
        name = self.options.graph_backend
        if name is None:
            return None
        backend: GraphBackend = create_in_worker(self._plugins, "graph_backend", name, self.config, self.device)
        return GraphChoice(name, backend, self.options.graph_sizes)

    def _logits_processors(self) -> list[LogitsProcessor]:
        kind = "logits_processor"
        return [
            NamedLogitsProcessor(
                create_in_worker(self._plugins, kind, name, self.config, self.device),
                label_of(self._plugins, kind, name),
            )
            for name in self.options.logits_processors
        ]


def refuse_row(row: NewRow, tasks: Sequence[str] = ("generate", "embed"), model: object = None) -> str | None:
    """Requests that need a feature this worker lacks, or another one of the ``tasks``, end on their own, with a
    reason."""
    if row.task not in tasks:
        return f"the task {row.task!r} is not served: this model serves {', '.join(tasks) or 'nothing'}"
    if (reason := refuse_features(model, row)) is not None:
        return reason
    if row.adapter is not None:
        return f"the adapter {row.adapter.name!r} cannot be used: this worker runs without adapters"
    return None


@plugin("worker", options=TorchWorkerOptions)
def create(ctx: WorkerContext, options: TorchWorkerOptions) -> Worker:
    """Entry point ``hardpoint.worker.v1`` ``torch``."""
    return TorchWorker(ctx, options)
