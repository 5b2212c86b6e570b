"""The mixer of gated delta networks: projections, causal convolution, gated delta rule, norm, gate, projection.

Legend: T tokens (padding included), C hidden size, H heads of size V, G groups of H / G heads that share queries and
keys of size K; all but C of this rank. Ranks divide the groups, and heads go with them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from hardpoint.interfaces.kv_cache_specs import MambaCacheMode, MambaSpec
from hardpoint_torch_runtime.layers.causal_conv import CausalConv
from hardpoint_torch_runtime.layers.delta_rule import DeltaInputs, delta_rule
from hardpoint_torch_runtime.layers.linear import ColumnParallelLinear, LinearFactory, RowParallelLinear
from hardpoint_torch_runtime.layers.placement import Placement
from hardpoint_torch_runtime.layers.recurrent import RecurrentLayer, Rows
from hardpoint_torch_runtime.layers.segments import split_part

__all__ = ["DeltaMixer", "DeltaSizes", "NormedHeads"]

_LENGTH_EPS = 1e-6
"""Added to the squared lengths of queries and keys before their roots are divided by."""


@dataclass(frozen=True, slots=True)
class DeltaSizes:
    """Sizes over all ranks. Raises ``ValueError`` for heads that the groups cannot share out.

    ``num_heads`` of size ``head_size`` have values and states; ``num_groups`` queries and keys of ``key_size`` serve as
    many neighbors each.
    """

    hidden_size: int
    num_heads: int
    head_size: int
    num_groups: int
    key_size: int
    conv_width: int
    norm_eps: float

    def __post_init__(self) -> None:
        if self.num_heads % self.num_groups:
            raise ValueError(f"num_heads={self.num_heads} is no multiple of num_groups={self.num_groups}")
        if self.conv_width < 2:
            raise ValueError(f"conv_width={self.conv_width} must be 2 or more")

    @property
    def heads_per_group(self) -> int:
        return self.num_heads // self.num_groups


class NormedHeads(torch.nn.Module):
    """``norm(x) * weight * silu(gate)`` head by head: float32 [T, H, V] and [T, H, V] to [T, H, V] in ``dtype``.

    All heads have one ``weight`` [V], and every rank holds it whole.
    """

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.size = size
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(size, dtype=dtype, device=device), requires_grad=False)

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return (normed * self.weight.float() * F.silu(gate.float())).to(self.weight.dtype)

    def place(self, parameter: str, shard: str | None) -> Placement:
        if parameter != "weight" or shard is not None:
            raise KeyError(f"a norm of heads has only a whole 'weight', not {parameter!r} / {shard!r}")
        return Placement.whole((self.size,))

    def extra_repr(self) -> str:
        return f"{self.size}, eps={self.eps}"


class DeltaMixer(RecurrentLayer):
    """[T, C] to [T, C]. Convolution inputs and states of the recurrence are kept in the KV cache, in float32.

    Stored projections are ordered by group: of each its query, its key, its heads' values and their gates
    (``in_proj_qkvz``); its heads' rates and their decays (``in_proj_ba``). Parameters beside those of its layers:
    ``A_log`` and ``dt_bias``, float32 [H].
    """

    A_log: torch.nn.Parameter
    dt_bias: torch.nn.Parameter

    def __init__(
        self,
        name: str,
        sizes: DeltaSizes,
        factory: LinearFactory,
        block_size: int,
        mode: MambaCacheMode = MambaCacheMode.NONE,
    ) -> None:
        super().__init__()
        self.name = name
        self.sizes = sizes
        parallel, dtype, device = factory.parallel, factory.dtype, factory.device
        self._num_groups = parallel.divide(sizes.num_groups, f"{name}: number of key heads")
        self._heads = split_part(sizes.num_heads, parallel, f"{name}: number of value heads")
        keys = split_part(sizes.num_groups * sizes.key_size, parallel, f"{name}: size of all keys")
        values = split_part(sizes.num_heads * sizes.head_size, parallel, f"{name}: size of all values")
        self.in_proj_qkvz = ColumnParallelLinear(
            f"{name}.in_proj_qkvz", factory, sizes.hidden_size, 2 * (keys.total + values.total)
        )
        self.in_proj_ba = ColumnParallelLinear(f"{name}.in_proj_ba", factory, sizes.hidden_size, 2 * sizes.num_heads)
        self.conv1d = CausalConv((keys, keys, values), sizes.conv_width, bias=False, dtype=dtype, device=device)
        self.norm = NormedHeads(sizes.head_size, sizes.norm_eps, dtype, device)
        self.out_proj = RowParallelLinear(f"{name}.out_proj", factory, values.total, sizes.hidden_size)
        for parameter in ("A_log", "dt_bias"):
            empty = torch.empty(self._heads.length, dtype=torch.float32, device=device)
            self.register_parameter(parameter, torch.nn.Parameter(empty, requires_grad=False))
        self._conv_widths = (keys.length, keys.length, values.length)
        self.spec = MambaSpec(
            block_size=block_size,
            shapes=(self.conv1d.state_shape, (self._heads.length, sizes.key_size, sizes.head_size)),
            dtypes=("float32", "float32"),
            mode=mode,
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        convolved, gate = self._projected(hidden)
        decay, rate = self._gates(hidden)
        step = self.step_states(len(hidden), hidden.device)

        def recur(rows: Rows, x: torch.Tensor, decay: torch.Tensor, rate: torch.Tensor) -> torch.Tensor:
            inputs = self._inputs(self.conv1d(rows, x, step.conv), decay, rate)
            return delta_rule(inputs, step.recurrence, rows).flatten(1)

        mixed = step.over_rows(recur, (convolved, decay, rate), self._conv_widths[2])
        return self.out_proj(self.norm(mixed.view_as(gate), gate).flatten(1))

    def _projected(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(what is convolved: all queries, all keys, all values, [T, 2 G K + H V]; gates [T, H, V])."""
        sizes = self.sizes
        in_group = sizes.heads_per_group * sizes.head_size
        by_group = self.in_proj_qkvz(hidden).unflatten(-1, (self._num_groups, -1))
        *convolved, gate = by_group.split((sizes.key_size, sizes.key_size, in_group, in_group), dim=-1)
        return torch.cat([part.flatten(1) for part in convolved], dim=-1), gate.reshape(
            len(hidden), -1, sizes.head_size
        )

    def _gates(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(logarithms of decays, rates), both float32 [T, H]."""
        by_group = self.in_proj_ba(hidden).float().unflatten(-1, (self._num_groups, 2, -1))
        rate, decay = (by_group[:, :, part].flatten(1) for part in range(2))
        return -self.A_log.exp() * F.softplus(decay + self.dt_bias), rate.sigmoid()

    def _inputs(self, x: torch.Tensor, decay: torch.Tensor, rate: torch.Tensor) -> DeltaInputs:
        query, key, value = x.split(self._conv_widths, dim=-1)
        query, key = (_of_length_one(part.unflatten(-1, (self._num_groups, -1))) for part in (query, key))
        value = value.unflatten(-1, (-1, self.sizes.head_size))
        return DeltaInputs(query * self.sizes.key_size**-0.5, key, value, decay, rate)

    def place(self, parameter: str, shard: str | None) -> Placement:
        if parameter not in ("A_log", "dt_bias") or shard is not None:
            raise KeyError(f"a delta mixer has whole 'A_log' and 'dt_bias', not {parameter!r} / {shard!r}")
        heads = self._heads
        return Placement((heads.total,), 0, heads.start, 0, heads.length)

    def extra_repr(self) -> str:
        sizes = self.sizes
        return f"{self.name}, heads={self._heads.length}x{sizes.head_size}, keys={self._num_groups}x{sizes.key_size}"


def _of_length_one(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _LENGTH_EPS)
