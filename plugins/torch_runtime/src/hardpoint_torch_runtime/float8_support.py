"""Which devices convert to 8-bit floats by themselves. Importing this module does not import Triton."""

from __future__ import annotations

__all__ = ["converts_e4m3"]

_E4M3_CAPABILITY = (8, 9)


def converts_e4m3(capability: tuple[int, int] | None, *, is_hip: bool) -> bool:
    """Whether Triton has the type float8_e4m3fn on a device of ``capability``; of CUDA devices from 8.9 on.

    None stands for its interpreter, which has the type but drops the carry of what rounds up to a power of two. Where
    the answer is no, kernels work on codes: see :mod:`hardpoint_torch_runtime.float8_kernels`.
    """
    return capability is not None and (is_hip or capability >= _E4M3_CAPABILITY)
