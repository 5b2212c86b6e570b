"""Where checkpoints of Granite keep gates and experts, under the names of older and newer files."""

from __future__ import annotations

from hardpoint.interfaces.model import WeightRule
from hardpoint_models.causal import LAYER

__all__ = ["EXPERT_RULES"]

_SPARSE = f"{LAYER}.block_sparse_moe"
_EXPERTS = f"{_SPARSE}.experts.*"
EXPERT_RULES = (
    WeightRule(f"{_SPARSE}.router.layer.weight", f"{LAYER}.mlp.gate.weight"),
    WeightRule(f"{_SPARSE}.router.weight", f"{LAYER}.mlp.gate.weight"),
    WeightRule(f"{_EXPERTS}.gate_proj.*", f"{LAYER}.mlp.experts.*.gate_up_proj.*", "gate"),
    WeightRule(f"{_EXPERTS}.up_proj.*", f"{LAYER}.mlp.experts.*.gate_up_proj.*", "up"),
    WeightRule(f"{_EXPERTS}.down_proj.*", f"{LAYER}.mlp.experts.*.down_proj.*"),
    *(
        WeightRule(stack, None, unstacked=(f"{_EXPERTS}.gate_proj.weight", f"{_EXPERTS}.up_proj.weight"))
        for stack in (f"{_SPARSE}.input_linear.weight", f"{_SPARSE}.experts.gate_up_proj")
    ),
    *(
        WeightRule(stack, None, unstacked=(f"{_EXPERTS}.down_proj.weight",))
        for stack in (f"{_SPARSE}.output_linear.weight", f"{_SPARSE}.experts.down_proj")
    ),
)
