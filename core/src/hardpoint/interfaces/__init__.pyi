"""The public contracts of Hardpoint: abstract classes and frozen records, one module per plugin kind.

The lists are packed by hand: one name a line would bury the modules they come from.
"""

# fmt: off
# isort: off
from __future__ import annotations

from hardpoint.interfaces.attention import (
    AttentionBackend, AttentionImpl, AttentionKind, AttentionLayerParams, AttentionMetadataBuilder, AttentionNeed,
    CommonAttentionMetadata, GraphSupport, KVWriteMode,
)
from hardpoint.interfaces.block_size import BLOCK_SIZES_CAPABILITY, BlockSizeRule, smallest_block_size
from hardpoint.interfaces.chat_renderer import ChatRenderer, ChatRendererContext
from hardpoint.interfaces.cli_command import CliCommand
from hardpoint.interfaces.communicator import Communicator
from hardpoint.interfaces.compiler import Compiler, LoweredRange, TokenRange
from hardpoint.interfaces.custom_op import ANY_DEVICE, CustomOperator, CustomOps
from hardpoint.interfaces.devices import DeviceMap, LogicalDevice, PhysicalDevice, VisibleDevice
from hardpoint.interfaces.endpoint import Endpoint, EndpointContext, ServerFacts
from hardpoint.interfaces.engine import (
    CompletionOutput, EmbeddingOutput, EngineClient, Logprob, ModelLimits, ModelRouter, PositionLogprobs, Prompt,
    RequestMetrics, RequestOptions, RequestOutput,
)
from hardpoint.interfaces.executor import Executor, ExecutorContext
from hardpoint.interfaces.graph_backend import CapturedGraph, GraphBackend
from hardpoint.interfaces.io_processor import IOProcessor, IOProcessorContext, IORequest
from hardpoint.interfaces.kernel_override import KernelCase, KernelOverride
from hardpoint.interfaces.kv_cache import (
    BlockHash, BlockHashWithGroup, HashContext, HashFunction, KVBlockPool, KVCacheConfig, KVCacheGroup, KVCacheManager,
    KVCacheTensor, KVLayout, KVPlanRequest, KVSpecRegistration, LayerSpec, NULL_BLOCK_ID, group_key,
)
from hardpoint.interfaces.kv_cache_specs import (
    AttentionSpec, ChunkedLocalAttentionSpec, CrossAttentionSpec, EncoderOnlyAttentionSpec, FullAttentionSpec,
    KVCacheSpec, MLASpec, MambaCacheMode, MambaSpec, MixedSizeSpec, SlidingWindowSpec, WireSpec, spec_from_wire,
    spec_to_wire,
)
from hardpoint.interfaces.kv_dtypes import (
    DTYPE_BYTES, KVQuantization, KVStorage, dtype_bytes, kv_storage, register_kv_storage,
)
from hardpoint.interfaces.kv_events import (
    AllBlocksCleared, BlocksRemoved, BlocksStored, DEVICE_MEDIUM, KVEvent, KVEventBatch,
)
from hardpoint.interfaces.logits_processor import LogitsProcessor
from hardpoint.interfaces.model import (
    Model, ModelContext, StageRange, StageOutput, WHOLE_PROMPTS_CAPABILITY, WeightRule,
)
from hardpoint.interfaces.model_source import (
    ModelArtifact, ModelInfo, ModelSource, WeightLoader, WeightLoaderContext, WeightTensor,
)
from hardpoint.interfaces.platform import DeviceDescription, EngineSettings, Platform, PlatformKind, ThreadPlan
from hardpoint.interfaces.plugin import (
    NoOptions, PluginAccess, PluginContext, PluginDeclaration, ProbeResult,
    ProbeStatus, ProcessRole, declaration_of, plugin,
)
from hardpoint.interfaces.quantization import LinearMethod, LinearShape, QuantizationMethod
from hardpoint.interfaces.request import (
    AdapterRef, BoolArray, EngineOutput, EngineOutputs, EngineRequest, Feature, FinishReason, Float32Array, Int32Array,
    OutputKind, POOLING_METHODS, PoolingParams, RequestWork, SamplingParams, SchedulerStats, TokenLogprobs,
)
from hardpoint.interfaces.scheduler import (
    ENCODER_INPUTS, EncoderInputs, ExternalMatch, LoadResult, PauseMode, RequestView, Scheduler, SchedulerContext,
    SchedulerExtension, SchedulerLimits, WaitReason,
)
from hardpoint.interfaces.scheduling_policy import RequestQueue, SchedulingPolicy
from hardpoint.interfaces.stat_logger import MetricsExporter, RequestFinished, StatLogger, StepObserved, TokensEmitted
from hardpoint.interfaces.step import (
    BlockUpdate, Deferred, GrammarMask, LogprobArrays, NewRow, RowFailure, RunnerOutput, SchedulerOutput, TokenUpdate,
)
from hardpoint.interfaces.tokenizer import DecodeStream, Tokenizer, TokenizerProvider
from hardpoint.interfaces.worker import (
    ParallelSlice, PendingOutput, RpcMethod, WORKER_RPC, Worker, WorkerConfig, WorkerContext,
)

