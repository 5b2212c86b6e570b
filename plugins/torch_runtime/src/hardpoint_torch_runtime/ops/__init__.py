"""Operators that plugins add, and the seams at which plugins replace kernels."""

from hardpoint_torch_runtime.ops.dispatch import REFERENCE, KernelChoice, KernelTable, select_kernels
from hardpoint_torch_runtime.ops.loading import load_custom_ops
from hardpoint_torch_runtime.ops.registry import OPERATORS, OperatorRegistry, OperatorSet, namespace_of
from hardpoint_torch_runtime.ops.seams import SEAMS, Kernels, KernelSeam, check_signature
from hardpoint_torch_runtime.ops.validation import check_operator

__all__ = [
    "OPERATORS",
    "REFERENCE",
    "SEAMS",
    "KernelChoice",
    "KernelSeam",
    "KernelTable",
    "Kernels",
    "OperatorRegistry",
    "OperatorSet",
    "check_operator",
    "check_signature",
    "load_custom_ops",
    "namespace_of",
    "select_kernels",
]
