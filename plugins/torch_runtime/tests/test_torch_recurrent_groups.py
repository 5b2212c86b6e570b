"""Recurrent layers in the runner: their tables, their rows' order, and the memory their states lie in."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from hardpoint.interfaces import (
    BlockSizeRule,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    KVCacheTensor,
    MambaCacheMode,
    MambaSpec,
    NewRow,
    SchedulerOutput,
    TokenUpdate,
    spec_to_wire,
)
from hardpoint_testing_torch.plain_attention import PlainAttentionBackend
from hardpoint_torch_runtime.layers import StateMetadata
from hardpoint_torch_runtime.runner.attention_groups import AttentionGroups
from hardpoint_torch_runtime.runner.input_batch import InputBuilder
from hardpoint_torch_runtime.runner.kv_memory import KVMemory
from hardpoint_torch_runtime.runner.slot_state import SlotState

CPU = torch.device("cpu")
MAX_LEN = 40
Step = Callable[..., SchedulerOutput]
Row = Callable[..., NewRow]


def state(mode: MambaCacheMode = MambaCacheMode.NONE) -> MambaSpec:
    return MambaSpec(block_size=4, shapes=((3, 2), (5,)), dtypes=("float32", "float32"), mode=mode)


def groups(spec: KVCacheSpec) -> AttentionGroups:
    config = KVCacheConfig(num_blocks=9, groups=(KVCacheGroup(("s",), spec_to_wire(spec)),), tensors=())
    specs = config.layer_specs({"s": spec})
    backend = PlainAttentionBackend()
    return AttentionGroups(
        config, specs, backend, BlockSizeRule(1), max_rows=4, max_tokens=32, max_model_len=MAX_LEN, device=CPU
    )


def metadata(made: AttentionGroups, slots: SlotState, step: SchedulerOutput) -> tuple[StateMetadata, list[int]]:
    """What the layer finds, and the slots in the order of the batch."""
    builder = InputBuilder(slots, 32, CPU, made.kernel_blocks)
    batch = builder.build(step, reorder_threshold=made.reorder_threshold)
    entries, mappings = made.build(batch, step)
    assert list(entries) == list(mappings) == ["s"]
    return entries["s"], batch.slots.tolist()


@pytest.mark.parametrize("mode", [MambaCacheMode.NONE, MambaCacheMode.ALIGN])
def test_rows_with_one_token_come_first_though_nothing_attends(
    mode: MambaCacheMode, make_step: Step, make_row: Row
) -> None:
    """R4.36, P4.9: rows 0 and 3 go on by a token, row 1 is new and row 2 in the middle of its prompt."""
    made = groups(state(mode))
    slots = SlotState(4, MAX_LEN, made.block_sizes)
    blocks = {0: [5, 2, 6], 1: [7, 8], 2: [3, 4], 3: [1, 9, 10]}
    for slot, ids in blocks.items():
        held = ids[:1] if mode is MambaCacheMode.NONE else ids
        slots.enter(make_row(slot, tokens=range(20), blocks=held))
    step = make_step(0, [(0, 0, 8, 1, True), (1, 0, 0, 5, False), (2, 0, 4, 3, False), (3, 0, 9, 1, True)])
    found, order = metadata(made, slots, step)
    assert order == [0, 3, 1, 2]
    assert found.decodes is not None
    assert found.scans is not None
    is_running = mode is MambaCacheMode.NONE
    # Token 8 goes on from the state behind token 7, which is the last of block 1, and leaves one in block 2.
    assert found.decodes.reads.tolist() == ([5, 1] if is_running else [2, 10])
    assert found.decodes.writes.tolist() == ([5, 1] if is_running else [6, 10])
    assert found.decodes.fresh.tolist() == []
    assert found.scans.reads.tolist() == [7, 3]
    assert found.scans.blocks.tolist() == ([7, 3] if is_running else [8, 4])
    assert found.scans.fresh.tolist() == [0]
    assert found.scans.num_tokens == 8


def test_one_position_is_enough_for_the_longest_sequence(make_step: Step, make_row: Row) -> None:
    """R1.33: at the last token, and one behind it that a step in flight may compute."""
    made = groups(state())
    slots = SlotState(4, MAX_LEN, made.block_sizes)
    slots.enter(make_row(0, tokens=range(MAX_LEN), blocks=[7]))
    found, _ = metadata(made, slots, make_step(0, [(0, 0, MAX_LEN - 1, 1, True)]))
    assert found.decodes is not None
    assert (found.decodes.reads.tolist(), found.decodes.writes.tolist()) == ([7], [7])
    assert slots.tables[0].block_size > MAX_LEN


def test_guesses_are_refused(make_step: Step, make_row: Row) -> None:
    """No state is kept to return to when they turn out wrong."""
    made = groups(state())
    slots = SlotState(4, MAX_LEN, made.block_sizes)
    slots.enter(make_row(0, tokens=range(9), blocks=[7]))
    drafts = TokenUpdate(np.array([1], dtype=np.int32), np.array([3], dtype=np.int32))
    with pytest.raises(RuntimeError, match="step 6 brings draft tokens, but the model has recurrent layers"):
        metadata(made, slots, make_step(6, [(0, 0, 7, 2, True)], drafts=drafts))


def test_states_are_seen_in_the_planned_memory_and_nowhere_else() -> None:
    """R1.32, R1.48: groups that share memory have their states and their keys in the same bytes, block by block."""
    spec = MambaSpec(block_size=4, shapes=((3, 2), (5,)), dtypes=("float32", "float32"), padded_page_size=64)
    full = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=2, dtype="float32")
    assert spec.page_size_bytes == full.page_size_bytes == 64
    tensors = tuple(
        KVCacheTensor(size=64 * 5, layer_names=(name,), layer_stride=64 * 5, block_stride=64, buffer=0) for name in "sf"
    )
    config = KVCacheConfig(num_blocks=5, groups=(), tensors=tensors)
    memory = KVMemory(config, {"s": spec, "f": full}, CPU)
    assert list(memory.states) == ["s"]
    conv, ssm = memory.states["s"]
    assert (conv.shape, ssm.shape) == ((5, 3, 2), (5, 5))
    memory.views["f"].fill_(torch.nan)
    assert bool(conv.isnan().all())
    memory.zero_blocks(np.array([2], dtype=np.int32))
    conv[3], ssm[3] = 1.0, 2.0
    held = [block.count_nonzero().item() for block in memory.buffers[0].view(torch.float32).view(5, 16).nan_to_num(0)]
    assert held == [0, 0, 0, 11, 0]
    assert bool(memory.views["f"][[1, 4]].isnan().all())
