"""The table of GGUF architectures, and which of its rows a file is of."""

from __future__ import annotations

from collections.abc import Mapping

from hardpoint.errors import UnsupportedModelError
from hardpoint_model_io.formats.gguf import GgufFile
from hardpoint_model_io.formats.gguf_record import GgufArchitecture
from hardpoint_model_io.formats.gguf_rows_classic import CLASSIC_ROWS
from hardpoint_model_io.formats.gguf_rows_decoders import DECODER_ROWS
from hardpoint_model_io.formats.gguf_rows_encdec import ENCODER_DECODER_ROWS
from hardpoint_model_io.formats.gguf_rows_encoders import ENCODER_ROWS
from hardpoint_model_io.formats.gguf_rows_large import LARGE_ROWS
from hardpoint_model_io.formats.gguf_rows_mixtures import MIXTURE_ROWS
from hardpoint_model_io.formats.gguf_rows_recurrent import RECURRENT_ROWS

__all__ = ["ROWS", "architectures", "find_architecture"]

ROWS: tuple[GgufArchitecture, ...] = (
    *DECODER_ROWS,
    *CLASSIC_ROWS,
    *MIXTURE_ROWS,
    *LARGE_ROWS,
    *RECURRENT_ROWS,
    *ENCODER_ROWS,
    *ENCODER_DECODER_ROWS,
)


_ELSEWHERE: Mapping[str, str] = {
    "clip": "is the half of a model that sees or hears (often called mmproj); such models are read from safetensors",
    "t5encoder": "is the encoder of a T5 alone, which no model plugin here computes; supported is 't5'",
    "gemma-embedding": "is a Gemma that looks both ways, which no model plugin here computes; supported is 'gemma3'",
    "llama-embed": "is a Llama that looks both ways, which no model plugin here computes; supported is 'llama'",
}
"""Names that files of supported families go by, and cannot be read under."""
_TYPES: Mapping[str, str] = {
    "adapter": "holds a LoRA adapter and no model; adapters are read from safetensors",
    "mmproj": _ELSEWHERE["clip"],
}
"""By ``general.type``, what is no model on its own."""


def architectures() -> list[str]:
    """Names of the model plugins whose files can be read, in alphabetical order."""
    return sorted({row.architecture for row in ROWS})


def find_architecture(file: GgufFile) -> GgufArchitecture:
    """The row for a file. Raises ``UnsupportedModelError`` naming the file, and the known architectures or why this one
    is none."""
    name, kind = file.metadata.get("general.architecture"), file.metadata.get("general.type")
    if reason := _TYPES.get(kind) if isinstance(kind, str) else None:
        raise UnsupportedModelError(f"{file.path}: the file (of the type {kind!r}) {reason}")
    for row in ROWS:
        if row.gguf == name and (row.applies is None or row.applies(file)):
            return row
    if reason := _ELSEWHERE.get(name) if isinstance(name, str) else None:
        raise UnsupportedModelError(f"{file.path}: GGUF architecture {name!r} {reason}")
    known = ", ".join(sorted({row.gguf for row in ROWS}))
    raise UnsupportedModelError(f"{file.path}: GGUF architecture {name!r} is not supported; supported are {known}")
