"""Loading stored tensors into a model by its declared rules."""

from hardpoint_torch_runtime.weights.invented import WeightInventor
from hardpoint_torch_runtime.weights.loading import UnpackingPlatform, load_weights, shared_tensor
from hardpoint_torch_runtime.weights.report import PartialModel, WeightReport
from hardpoint_torch_runtime.weights.rules import RuleBook, WeightPlan
from hardpoint_torch_runtime.weights.stacks import StackRule

__all__ = [
    "PartialModel",
    "RuleBook",
    "StackRule",
    "UnpackingPlatform",
    "WeightInventor",
    "WeightPlan",
    "WeightReport",
    "load_weights",
    "shared_tensor",
]
