"""From a worker's configuration to a model with weights, all of it through plugins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hardpoint.errors import ConfigError, PluginLoadError, PluginNotFoundError, UnsupportedModelError
from hardpoint.interfaces.communicator import Communicator
from hardpoint.interfaces.kv_cache_specs import MambaCacheMode
from hardpoint.interfaces.model import Model, ModelContext, StageRange
from hardpoint.interfaces.model_source import WeightLoader, WeightLoaderContext
from hardpoint.interfaces.plugin import PluginAccess
from hardpoint.interfaces.quantization import QuantizationMethod
from hardpoint.interfaces.worker import WorkerConfig
from hardpoint_torch_runtime.backend_selection import AttentionChoice
from hardpoint_torch_runtime.layers import ContextShards, LayerToolkit, LoadingObserver
from hardpoint_torch_runtime.model_choice import ModelChoice
from hardpoint_torch_runtime.ops.seams import Kernels
from hardpoint_torch_runtime.plugin_access import create_in_worker, extend_context
from hardpoint_torch_runtime.stored_quantization import require_dense_weights
from hardpoint_torch_runtime.weights import UnpackingPlatform, WeightInventor, WeightReport, load_weights

__all__ = ["DTYPES", "LoadedModel", "create_model", "load_model", "torch_dtype"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """``toolkit`` knows the attention layers the model created, and ``attention`` what they compute with."""

    model: Model
    toolkit: LayerToolkit
    report: WeightReport
    attention: AttentionChoice


def torch_dtype(name: str) -> torch.dtype:
    """The compute dtype by name. Raises ``ConfigError`` for any other."""
    if name not in DTYPES:
        raise ConfigError(f"dtype {name!r} is unknown to the torch worker; allowed for --dtype: {', '.join(DTYPES)}")
    return DTYPES[name]


def load_model(
    plugins: PluginAccess,
    config: WorkerConfig,
    attend: Callable[[LayerToolkit], AttentionChoice],
    device: torch.device,
    kernels: Kernels | None = None,
    communicator: Communicator | None = None,
    state_mode: MambaCacheMode = MambaCacheMode.NONE,
    context_shards: ContextShards | None = None,
    choice: ModelChoice | None = None,
) -> LoadedModel:
    """Create the architecture's model, with ``kernels`` at the seams, and fill it with this rank's share.

    ``attend`` binds the layers to an attention backend once all of them are there, before any weight is read.
    ``choice``: the model plugin, by default the one of the architecture's name.

    Raises ``UnsupportedModelError`` for an architecture without a plugin and, before anything is allocated, for weights
    stored quantized while no method was chosen; ``ModelFormatError`` for weights that do not fit; ``ConfigError`` for a
    quantization method that refuses or that the platform does not run.
    """
    quantization = _quantization(plugins, config, device)
    platform: object = plugins.context("weight_loader", config.model.loader).platform
    unpack = platform.unpack if isinstance(platform, UnpackingPlatform) else None
    is_packed = quantization is not None and bool(quantization.accepts_packed)
    loader = _weight_loader(plugins, config, packed=is_packed or unpack is not None)
    if quantization is None and not isinstance(loader, WeightInventor):
        require_dense_weights(config.model)
    toolkit = LayerToolkit.create(
        config,
        device=device,
        dtype=torch_dtype(config.dtype),
        quantization=quantization,
        communicator=communicator,
        kernels=kernels,
        state_mode=state_mode,
        context_shards=context_shards,
    )
    model = create_model(plugins, config, toolkit, choice)
    attention = attend(toolkit)
    shown, rank = config.show_progress, config.parallel.rank
    report = load_weights(model, loader, config.model, show_progress=shown, rank=rank, unpack=unpack)
    observer: object = quantization
    if isinstance(observer, LoadingObserver):
        observer.loading_ended()
    if isinstance(model, torch.nn.Module):
        model.eval().requires_grad_(False)
    return LoadedModel(model, toolkit, report, attention)


def create_model(
    plugins: PluginAccess, config: WorkerConfig, toolkit: LayerToolkit, choice: ModelChoice | None = None
) -> Model:
    """The architecture's model without weights. Raises as :func:`load_model` does."""
    architecture = config.model.architecture
    name = architecture if choice is None else choice.plugin
    num_layers = config.model.config.get("num_hidden_layers")
    stage = StageRange(0, num_layers) if isinstance(num_layers, int) else None
    try:
        base = plugins.context("model", name)
        context = extend_context(ModelContext, base, config=config, stage=stage, layers=toolkit)
        model: Model = plugins.create("model", name, context)
    except PluginNotFoundError as error:
        raise UnsupportedModelError(
            f"nothing installed runs the architecture {architecture!r} of {config.model.artifact.name!r}: {error}"
        ) from error
    except PluginLoadError as error:
        if not _is_lack_of_memory(error.__cause__):
            raise
        raise ConfigError(
            f"{config.model.artifact.name!r} needs more memory for weights and positions in {config.dtype} than "
            f"there is: {str(error.__cause__).partition(chr(10))[0]}; choose a smaller model or --max-model-len, a "
            "narrower --dtype or a larger --tensor-parallel-size, or correct the sizes in its configuration"
        ) from error
    return model


def _is_lack_of_memory(cause: BaseException | None) -> bool:
    """torch has a class of its own for that on accelerators only."""
    said = str(cause)
    return isinstance(cause, MemoryError | torch.OutOfMemoryError) or (
        isinstance(cause, RuntimeError)
        and ("can't allocate memory" in said or "Storage size calculation overflowed" in said)
    )


def _weight_loader(plugins: PluginAccess, config: WorkerConfig, *, packed: bool) -> WeightLoader:
    name = config.model.loader
    context = extend_context(WeightLoaderContext, plugins.context("weight_loader", name), packed=packed)
    loader: WeightLoader = plugins.create("weight_loader", name, context)
    return loader


def _quantization(plugins: PluginAccess, config: WorkerConfig, device: torch.device) -> QuantizationMethod | None:
    if config.quantization is None:
        return None
    name = config.quantization
    platform = plugins.context("quantization", name).platform
    if platform is not None and platform.supported_quantization and name not in platform.supported_quantization:
        allowed = ", ".join(platform.supported_quantization)
        raise ConfigError(
            f"platform {platform.name!r} runs no quantization {name!r}; allowed: {allowed}; change --quantization"
        )
    method: QuantizationMethod = create_in_worker(plugins, "quantization", name, config, device)
    reason = method.refuse(config.model, device.type)
    if reason is not None:
        raise ConfigError(f"quantization {name!r} refuses this model: {reason}; choose another with --quantization")
    return method
