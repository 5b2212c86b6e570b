"""Whether a model can take what a request brings beside its tokens."""

from __future__ import annotations

from hardpoint.interfaces.step import NewRow
from hardpoint_torch_runtime.runner.encoder_outputs import EncoderModel
from hardpoint_torch_runtime.runner.encoder_stage import refuse_inputs
from hardpoint_torch_runtime.runner.media_stage import MediaModel, refuse_media

__all__ = ["refuse_features"]


def refuse_features(model: object, row: NewRow) -> str | None:
    """Why ``model`` cannot compute a request with the features of ``row``, in words a client may see, or None."""
    if isinstance(model, MediaModel):
        return refuse_media(model, row)
    if isinstance(model, EncoderModel):
        return refuse_inputs(model, row.features)
    return f"this model takes no {row.features[0].modality} input" if row.features else None