__all__ = [
    "ANY_DEVICE", "BLOCK_SIZES_CAPABILITY", "DEVICE_MEDIUM", "DTYPE_BYTES", "ENCODER_INPUTS", "NULL_BLOCK_ID",
    "POOLING_METHODS", "WHOLE_PROMPTS_CAPABILITY", "WORKER_RPC", "AdapterRef", "AllBlocksCleared", "AttentionBackend",
    "AttentionImpl", "AttentionKind", "AttentionLayerParams", "AttentionMetadataBuilder", "AttentionNeed",
    "AttentionSpec", "BlockHash", "BlockHashWithGroup", "BlockSizeRule", "BlockUpdate", "BlocksRemoved", "BlocksStored",
    "BoolArray", "CapturedGraph", "ChatRenderer", "ChatRendererContext", "ChunkedLocalAttentionSpec", "CliCommand",
    "CommonAttentionMetadata", "Communicator", "Compiler", "CompletionOutput", "CrossAttentionSpec", "CustomOperator",
    "CustomOps", "DecodeStream", "Deferred", "DeviceDescription", "DeviceMap", "EmbeddingOutput", "EncoderInputs",
    "EncoderOnlyAttentionSpec", "Endpoint", "EndpointContext", "EngineClient", "EngineOutput", "EngineOutputs",
    "EngineRequest", "EngineSettings", "Executor", "ExecutorContext", "ExternalMatch", "Feature", "FinishReason",
    "Float32Array", "FullAttentionSpec", "GrammarMask", "GraphBackend", "GraphSupport", "HashContext", "HashFunction",
    "IOProcessor", "IOProcessorContext", "IORequest", "Int32Array", "KVBlockPool", "KVCacheConfig", "KVCacheGroup",
    "KVCacheManager", "KVCacheSpec", "KVCacheTensor", "KVEvent", "KVEventBatch", "KVLayout", "KVPlanRequest",
    "KVQuantization", "KVSpecRegistration", "KVStorage", "KVWriteMode", "KernelCase", "KernelOverride", "LayerSpec",
    "LinearMethod", "LinearShape", "LoadResult", "LogicalDevice", "LogitsProcessor", "Logprob", "LogprobArrays",
    "LoweredRange", "MLASpec", "MambaCacheMode", "MambaSpec", "MetricsExporter", "MixedSizeSpec", "Model",
    "ModelArtifact", "ModelContext", "ModelInfo", "ModelLimits", "ModelRouter", "ModelSource", "NewRow", "NoOptions",
    "OutputKind", "ParallelSlice", "PauseMode", "PendingOutput", "PhysicalDevice", "Platform", "PlatformKind",
    "PluginAccess", "PluginContext", "PluginDeclaration", "PoolingParams", "PositionLogprobs", "ProbeResult",
    "ProbeStatus", "ProcessRole", "Prompt", "QuantizationMethod", "RequestFinished", "RequestMetrics", "RequestOptions",
    "RequestOutput", "RequestQueue", "RequestView", "RequestWork", "RowFailure", "RpcMethod", "RunnerOutput",
    "SamplingParams", "Scheduler", "SchedulerContext", "SchedulerExtension", "SchedulerLimits", "SchedulerOutput",
    "SchedulerStats", "SchedulingPolicy", "ServerFacts", "SlidingWindowSpec", "StageOutput", "StageRange", "StatLogger",
    "StepObserved", "ThreadPlan", "TokenLogprobs", "TokenRange", "TokenUpdate", "Tokenizer", "TokenizerProvider",
    "TokensEmitted", "VisibleDevice", "WaitReason", "WeightLoader", "WeightLoaderContext", "WeightRule", "WeightTensor",
    "WireSpec", "Worker", "WorkerConfig", "WorkerContext", "declaration_of", "dtype_bytes", "group_key", "kv_storage",
    "plugin", "register_kv_storage", "smallest_block_size", "spec_from_wire", "spec_to_wire",
]
