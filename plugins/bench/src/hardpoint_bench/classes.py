"""Precision classes: how each side stores and computes one model where engines are compared at equal precision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from hardpoint.errors import ConfigError

__all__ = ["AS_IT_IS", "CLASSES", "EXPORTS", "VARIANTS", "PrecisionClass", "chosen_classes", "variant_of"]

AS_IT_IS = ""
"""In the place of a variant's name: the peer loads the very files that are measured here."""

VARIANTS = ("fp32.gguf", "q8_0.gguf", "hf-fp32", "hf-w8a8")
"""What ``hardpoint bench convert`` writes."""

EXPORTS: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "openvino-fp32": ("--weight-format", "fp32"),
        "openvino-int8": ("--weight-format", "int8"),
        "openvino-int4": ("--weight-format", "int4", "--group-size", "64", "--ratio", "1.0"),
    }
)
"""What it writes beyond that where OpenVINO's own converter is installed, and how that is told to."""


@dataclass(frozen=True, slots=True)
class PrecisionClass:
    """``quantization`` and ``kv_cache_dtype``: our settings. ``variants``: by peer, names in the folder of converted
    models, best first. A peer that is not among them has nothing to offer in the class.
    """

    name: str
    title: str
    quantization: str | None
    kv_cache_dtype: str
    variants: Mapping[str, Sequence[str]]


CLASSES: Mapping[str, PrecisionClass] = MappingProxyType(
    {
        one.name: one
        for one in (
            PrecisionClass(
                "fp32",
                "float32",
                None,
                "float32",
                {
                    "vllm": ("hf-fp32",),
                    "llama.cpp": ("fp32.gguf",),
                    # It reads no float32 in a GGUF file.
                    "openvino-genai": ("openvino-fp32",),
                    "transformers": ("hf-fp32", AS_IT_IS),
                },
            ),
            PrecisionClass(
                "int8",
                "8 bits",
                "int8",
                # No peer of a class below float32 keeps more of keys and values; some keep less.
                "bfloat16",
                {"vllm": ("hf-w8a8",), "llama.cpp": ("q8_0.gguf",), "openvino-genai": ("openvino-int8", "q8_0.gguf")},
            ),
            PrecisionClass(
                "4bit",
                "4 bits",
                "gguf",
                "bfloat16",
                {"llama.cpp": (AS_IT_IS,), "openvino-genai": ("openvino-int4", AS_IT_IS)},
            ),
        )
    }
)


def chosen_classes(names: str | None) -> list[PrecisionClass]:
    """By ``names`` with commas between them, all of them for None. Raises ``ConfigError`` for one that is unknown."""
    wanted = list(CLASSES) if names is None else [name.strip() for name in names.split(",")]
    for name in wanted:
        if name not in CLASSES:
            raise ConfigError(f"--classes {name!r}: no such class; there are: {', '.join(CLASSES)}")
        if wanted.count(name) > 1:
            raise ConfigError(f"--classes {name}: it is named twice")
    return [CLASSES[name] for name in wanted]


def variant_of(chosen: PrecisionClass, peer: str, folder: Path | None) -> str | None:
    """The path that ``peer`` loads in the class, :data:`AS_IT_IS` for what we load; None where there is nothing."""
    for name in chosen.variants.get(peer, ()):
        if name == AS_IT_IS:
            return AS_IT_IS
        if folder is not None and (folder / name).exists():
            return str(folder / name)
    return None
