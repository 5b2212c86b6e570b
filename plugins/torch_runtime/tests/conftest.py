"""A complete tiny worker: a random one-file model, an in-test attention backend, and in-test access to plugins."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from hardpoint.errors import PluginNotFoundError
from hardpoint.interfaces.attention import (
    AttentionBackend,
    AttentionImpl,
    AttentionLayerParams,
    AttentionMetadataBuilder,
    AttentionNeed,
    BlockSizeRule,
    CommonAttentionMetadata,
)
from hardpoint.interfaces.kv_cache import (
    AttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    KVCacheTensor,
    spec_to_wire,
)
from hardpoint.interfaces.model import ModelContext, WeightRule
from hardpoint.interfaces.model_source import ModelArtifact, ModelInfo, WeightLoader, WeightTensor
from hardpoint.interfaces.platform import DeviceDescription, EngineSettings, LogicalDevice, Platform, ThreadPlan
from hardpoint.interfaces.plugin import PluginContext, ProcessRole
from hardpoint.interfaces.request import EngineRequest, SamplingParams
from hardpoint.interfaces.scheduler import SchedulerLimits
from hardpoint.interfaces.step import BlockUpdate, NewRow, SchedulerOutput
from hardpoint.interfaces.worker import WorkerConfig, WorkerContext
from hardpoint.testing import FakeScheduler
from hardpoint_torch_runtime.worker import TorchWorker, TorchWorkerOptions, create

HIDDEN, HEADS, KV_HEADS, HEAD_SIZE, LAYERS, VOCAB = 16, 4, 2, 4, 2, 37


class LoopBuilder(AttentionMetadataBuilder):
    """Hands the common metadata through; ``reorder_threshold`` is set by tests of the decode-first order."""

    def __init__(self, reorder_threshold: int | None) -> None:
        self.reorder_threshold = reorder_threshold

    def build(self, common: CommonAttentionMetadata, *, fast: bool = False) -> CommonAttentionMetadata:
        del fast
        return common


class LoopAttention(AttentionImpl):
    """Row by row, gathering keys and values through the block table."""

    def __init__(self, params: AttentionLayerParams) -> None:
        self.params = params

    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        block_size = kv_cache.shape[2]
        for token, slot in enumerate(slot_mapping.tolist()):
            if slot >= 0:
                cell = kv_cache[slot // block_size, :, slot % block_size]
                cell.copy_(torch.cat([key[token], value[token]], dim=-1))

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor | None,
        metadata: Any | None,
        output: torch.Tensor,
    ) -> torch.Tensor:
        if metadata is None or kv_cache is None:
            return output.zero_()
        starts = metadata.query_start_loc_cpu
        for row in range(metadata.num_rows):
            first, last = int(starts[row]), int(starts[row + 1])
            length = int(metadata.seq_lens_cpu[row])
            blocks = metadata.block_table[row, : -(-length // metadata.block_size)].long()
            stored = kv_cache[blocks].transpose(1, 2).reshape(-1, self.params.num_kv_heads, kv_cache.shape[-1])
            keys, values = stored[:length].split(self.params.head_size, dim=-1)
            for token in range(first, last):
                visible = length - (last - 1 - token)
                self._attend(query[token], keys[:visible], values[:visible], output[token])
        return output

    def _attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, output: torch.Tensor) -> None:
        group = self.params.num_heads // self.params.num_kv_heads
        keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
        weights = (torch.einsum("hd,thd->ht", query, keys) * self.params.scale).softmax(dim=-1)
        output.copy_(torch.einsum("ht,thd->hd", weights, values))


class LoopBackend(AttentionBackend):
    name = "loop"

    def __init__(self, *, reorder_threshold: int | None = None, kernel_block: int | None = None) -> None:
        self.reorder_threshold = reorder_threshold
        self.kernel_block = kernel_block
        self.refusal: str | None = None

    def refuse(self, need: AttentionNeed) -> str | None:
        del need
        return self.refusal

    def block_sizes(self, need: AttentionNeed) -> BlockSizeRule:
        del need
        if self.kernel_block is not None:
            return BlockSizeRule(multiple_of=None, exact=(self.kernel_block,))
        return BlockSizeRule(multiple_of=1)

    def create_builder(
        self, spec: AttentionSpec, layer_names: Sequence[str], max_rows: int, max_tokens: int, device: torch.device
    ) -> AttentionMetadataBuilder:
        del spec, layer_names, max_rows, max_tokens, device
        return LoopBuilder(self.reorder_threshold)

    def create_impl(self, params: AttentionLayerParams) -> AttentionImpl:
        return LoopAttention(params)


class TinyModel(torch.nn.Module):
    """Embedding plus positions, attention layers with residuals, tied head. ``poisoned`` token id: NaN logits."""

    def __init__(self, ctx: ModelContext) -> None:
        super().__init__()
        assert ctx.config is not None
        self.info = ctx.config.model
        self.table = torch.nn.Parameter(torch.zeros(VOCAB, HIDDEN))
        self.qkv = torch.nn.ParameterList(
            [torch.nn.Parameter(torch.zeros((HEADS + 2 * KV_HEADS) * HEAD_SIZE, HIDDEN)) for _ in range(LAYERS)]
        )
        self.attention = torch.nn.ModuleList(
            [
                ctx.layers.attention(
                    f"layers.{i}.attn", num_heads=HEADS, num_kv_heads=KV_HEADS, head_size=HEAD_SIZE, scale=0.5
                )
                for i in range(LAYERS)
            ]
        )
        self._toolkit = ctx.layers

    def weight_rules(self) -> Sequence[WeightRule]:
        return [WeightRule("table", "table"), WeightRule("qkv.*", "qkv.*")]

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.table[token_ids]

    def forward(
        self,
        token_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediates: torch.Tensor | None = None,
        embeddings: torch.Tensor | None = None,
    ) -> torch.Tensor:
        del intermediates
        if embeddings is None:
            assert token_ids is not None
            embeddings = self.embed(token_ids)
        frequencies = torch.arange(1, HIDDEN + 1, dtype=torch.float32) / HIDDEN
        hidden = embeddings + torch.sin(positions[:, None] * frequencies)
        for weight, attention in zip(self.qkv, self.attention, strict=True):
            sizes = [HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE]
            query, key, value = torch.nn.functional.linear(hidden, weight).split(sizes, dim=-1)
            hidden = hidden + attention(query, key, value)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(hidden, self.table)

    def kv_cache_specs(self) -> Mapping[str, KVCacheSpec]:
        specs: Mapping[str, KVCacheSpec] = self._toolkit.kv_cache_specs()
        return specs

    def named_layers(self) -> Iterable[tuple[str, torch.nn.Module]]:
        return [(f"layers.{i}", layer) for i, layer in enumerate(self.attention)]


class TinyLoader(WeightLoader):
    """Random weights from a fixed seed."""

    def accepts(self, artifact: ModelArtifact) -> bool:
        del artifact
        return True

    def describe(self, artifact: ModelArtifact) -> ModelInfo:
        del artifact
        return tiny_info()

    def num_bytes(self, info: ModelInfo) -> int:
        return sum(tensor.data.nbytes for tensor in self.tensors(info))

    def tensors(self, info: ModelInfo) -> Iterator[WeightTensor]:
        del info
        random = np.random.default_rng(7)
        shapes = {"table": (VOCAB, HIDDEN)}
        shapes |= {f"qkv.{i}": ((HEADS + 2 * KV_HEADS) * HEAD_SIZE, HIDDEN) for i in range(LAYERS)}
        for name, shape in shapes.items():
            yield WeightTensor(name, "float32", shape, random.normal(size=shape).astype(np.float32))


@dataclass
class TinyPlatform(Platform):
    """Takes what the test process has."""

    candidates: tuple[str, ...] = ("loop",)
    budget: int = 1 << 30
    used: int = 1 << 20

    def describe(self, device: LogicalDevice) -> DeviceDescription:
        del device
        return DeviceDescription(device_type="cpu", name="a test machine")

    def check_and_update(self, settings: EngineSettings) -> None:
        settings.worker = "torch"

    def thread_plan(self, world_size: int, environment: Mapping[str, str]) -> ThreadPlan:
        del world_size, environment
        return ThreadPlan(compute_threads=1)

    def attention_candidates(self) -> Sequence[str]:
        return self.candidates

    def memory_budget(self, device: LogicalDevice) -> int:
        del device
        return self.budget

    def memory_used(self, device: LogicalDevice) -> int:
        del device
        return self.used

    def init_worker(self, device: LogicalDevice, threads: ThreadPlan) -> torch.device:
        del device, threads
        return torch.device("cpu")


@dataclass
class TinyPlugins:
    """Plugin access over a table of factories ``(kind, name) -> factory(context)``."""

    factories: dict[tuple[str, str], Callable[[Any], Any]] = field(default_factory=dict)

    def names(self, kind: str) -> tuple[str, ...]:
        return tuple(name for known, name in self.factories if known == kind)

    def context(self, kind: str, name: str) -> PluginContext:
        logger = logging.getLogger(f"test.{kind}")
        return PluginContext(name, 1, frozenset({ProcessRole.WORKER}), logger=logger, distribution="tiny-distribution")

    def create(self, kind: str, name: str, context: PluginContext) -> Any:
        if (kind, name) not in self.factories:
            raise PluginNotFoundError(f"{kind} plugin {name!r} is not installed; installed: {self.names(kind)}")
        return self.factories[kind, name](context)

    def fingerprint(self) -> str:
        return "test"

    def notify(self, hook: str, **arguments: object) -> None:
        del hook, arguments


def tiny_info(**changes: Any) -> ModelInfo:
    fields: dict[str, Any] = {
        "artifact": ModelArtifact(name="tiny", root="/nowhere", files=("tiny.bin",), source="test"),
        "architecture": "TinyForCausalLM",
        "config": {
            "hidden_size": HIDDEN,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_SIZE,
            "num_hidden_layers": LAYERS,
        },
        "max_position": 64,
        "vocab_size": VOCAB,
        "dtype": "float32",
        "loader": "tiny",
        "eos_token_ids": (2,),
    }
    return ModelInfo(**(fields | changes))


def plan_kv(specs: Mapping[str, KVCacheSpec], num_blocks: int, *, block_outermost: bool = False) -> KVCacheConfig:
    """One group with all layers, in either layout of R1.41."""
    names = tuple(specs)
    page = next(iter(specs.values())).page_size_bytes
    total = page * num_blocks * len(names)
    tensor = KVCacheTensor(
        size=total,
        layer_names=names,
        layer_stride=page if block_outermost else page * num_blocks,
        block_stride=page * len(names) if block_outermost else page,
    )
    group = KVCacheGroup(names, spec_to_wire(next(iter(specs.values()))))
    return KVCacheConfig(num_blocks=num_blocks, groups=(group,), tensors=(tensor,))


class TinyWorld:
    """A started worker with its knobs; ``num_blocks`` includes the null block."""

    max_seqs, max_tokens, max_len, block_size, num_blocks = 6, 32, 48, 4, 40

    def __init__(self) -> None:
        self.backend = LoopBackend()
        self.platform = TinyPlatform()
        self.plugins = TinyPlugins(
            {
                ("attention_backend", "loop"): lambda ctx: self.backend,
                ("model", "TinyForCausalLM"): TinyModel,
                ("weight_loader", "tiny"): lambda ctx: TinyLoader(),
            }
        )

    def config(self, **changes: Any) -> WorkerConfig:
        fields: dict[str, Any] = {
            "model": tiny_info(),
            "dtype": "float32",
            "kv_cache_dtype": "float32",
            "block_size": self.block_size,
            "max_model_len": self.max_len,
            "max_num_seqs": self.max_seqs,
            "max_num_batched_tokens": self.max_tokens,
            "threads": ThreadPlan(compute_threads=1),
            "show_progress": False,
        }
        return WorkerConfig(**(fields | changes))

    def context(self, **changes: Any) -> WorkerContext:
        base = self.plugins.context("worker", "torch")
        return WorkerContext(
            base.name,
            base.api_version,
            base.roles,
            rank=0,
            platform=self.platform,
            logger=base.logger,
            plugins=self.plugins,
            config=self.config(**changes),
        )

    def create(self, options: TorchWorkerOptions | None = None, **changes: Any) -> TorchWorker:
        worker = create(self.context(**changes), options or TorchWorkerOptions())
        assert isinstance(worker, TorchWorker)
        return worker

    def start(
        self, options: TorchWorkerOptions | None = None, *, block_outermost: bool = False, **changes: Any
    ) -> TorchWorker:
        worker = self.create(options, **changes)
        self.boot(worker, block_outermost=block_outermost)
        return worker

    def boot(self, worker: TorchWorker, *, block_outermost: bool = False) -> None:
        """Up to the first step."""
        worker.init_device()
        worker.load_model()
        specs = dict(worker.loaded.model.kv_cache_specs())
        worker.initialize_kv_cache(plan_kv(specs, self.num_blocks, block_outermost=block_outermost))

    def scheduler(self, *, max_tokens: int | None = None) -> FakeScheduler:
        limits = SchedulerLimits(
            max_num_seqs=self.max_seqs, max_num_batched_tokens=max_tokens or self.max_tokens, max_model_len=self.max_len
        )
        return FakeScheduler(limits, num_blocks=self.num_blocks, block_size=self.block_size)

    def engine_request(self, name: str, prompt: Sequence[int], **sampling: Any) -> EngineRequest:
        params = SamplingParams(**({"temperature": 0.0, "max_tokens": 8} | sampling))
        return EngineRequest(request_id=name, prompt_token_ids=np.asarray(prompt, dtype=np.int32), sampling=params)

    def generate(
        self,
        worker: TorchWorker,
        requests: Sequence[EngineRequest],
        *,
        max_tokens: int | None = None,
        scheduler: FakeScheduler | None = None,
    ) -> dict[str, list[int]]:
        """All requests through the step loop, submitted together."""
        scheduler = scheduler or self.scheduler(max_tokens=max_tokens)
        tokens: dict[str, list[int]] = {}
        for record in requests:
            assert scheduler.add(record) is None
            tokens[record.request_id] = []
        while scheduler.has_work():
            step = scheduler.schedule()
            output = worker.execute(step)
            for entry in scheduler.update(step, output):  # type: ignore[arg-type]
                tokens[entry.request_id] += entry.new_token_ids
        return tokens


def hand_step(
    step_id: int,
    rows: Sequence[tuple[int, int, int, int, bool]] = (),
    *,
    new_rows: Sequence[NewRow] = (),
    new_blocks: Sequence[Sequence[int]] | None = None,
    finished: Sequence[int] = (),
    preempted: Sequence[int] = (),
    zero: Sequence[int] = (),
    defers_sampling: bool = False,
    **extra: Any,
) -> SchedulerOutput:
    """``rows`` are (slot, generation, computed, scheduled, samples); ``new_blocks`` lists appended ids per row."""

    def ints(values: Iterable[int]) -> np.ndarray:
        return np.fromiter(values, dtype=np.int32)

    appended = new_blocks or [()] * len(rows)
    return SchedulerOutput(
        step_id=step_id,
        slots=ints(row[0] for row in rows),
        generations=ints(row[1] for row in rows),
        num_computed_tokens=ints(row[2] for row in rows),
        num_scheduled_tokens=ints(row[3] for row in rows),
        samples=np.asarray([row[4] for row in rows], dtype=np.bool_),
        new_rows=tuple(new_rows),
        new_blocks=(BlockUpdate(ints(len(ids) for ids in appended), ints(i for ids in appended for i in ids)),),
        finished_slots=ints(finished),
        preempted_slots=ints(preempted),
        blocks_to_zero=ints(zero),
        num_common_prefix_blocks=(0,),
        num_tokens=sum(row[3] for row in rows),
        defers_sampling=defers_sampling,
        **extra,
    )


def hand_row(
    slot: int,
    tokens: Sequence[int],
    blocks: Sequence[int],
    *,
    generation: int = 1,
    num_prompt_tokens: int | None = None,
    request_id: str | None = None,
    resumed: bool = False,
    **sampling: Any,
) -> NewRow:
    """A greedy row unless ``sampling`` says otherwise."""
    return NewRow(
        request_id=request_id or f"r{slot}.{generation}",
        slot=slot,
        generation=generation,
        token_ids=np.asarray(tokens, dtype=np.int32),
        num_prompt_tokens=len(tokens) if num_prompt_tokens is None else num_prompt_tokens,
        block_ids=(np.asarray(blocks, dtype=np.int32),),
        sampling=SamplingParams(**({"temperature": 0.0} | sampling)),
        resumed=resumed,
    )


@pytest.fixture
def world() -> TinyWorld:
    return TinyWorld()


@pytest.fixture
def worker_options() -> type[TorchWorkerOptions]:
    return TorchWorkerOptions


@pytest.fixture
def make_step() -> Callable[..., SchedulerOutput]:
    return hand_step


@pytest.fixture
def make_row() -> Callable[..., NewRow]:
    return hand_row


@pytest.fixture
def kv_plan() -> Callable[..., KVCacheConfig]:
    return plan_kv


@pytest.fixture
def loop_backend() -> type[LoopBackend]:
    return LoopBackend


@pytest.fixture(scope="session")
def hand_builders() -> tuple[Callable[..., SchedulerOutput], Callable[..., NewRow]]:
    return hand_step, hand_row


@pytest.fixture(scope="session")
def tiny_world() -> tuple[TinyWorld, TorchWorker]:
    """One started worker shared by property tests."""
    world = TinyWorld()
    return world, world.start()
