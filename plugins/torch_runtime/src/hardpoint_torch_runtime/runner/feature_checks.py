"""Whether a model can take what a request brings beside its tokens."""

from __future__ import annotations

import msgspec

from hardpoint.interfaces.step import NewRow
from hardpoint_torch_runtime.runner.encoder_outputs import EncoderModel
from hardpoint_torch_runtime.runner.encoder_stage import refuse_inputs
from hardpoint_torch_runtime.runner.media_stage import MediaModel, refuse_media, sound_media

__all__ = ["refuse_features", "without_faults"]


def refuse_features(model: object, row: NewRow) -> str | None:
    """Why ``model`` cannot compute a request with the features of ``row``, in words a client may see, or None."""
    if isinstance(model, MediaModel):
        return refuse_media(model, row)
    if isinstance(model, EncoderModel):
        return refuse_inputs(model, row.features)
    return f"this model takes no {row.features[0].modality} input" if row.features else None


def without_faults(model: object, row: NewRow) -> NewRow:
    """A refused row as those see it that keep state of rows: with no feature that ``model`` could not work with."""
    if not row.features:
        return row
    sound = sound_media(model, row) if isinstance(model, MediaModel) else ()
    return msgspec.structs.replace(row, features=sound)
