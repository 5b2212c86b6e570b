"""The compiled kernels as Python sees them: a library, its threads, and what it makes.

Tensors are handed over as addresses; every function checks shapes, dtypes and strides before it does so. Calls let go
of the interpreter's lock. Files of kernels have their own module of bindings, which declares functions here.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

__all__ = ["INT64", "POINTER", "NativeLibrary", "NativeLinear", "address", "freed_with"]

POINTER = ctypes.c_void_p
INT64 = ctypes.c_int64


class NativeLibrary:
    """One loaded library with one pool of threads.

    Args:
        threads: threads that compute, the caller's included; ``cores``: the logical CPU of each, or empty.
        spin_us: microseconds of polling for work before a thread sleeps. Longer than what lies between two kernels of
            a step, shorter than what anybody else on the machine would notice.
    """

    def __init__(self, path: Path, *, threads: int, cores: Sequence[int] = (), spin_us: int = 100) -> None:
        self._library = ctypes.CDLL(str(path))
        self._functions: dict[str, Any] = {}
        self.runtime = POINTER()
        destroy = self.function("hp_runtime_destroy", POINTER, returns=None)
        create = self.function("hp_runtime_create", ctypes.c_int, POINTER, ctypes.c_int, INT64, POINTER)
        named = (ctypes.c_int * len(cores))(*cores)
        self.check(create(threads, named, len(cores), spin_us, ctypes.byref(self.runtime)))
        freed_with(self, destroy, self.runtime)

    @property
    def isa(self) -> str:
        """The level that the library was compiled for."""
        text: bytes = self.function("hp_isa", returns=ctypes.c_char_p)()
        return text.decode()

    def function(self, name: str, *arguments: Any, returns: Any = ctypes.c_int) -> Any:
        """The exported function ``name``, declared. A status it returns goes to :meth:`check`."""
        if name not in self._functions:
            found = getattr(self._library, name)
            found.argtypes, found.restype = arguments, returns
            self._functions[name] = found
        return self._functions[name]

    def check(self, status: int) -> None:
        """Raise ``ValueError`` with the kernel's message unless ``status`` is 0."""
        if status:
            text: bytes = self.function("hp_last_error", returns=ctypes.c_char_p)()
            raise ValueError(text.decode(errors="replace"))

    def linear_f32(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, invariant: bool = False
    ) -> NativeLinear:
        """Packed copy of ``weight`` float32 [O, I], rows contiguous, and ``bias`` float32 [O].

        ``invariant``: take no path that gives a row other bits when more rows come with it.
        """
        return self._dense("hp_linear_f32", weight, torch.float32, bias, invariant)

    def linear_bf16(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, invariant: bool = False
    ) -> NativeLinear:
        """The same for ``weight`` bfloat16 [O, I], which stays bfloat16 and is widened in registers.

        Results are those of :meth:`linear_f32` of the widened weight, bit for bit.
        """
        return self._dense("hp_linear_bf16", weight, torch.bfloat16, bias, invariant)

    def _dense(
        self, name: str, weight: torch.Tensor, dtype: torch.dtype, bias: torch.Tensor | None, invariant: bool
    ) -> NativeLinear:
        _demand("weight", weight, dtype, 2)
        outputs, inputs = weight.shape
        if bias is not None:
            _demand("bias", bias, torch.float32, 1, outputs)
        make = self.function(name, POINTER, POINTER, INT64, POINTER, INT64, INT64, ctypes.c_int, POINTER)
        handle = POINTER()
        given = None if bias is None else bias.data_ptr()
        # Strides of dimensions of size one mean nothing.
        stride = weight.stride(0) if outputs > 1 else inputs
        sizes = (outputs, inputs, int(invariant))
        self.check(make(self.runtime, weight.data_ptr(), stride, given, *sizes, ctypes.byref(handle)))
        return NativeLinear(self, handle, outputs, inputs)


class NativeLinear:
    """A layer's weight as a kernel keeps it. Freed with this object."""

    def __init__(self, library: NativeLibrary, handle: ctypes.c_void_p, outputs: int, inputs: int) -> None:
        self._library = library
        self.handle = handle
        self.outputs, self.inputs = outputs, inputs
        self._run = library.function(
            "hp_linear_run", POINTER, POINTER, POINTER, INT64, INT64, POINTER, INT64, ctypes.c_int
        )
        freed_with(self, library.function("hp_linear_destroy", POINTER, returns=None), handle)

    @property
    def num_bytes(self) -> int:
        size: int = self._library.function("hp_linear_bytes", POINTER, returns=INT64)(self.handle)
        return size

    @property
    def is_batch_invariant(self) -> bool:
        return bool(self._library.function("hp_linear_is_batch_invariant", POINTER)(self.handle))

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None, *, adds: bool = False) -> torch.Tensor:
        """``x`` float32 [T, I] to [T, O], rows contiguous in both; ``adds`` adds to ``out`` instead of writing it."""
        _demand("x", x, torch.float32, 2, self.inputs)
        if out is None:
            out = torch.empty((x.shape[0], self.outputs), dtype=torch.float32)
        _demand("out", out, torch.float32, 2, self.outputs)
        if out.shape[0] != x.shape[0]:
            raise ValueError(f"out has {out.shape[0]} rows, x has {x.shape[0]}")
        x_stride = x.stride(0) if x.shape[0] > 1 else self.inputs
        stride = out.stride(0) if out.shape[0] > 1 else self.outputs
        library = self._library
        library.check(
            self._run(
                library.runtime, self.handle, x.data_ptr(), x_stride, x.shape[0], out.data_ptr(), stride, int(adds)
            )
        )
        return out


def address(tensor: torch.Tensor | None) -> int | None:
    """Where the tensor's first element lies; None stays a null pointer."""
    return None if tensor is None else tensor.data_ptr()


def freed_with(owner: object, free: Any, handle: ctypes.c_void_p) -> None:
    """Let ``free`` have ``handle`` when ``owner`` goes; at exit the system does, since threads may still compute."""
    weakref.finalize(owner, free, handle).atexit = False


def _demand(name: str, tensor: torch.Tensor, dtype: torch.dtype, rank: int, last: int | None = None) -> None:
    fits = tensor.dtype is dtype and tensor.dim() == rank and tensor.device.type == "cpu"
    if not fits or (last is not None and tensor.shape[-1] != last):
        sizes = f"[{'..., ' * (rank > 1)}{'any' if last is None else last}]"
        raise ValueError(f"{name} must be a {dtype} CPU tensor {sizes}, not {tensor.dtype} {list(tensor.shape)}")
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name} must have contiguous rows, not strides {tensor.stride()}")
