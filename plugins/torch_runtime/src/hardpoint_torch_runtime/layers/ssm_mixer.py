"""The Mamba-2 mixer: projection, causal convolution, state space recurrence, gated norm, projection.

Legend: T tokens (padding included), C hidden size, H heads of P, I = H * P, G groups of N, all but C of this rank.
Ranks divide the heads; groups go with their heads, and neighboring ranks share one where there are fewer than ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from hardpoint.errors import ConfigError
from hardpoint.interfaces.kv_cache_specs import MambaCacheMode, MambaSpec
from hardpoint_torch_runtime.layers.causal_conv import CausalConv
from hardpoint_torch_runtime.layers.linear import LinearFactory, RowParallelLinear
from hardpoint_torch_runtime.layers.parallel import TensorParallel
from hardpoint_torch_runtime.layers.placement import Placement
from hardpoint_torch_runtime.layers.recurrent import RecurrentLayer, Rows
from hardpoint_torch_runtime.layers.segments import SegmentedColumnLinear, shared_part, split_part
from hardpoint_torch_runtime.layers.ssm import SSMInputs, ssm

__all__ = ["GatedRMSNorm", "MambaMixer", "MambaSizes"]


@dataclass(frozen=True, slots=True)
class MambaSizes:
    """Sizes over all ranks. Raises ``ValueError`` for heads that the groups cannot share out.

    ``step_limits``: steps are clamped to these after the softplus. ``has_bias``: of both projections.
    """

    hidden_size: int
    num_heads: int
    head_size: int
    num_groups: int
    state_size: int
    conv_width: int
    norm_eps: float
    has_bias: bool = False
    has_conv_bias: bool = True
    step_limits: tuple[float, float] = (0.0, math.inf)

    def __post_init__(self) -> None:
        if self.num_heads % self.num_groups:
            raise ValueError(f"num_heads={self.num_heads} is no multiple of num_groups={self.num_groups}")
        if self.conv_width < 2:
            raise ValueError(f"conv_width={self.conv_width} must be 2 or more")

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_size


class GatedRMSNorm(torch.nn.Module):
    """``norm(x * silu(gate)) * weight``: each of ``num_groups`` equal parts (over all ranks) is normalized by itself.

    float32 [T, I] and [T, I] to [T, I] in ``dtype``. Raises ``ConfigError`` for parts that ranks would cut unevenly.
    """

    def __init__(
        self, size: int, num_groups: int, eps: float, parallel: TensorParallel, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.eps = eps
        self.parallel = parallel
        self._share = split_part(size, parallel, "size of the gated norm")
        self._group_size = size // num_groups
        if max(num_groups, parallel.size) % min(num_groups, parallel.size):
            raise ConfigError(
                f"{num_groups} groups of a gated norm and tensor_parallel_size={parallel.size} divide neither way; "
                "set --tensor-parallel-size to a divisor or a multiple of the groups"
            )
        self._ranks_per_group = max(parallel.size // num_groups, 1)
        empty = torch.ones(self._share.length, dtype=dtype, device=device)
        self.weight = torch.nn.Parameter(empty, requires_grad=False)

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        x = x * F.silu(gate.float())
        groups = x.unflatten(-1, (-1, min(self._group_size, self._share.length)))
        squares = groups.square().sum(-1, keepdim=True)
        if self._ranks_per_group > 1:
            squares = self._over_ranks(squares.squeeze(-1)).unsqueeze(-1)
        normed = (groups * torch.rsqrt(squares / self._group_size + self.eps)).flatten(-2)
        return normed.to(self.weight.dtype) * self.weight

    def _over_ranks(self, squares: torch.Tensor) -> torch.Tensor:
        """[T, 1] to [T, 1], summed over the ranks that hold parts of this rank's group."""
        first = self.parallel.rank // self._ranks_per_group * self._ranks_per_group
        gathered = self.parallel.all_gather(squares, -1)
        return gathered[:, first : first + self._ranks_per_group].sum(-1, keepdim=True)

    def place(self, parameter: str, shard: str | None) -> Placement:
        if parameter != "weight" or shard is not None:
            raise KeyError(f"a gated norm has only a whole 'weight', not {parameter!r} / {shard!r}")
        return Placement((self._share.total,), 0, self._share.start, 0, self._share.length)

    def extra_repr(self) -> str:
        return f"{self._share.length}, groups of {self._group_size}, eps={self.eps}"


