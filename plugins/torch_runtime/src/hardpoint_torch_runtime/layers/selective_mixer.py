"""The Mamba-1 mixer: projection, causal convolution, selective recurrence, gate, projection.

Legend: T tokens (padding included), C hidden size, I channels of this rank, N state size, S rank of the steps. Ranks
divide the channels; steps, B and C come of the channels of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from hardpoint.interfaces.kv_cache_specs import MambaCacheMode, MambaSpec
from hardpoint_torch_runtime.layers.causal_conv import CausalConv
from hardpoint_torch_runtime.layers.linear import ColumnParallelLinear, LinearFactory, RowParallelLinear
from hardpoint_torch_runtime.layers.norm import RMSNorm
from hardpoint_torch_runtime.layers.placement import Placement
from hardpoint_torch_runtime.layers.recurrent import RecurrentLayer, Rows
from hardpoint_torch_runtime.layers.segments import SegmentedColumnLinear, split_part
from hardpoint_torch_runtime.layers.selective_scan import SelectiveInputs, selective_scan

__all__ = ["SelectiveMixer", "SelectiveSizes"]


@dataclass(frozen=True, slots=True)
class SelectiveSizes:
    """Sizes over all ranks. Raises ``ValueError`` for a convolution of one token.

    ``has_bias``: of the projections from and to the hidden size. ``norm_eps``: steps, B and C are normalized, each by
    itself; None: they are taken as they are.
    """

    hidden_size: int
    inner_size: int
    state_size: int
    step_rank: int
    conv_width: int
    has_bias: bool = False
    has_conv_bias: bool = True
    norm_eps: float | None = None

    def __post_init__(self) -> None:
        if self.conv_width < 2:
            raise ValueError(f"conv_width={self.conv_width} must be 2 or more")


class SelectiveMixer(RecurrentLayer):
    """[T, C] to [T, C]. Convolution inputs and states of the recurrence are kept in the KV cache, in float32.

    Parameters beside those of its layers: ``A_log`` [I, N], ``D`` and ``dt_bias`` [I], float32. Checkpoints have the
    last as the bias of ``dt_proj``.
    """

    A_log: torch.nn.Parameter
    D: torch.nn.Parameter
    dt_bias: torch.nn.Parameter

    def __init__(
        self,
        name: str,
        sizes: SelectiveSizes,
        factory: LinearFactory,
        norm: Callable[[int, float], RMSNorm],
        block_size: int,
        mode: MambaCacheMode = MambaCacheMode.NONE,
    ) -> None:
        super().__init__()
        self.name = name
        self.sizes = sizes
        self._dtype = factory.dtype
        self._own_parameters: dict[str, tuple[int, ...]] = {"A_log": (sizes.state_size,), "D": (), "dt_bias": ()}
        inner = self._inner = split_part(sizes.inner_size, factory.parallel, f"{name}: inner size")
        self._widths = (sizes.step_rank, sizes.state_size, sizes.state_size)
        self.in_proj = SegmentedColumnLinear(
            f"{name}.in_proj", factory, sizes.hidden_size, (inner, inner), bias=sizes.has_bias
        )
        self.conv1d = CausalConv(
            (inner,), sizes.conv_width, bias=sizes.has_conv_bias, dtype=factory.dtype, device=factory.device
        )
        self.x_proj = RowParallelLinear(f"{name}.x_proj", factory, sizes.inner_size, sum(self._widths))
        self.dt_proj = ColumnParallelLinear(f"{name}.dt_proj", factory, sizes.step_rank, sizes.inner_size)
        self.out_proj = RowParallelLinear(
            f"{name}.out_proj", factory, sizes.inner_size, sizes.hidden_size, bias=sizes.has_bias
        )
        eps = sizes.norm_eps
        self.dt_layernorm = None if eps is None else norm(sizes.step_rank, eps)
        self.b_layernorm = None if eps is None else norm(sizes.state_size, eps)
        self.c_layernorm = None if eps is None else norm(sizes.state_size, eps)
        for parameter, rest in self._own_parameters.items():
            empty = torch.empty((inner.length, *rest), dtype=torch.float32, device=factory.device)
            self.register_parameter(parameter, torch.nn.Parameter(empty, requires_grad=False))
        self.spec = MambaSpec(
            block_size=block_size,
            shapes=(self.conv1d.state_shape, (inner.length, sizes.state_size)),
            dtypes=("float32", "float32"),
            mode=mode,
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        x, gate = self.in_proj(hidden).chunk(2, dim=-1)
        step = self.step_states(len(hidden), hidden.device)

        def convolve(rows: Rows, x: torch.Tensor) -> torch.Tensor:
            return self.conv1d(rows, x, step.conv)

        def recur(rows: Rows, x: torch.Tensor, steps: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
            return selective_scan(SelectiveInputs(x, steps, b, c, -self.A_log.exp()), step.recurrence, rows)

        # Of all rows together, so that ranks sum what they project once.
        x = step.over_rows(convolve, (x,), self._inner.length)
        mixed = step.over_rows(recur, (x, *self._selected(x)), self._inner.length)
        return self.out_proj((torch.addcmul(mixed, x, self.D) * F.silu(gate.float())).to(self._dtype))

    def _selected(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Steps [T, I], B and C [T, N] that the convolved channels [T, I] select, float32."""
        steps, b, c = self.x_proj(x.to(self._dtype)).split(self._widths, dim=-1)
        if self.dt_layernorm is not None and self.b_layernorm is not None and self.c_layernorm is not None:
            steps, b, c = self.dt_layernorm(steps), self.b_layernorm(b), self.c_layernorm(c)
        # The bias behind the product's rounding: the smallest steps come of one far below zero.
        return F.softplus(self.dt_proj(steps).float() + self.dt_bias), b.float(), c.float()

    def place(self, parameter: str, shard: str | None) -> Placement:
        if parameter not in self._own_parameters or shard is not None:
            raise KeyError(f"a mixer has whole {', '.join(self._own_parameters)}, not {parameter!r} / {shard!r}")
        inner = self._inner
        return Placement((inner.total, *self._own_parameters[parameter]), 0, inner.start, 0, inner.length)

    def extra_repr(self) -> str:
        return f"{self.name}, channels={self._inner.length}, state={self.sizes.state_size}"
