"""Refuses checkpoints whose weights are stored quantized, where no method was chosen that reads them.

Without this such a model would be built at full size first, and fail on tensors that its plugin does not know.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hardpoint.errors import ModelFormatError, UnsupportedModelError
from hardpoint.interfaces.model_source import ModelInfo

__all__ = ["require_dense_weights", "stored_method"]

_FIELDS = ("quantization_config", "compression_config", "quantization")
"""Where it is said: by most, by older files of compressed-tensors, and by MLX."""
_PARTS = ("text_config",)
_MLX = "mlx"


def stored_method(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """The method that the weights are stored by, and the field that says so; None for dense ones.

    Raises ``ModelFormatError`` for a field that is no object or does not name a method.
    """
    for where, told in _told(config):
        if not isinstance(told, Mapping):
            raise ModelFormatError(
                f"the field {where!r} is {told!r:.80}, but must be an object that says how weights are stored; "
                "remove it if they are dense"
            )
        method = told.get("quant_method") or _unnamed(where, told)
        if not isinstance(method, str):
            raise ModelFormatError(
                f"the field {where!r} names no method ('quant_method' is {told.get('quant_method')!r:.80}); "
                "name it, or remove the field if the weights are dense"
            )
        return method, where
    return None


def _told(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for prefix, part in (("", config), *((f"{name}.", config.get(name)) for name in _PARTS)):
        if isinstance(part, Mapping):
            for name in _FIELDS:
                # Absent, null and {} all stand for dense weights.
                if part.get(name):
                    yield f"{prefix}{name}", part[name]


def _unnamed(where: str, told: Mapping[str, Any]) -> str | None:
    """Files written before methods had names, and those of programs that have but one."""
    if any(told.get(f"{prefix}load_in_{bits}bit") for prefix in ("", "_") for bits in (4, 8)):
        return "bitsandbytes"
    if where.endswith("quantization") and "bits" in told:
        return _MLX
    return "compressed-tensors" if "config_groups" in told else None


def require_dense_weights(info: ModelInfo) -> None:
    """Raise ``UnsupportedModelError`` naming the method and the field, unless the weights are dense."""
    found = stored_method(info.config)
    if found is None:
        return
    method, where = found
    raise UnsupportedModelError(
        f"the weights of {info.artifact.name!r} are stored quantized by {method!r:.80} (field {where!r} of its "
        "configuration), which is not read; use a dense checkpoint (float32, bfloat16 or float16), which "
        "--quantization quantizes while it is loaded, or a GGUF file, or install a plugin that reads this and name it "
        "with --quantization"
    )