class MambaMixer(RecurrentLayer):
    """[T, C] to [T, C]. Convolution inputs and states of the recurrence are kept in the KV cache, in float32.

    Parameters beside those of its layers: ``A_log``, ``D`` and ``dt_bias``, float32 [H].
    """

    A_log: torch.nn.Parameter
    D: torch.nn.Parameter
    dt_bias: torch.nn.Parameter

    def __init__(
        self,
        name: str,
        sizes: MambaSizes,
        factory: LinearFactory,
        block_size: int,
        mode: MambaCacheMode = MambaCacheMode.NONE,
    ) -> None:
        super().__init__()
        self.name = name
        self.sizes = sizes
        parallel, device = factory.parallel, factory.device
        self._heads = split_part(sizes.num_heads, parallel, f"{name}: number of heads")
        inner = split_part(sizes.inner_size, parallel, f"{name}: inner size")
        shared = shared_part(sizes.num_groups, sizes.state_size, parallel, f"{name}: number of groups")
        convolved = (inner, shared, shared)
        self.in_proj = SegmentedColumnLinear(
            f"{name}.in_proj", factory, sizes.hidden_size, (inner, *convolved, self._heads), bias=sizes.has_bias
        )
        self.conv1d = CausalConv(
            convolved, sizes.conv_width, bias=sizes.has_conv_bias, dtype=factory.dtype, device=device
        )
        self.norm = GatedRMSNorm(sizes.inner_size, sizes.num_groups, sizes.norm_eps, parallel, factory.dtype, device)
        self.out_proj = RowParallelLinear(
            f"{name}.out_proj", factory, sizes.inner_size, sizes.hidden_size, bias=sizes.has_bias
        )
        for parameter in ("A_log", "D", "dt_bias"):
            empty = torch.empty(self._heads.length, dtype=torch.float32, device=device)
            self.register_parameter(parameter, torch.nn.Parameter(empty, requires_grad=False))
        self._widths = (inner.length, self.conv1d.channels, self._heads.length)
        self._conv_widths = [segment.length for segment in convolved]
        self.spec = MambaSpec(
            block_size=block_size,
            shapes=(self.conv1d.state_shape, (self._heads.length, sizes.head_size, sizes.state_size)),
            dtypes=("float32", "float32"),
            mode=mode,
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        gate, convolved, steps = self.in_proj(hidden).split(self._widths, dim=-1)
        steps = F.softplus(steps.float() + self.dt_bias).clamp(*self.sizes.step_limits)
        step = self.step_states(len(hidden), hidden.device)

        def recur(rows: Rows, convolved: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
            inputs = self._inputs(self.conv1d(rows, convolved, step.conv), steps)
            return self._skipped(inputs, ssm(inputs, step.recurrence, rows))

        mixed = step.over_rows(recur, (convolved, steps), self._widths[0])
        return self.out_proj(self.norm(mixed, gate))

    def _inputs(self, x: torch.Tensor, steps: torch.Tensor) -> SSMInputs:
        inner, b, c = x.split(self._conv_widths, dim=-1)
        return SSMInputs(
            inner.unflatten(-1, (-1, self.sizes.head_size)),
            steps,
            b.unflatten(-1, (-1, self.sizes.state_size)),
            c.unflatten(-1, (-1, self.sizes.state_size)),
            -self.A_log.exp(),
        )

    def _skipped(self, inputs: SSMInputs, y: torch.Tensor) -> torch.Tensor:
        return torch.addcmul(y, inputs.x, self.D.unsqueeze(-1)).flatten(-2)

    def place(self, parameter: str, shard: str | None) -> Placement:
        if parameter not in ("A_log", "D", "dt_bias") or shard is not None:
            raise KeyError(f"a mixer has whole 'A_log', 'D' and 'dt_bias', not {parameter!r} / {shard!r}")
        heads = self._heads
        return Placement((heads.total,), 0, heads.start, 0, heads.length)

    def extra_repr(self) -> str:
        sizes = self.sizes
        return f"{self.name}, heads={self._heads.length}x{sizes.head_size}, state={sizes.state_size}"
