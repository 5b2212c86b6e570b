"""The table of GGUF architectures, and which of its rows a file is of."""

from __future__ import annotations

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


def architectures() -> list[str]:
    """Names of the model plugins whose files can be read, in alphabetical order."""
    return sorted({row.architecture for row in ROWS})


def find_architecture(file: GgufFile) -> GgufArchitecture:
    """The row for a file. Raises ``UnsupportedModelError`` naming the file and the known architectures."""
    name = file.metadata.get("general.architecture")
    for row in ROWS:
        if row.gguf == name and (row.applies is None or row.applies(file)):
            return row
    known = ", ".join(sorted({row.gguf for row in ROWS}))
    raise UnsupportedModelError(f"{file.path}: GGUF architecture {name!r} is not supported; supported are {known}")
