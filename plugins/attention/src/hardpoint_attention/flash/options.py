"""What a user may set for the FlashAttention backend."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["FlashOptions"]


class FlashOptions(BaseModel):
    """Set under ``plugins.attention_backend.flash_attn``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_splits: int = Field(
        default=32, ge=1, description="pieces that the keys of a row may be split into in captured steps"
    )
    max_graph_tokens: int = Field(
        default=512, ge=0, description="largest captured step in tokens; larger ones leave the splits to the kernel"
    )
    cascade: str = Field(
        default="estimate",
        description="when to attend to a shared prefix once for all requests: `estimate`, `always`, `never` or a "
        "registered policy",
    )
    dcp_interleave: int = Field(
        default=1, ge=1, description="tokens dealt to a rank at a time where ranks share contexts"
    )
