"""What the model asks of attention, and who is chosen for it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from hardpoint.errors import ConfigError, ModelFormatError, PluginNotFoundError
from hardpoint.interfaces.attention import AttentionBackend, AttentionKind, AttentionNeed
from hardpoint.interfaces.platform import DeviceDescription
from hardpoint.interfaces.worker import ParallelSlice, WorkerConfig
from hardpoint_torch_runtime.backend_selection import attention_need, require_kinds, select_attention_backend

DEVICE = DeviceDescription(device_type="cpu", name="a test machine")


def need_of(world: Any, fields: dict[str, Any], **changes: Any) -> Any:
    config: WorkerConfig = world.config(**changes)
    model = msgspec.structs.replace(config.model, config=fields)
    return attention_need(msgspec.structs.replace(config, model=model), DEVICE)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}, (9, 3, 64)),
        ({"num_attention_heads": 8, "hidden_size": 256}, (8, 8, 32)),
        ({"num_attention_heads": 4, "num_key_value_heads": 1, "hidden_size": 640, "head_dim": 256}, (4, 1, 256)),
        ({"num_attention_heads": 4, "num_key_value_heads": None, "hidden_size": 64, "head_dim": None}, (4, 4, 16)),
    ],
)
def test_heads_come_from_the_configuration(world: Any, fields: dict[str, Any], expected: tuple[int, ...]) -> None:
    need = need_of(world, fields)
    assert (need.num_heads, need.num_kv_heads, need.head_size) == expected


def test_ranks_share_heads_and_never_get_less_than_one(world: Any) -> None:
    fields = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64}
    parallel = ParallelSlice(world_size=4, tensor_parallel_size=4)
    need = need_of(world, fields, parallel=parallel)
    assert (need.num_heads, need.num_kv_heads) == (2, 1)


@pytest.mark.parametrize(("uses", "window"), [(True, 128), (False, None), (None, 128)])
def test_a_window_counts_unless_switched_off(world: Any, uses: bool | None, window: int | None) -> None:
    fields: dict[str, Any] = {"num_attention_heads": 4, "hidden_size": 64, "sliding_window": 128}
    if uses is not None:
        fields["use_sliding_window"] = uses
    assert need_of(world, fields).sliding_window == window


def test_cap_dtypes_and_block_size_are_passed_on(world: Any) -> None:
    fields = {"num_attention_heads": 4, "hidden_size": 64, "attn_logit_softcapping": 30.0}
    need = need_of(world, fields, dtype="bfloat16", kv_cache_dtype="auto", batch_invariant=True)
    assert need.logits_soft_cap == 30.0
    assert (need.dtype, need.kv_cache_dtype) == ("bfloat16", "bfloat16")
    assert (need.block_size, need.batch_invariant, need.device) == (world.block_size, True, DEVICE)


LATENT: dict[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "hidden_size": 64,
    "head_dim": 4,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
}


def test_latents_are_one_head_that_no_rank_has_less_of(world: Any) -> None:
    need = need_of(world, LATENT)
    assert (need.uses_mla, need.num_heads, need.num_kv_heads, need.head_size) == (True, 8, 1, 20)
    parallel = ParallelSlice(world_size=4, tensor_parallel_size=4)
    need = need_of(world, LATENT, parallel=parallel)
    assert (need.uses_mla, need.num_heads, need.num_kv_heads, need.head_size) == (True, 2, 1, 20)
    assert not need_of(world, {**LATENT, "kv_lora_rank": None}).uses_mla
    with pytest.raises(ModelFormatError, match="qk_rope_head_dim = None"):
        need_of(world, {**LATENT, "qk_rope_head_dim": None})


@pytest.mark.parametrize("value", [0, -1, "4", 2.0, True, None])
def test_unusable_head_counts_are_named(world: Any, value: Any) -> None:
    with pytest.raises(ModelFormatError, match="num_attention_heads = "):
        need_of(world, {"num_attention_heads": value, "hidden_size": 64})


class TestChoice:
    @pytest.fixture
    def need(self, world: Any) -> Any:
        return need_of(world, {"num_attention_heads": 4, "hidden_size": 64})

    def test_the_first_that_accepts_wins_and_refusals_are_kept(self, need: Any, loop_backend: Any) -> None:
        """R5.3."""
        backends = {name: loop_backend() for name in ("a", "b", "c")}
        backends["a"].refusal = "needs a GPU"
        choice = select_attention_backend(backends.__getitem__, ["a", "b", "c"], need)
        assert choice.backend is backends["b"]
        assert choice.refused == (("a", "needs a GPU"),)
        assert choice.table() == "a: needs a GPU; loop: chosen"

    def test_a_backend_that_knows_no_latents_is_passed_over(self, world: Any, loop_backend: Any) -> None:
        """R5.12, R5.5."""
        need = need_of(world, LATENT)

        class KeysAndValues(loop_backend):
            def refuse(self, need: AttentionNeed) -> str | None:
                return "keys and values lie apart here" if need.uses_mla else None

        backends = {"apart": KeysAndValues(), "latent": loop_backend()}
        choice = select_attention_backend(backends.__getitem__, ["apart", "latent"], need)
        assert choice.backend is backends["latent"]
        assert choice.refused == (("apart", "keys and values lie apart here"),)
        with pytest.raises(ConfigError, match="'apart' was asked for but refuses: keys and values lie apart here"):
            select_attention_backend(backends.__getitem__, ["latent"], need, forced="apart")

    def test_a_candidate_that_cannot_load_is_a_refusal_unless_forced(self, need: Any, loop_backend: Any) -> None:
        good = loop_backend()

        def create(name: str) -> Any:
            if name == "gone":
                raise PluginNotFoundError("no attention_backend plugin 'gone'")
            return good

        choice = select_attention_backend(create, ["gone", "good"], need)
        assert choice.refused == (("gone", "no attention_backend plugin 'gone'"),)
        with pytest.raises(PluginNotFoundError):
            select_attention_backend(create, ["good"], need, forced="gone")

    def test_forcing_ignores_the_order_and_takes_names_from_anywhere(self, need: Any, loop_backend: Any) -> None:
        """R5.4: an out-of-tree backend is selectable by name."""
        backends = {name: loop_backend() for name in ("a", "stranger")}
        assert (
            select_attention_backend(backends.__getitem__, ["a"], need, forced="stranger").backend
            is (backends["stranger"])
        )

    def test_without_candidates_the_installed_ones_are_listed(self, need: Any) -> None:
        none: dict[str, AttentionBackend] = {}
        with pytest.raises(ConfigError, match=r"(?s)no candidates.*installed: x, y; name one"):
            select_attention_backend(none.__getitem__, [], need, installed=("x", "y"))

    def test_kinds_of_layers_that_the_configuration_does_not_tell(self, need: Any, loop_backend: Any) -> None:
        """R5.5: before the first forward, with the backend's own reason."""

        class ForDecoders(loop_backend):
            def refuse(self, need: AttentionNeed) -> str | None:
                return None if need.kind is AttentionKind.DECODER else "sees one side only"

        require_kinds(ForDecoders(), need, [AttentionKind.DECODER] * 2)
        require_kinds(loop_backend(), need, AttentionKind)
        message = "'loop' was chosen, but refuses the model's layers of kind 'encoder_only': sees one side only; choose"
        with pytest.raises(ConfigError, match=message):
            require_kinds(ForDecoders(), need, [AttentionKind.DECODER, AttentionKind.ENCODER_ONLY])
