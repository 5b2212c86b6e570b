"""The torch worker and model runner for Hardpoint."""

from hardpoint_torch_runtime.forward_context import (
    BatchDescriptor,
    ForwardContext,
    GraphMode,
    get_forward_context,
    has_forward_context,
    set_forward_context,
)
from hardpoint_torch_runtime.forward_scope import ForwardScopes, StaticContext
from hardpoint_torch_runtime.layers import LayerToolkit
from hardpoint_torch_runtime.runner.assembly import RunnerParts
from hardpoint_torch_runtime.runner.draft_verification import DraftProposer
from hardpoint_torch_runtime.runner.encoder_outputs import EncoderModel
from hardpoint_torch_runtime.runner.extensions import RunnerExtension
from hardpoint_torch_runtime.runner.media_stage import MediaModel
from hardpoint_torch_runtime.runner.position_axes import AxisPositions
from hardpoint_torch_runtime.runner.streams import CopyStream, DeviceEvent, DeviceStreams, StreamPlatform
from hardpoint_torch_runtime.weights import WeightReport, load_weights
from hardpoint_torch_runtime.worker import TorchWorker, TorchWorkerOptions

__all__ = [
    "AxisPositions",
    "BatchDescriptor",
    "CopyStream",
    "DeviceEvent",
    "DeviceStreams",
    "DraftProposer",
    "EncoderModel",
    "ForwardContext",
    "ForwardScopes",
    "GraphMode",
    "LayerToolkit",
    "MediaModel",
    "RunnerExtension",
    "RunnerParts",
    "StaticContext",
    "StreamPlatform",
    "TorchWorker",
    "TorchWorkerOptions",
    "WeightReport",
    "get_forward_context",
    "has_forward_context",
    "load_weights",
    "set_forward_context",
]
