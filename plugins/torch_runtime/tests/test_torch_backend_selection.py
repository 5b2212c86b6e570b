"""What the model asks of attention, and who is chosen for it."""

from __future__ import annotations

import logging
from dataclasses import fields, replace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hardpoint.errors import ConfigError, ModelFormatError, PluginNotFoundError
from hardpoint.interfaces.attention import AttentionBackend, AttentionImpl, AttentionKind, AttentionNeed, BlockSizeRule
from hardpoint.interfaces.kv_cache_specs import FullAttentionSpec
from hardpoint.interfaces.platform import DeviceDescription
from hardpoint.interfaces.worker import ParallelSlice, WorkerConfig
from hardpoint_torch_runtime import LayerToolkit
from hardpoint_torch_runtime.attention_needs import attention_need, bare_need, describe_need, layer_needs
from hardpoint_torch_runtime.backend_selection import AttentionSelector, common_rule, largest_fitting
from hardpoint_torch_runtime.layers import AttentionLayer

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
        ({"hidden_size": 768, "head_dim": 48}, (1, 1, 64)),
        ({"num_attention_heads": None, "hidden_size": 768}, (1, 1, 64)),
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


@pytest.mark.parametrize("value", [0, -1, "4", 2.0, True])
def test_unusable_head_counts_are_named(world: Any, value: Any) -> None:
    with pytest.raises(ModelFormatError, match="num_attention_heads = "):
        need_of(world, {"num_attention_heads": value, "hidden_size": 64})


def test_what_a_configuration_only_mentions_is_left_to_the_layers(world: Any) -> None:
    """R5.5: a window that no layer has must not rule a backend out."""
    fields = {
        "num_attention_heads": 4,
        "hidden_size": 64,
        "sliding_window": 128,
        "attention_chunk_size": 32,
        "attn_logit_softcapping": 30.0,
        "use_bidirectional_attention": "vision",
    }
    need = need_of(world, fields)
    assert (need.sliding_window, need.chunk_size, need.uses_mm_prefix) == (128, 32, True)
    assert bare_need(need) == replace(need, sliding_window=None, chunk_size=None, logits_soft_cap=None)


class TestNeedsOfLayers:
    """R5.5, R5.12: what is asked of a backend is what the layers have, each of them."""

    @pytest.fixture
    def base(self, world: Any) -> AttentionNeed:
        need: AttentionNeed = need_of(world, {"num_attention_heads": 4, "hidden_size": 64, "sliding_window": 99})
        return need

    @pytest.fixture
    def toolkit(self, world: Any) -> LayerToolkit:
        return LayerToolkit.create(world.config(), device=torch.device("cpu"), dtype=torch.float32)

    def add(self, toolkit: LayerToolkit, name: str, **layer: Any) -> None:
        shape: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_size": 16, "scale": 1.0}
        toolkit.attention(name, **{**shape, **layer})

    def needs(self, base: AttentionNeed, toolkit: LayerToolkit) -> dict[AttentionNeed, tuple[str, ...]]:
        return layer_needs(base, toolkit.attention_layers.values())

    def test_equal_layers_ask_once(self, base: AttentionNeed, toolkit: LayerToolkit) -> None:
        for name, window in (("a", None), ("b", 8), ("c", None), ("d", 8)):
            self.add(toolkit, name, sliding_window=window)
        found = self.needs(base, toolkit)
        assert [(need.sliding_window, names) for need, names in found.items()] == [(None, ("a", "c")), (8, ("b", "d"))]
        assert {need.num_kv_heads for need in found} == {2}

    @pytest.mark.parametrize(
        ("layer", "asked"),
        [
            (
                {"num_heads": 8, "num_kv_heads": 1, "head_size": 32},
                {"num_heads": 8, "num_kv_heads": 1, "head_size": 32},
            ),
            ({"kind": AttentionKind.ENCODER_ONLY}, {"kind": AttentionKind.ENCODER_ONLY}),
            ({"chunk_size": 32}, {"chunk_size": 32}),
            ({"sliding_window": 8, "keeps_prompt": True}, {"sliding_window": 8, "keeps_prompt": True}),
            ({"logits_soft_cap": 30.0}, {"logits_soft_cap": 30.0}),
            ({"alibi_slopes": [0.5] * 4}, {"uses_alibi": True}),
            ({"sinks": torch.zeros(4)}, {"uses_sinks": True}),
            ({"relative_bias": torch.zeros(4, 9)}, {"uses_relative_bias": True}),
            ({"kind": AttentionKind.ENCODER_DECODER, "max_encoder_tokens": 9}, {"kind": AttentionKind.ENCODER_DECODER}),
            ({"key_scale": torch.ones(1), "value_scale": torch.ones(1)}, {"per_head_scales": False}),
            ({"key_scale": torch.ones(1), "value_scale": torch.ones(2)}, {"per_head_scales": True}),
        ],
    )
    def test_whatever_a_layer_has_is_asked_for(
        self, base: AttentionNeed, toolkit: LayerToolkit, layer: dict[str, Any], asked: dict[str, Any]
    ) -> None:
        self.add(toolkit, "a", **layer)
        (need,) = self.needs(base, toolkit)
        plain = replace(base, num_heads=4, num_kv_heads=2, head_size=16, sliding_window=None)
        assert need == replace(plain, **asked)

    def test_contexts_over_ranks_are_merged_by_their_log_sum_exp(
        self, base: AttentionNeed, toolkit: LayerToolkit
    ) -> None:
        """R5.83, R5.91."""
        self.add(toolkit, "a")
        layer = toolkit.attention_layers["a"]
        assert isinstance(layer.spec, FullAttentionSpec)
        layer.spec = msgspec.structs.replace(layer.spec, context_shards=4)
        (need,) = self.needs(base, toolkit)
        assert (need.dcp_size, need.needs_lse) == (4, True)

    def test_only_decoders_have_a_prefix_that_sees_itself(self, base: AttentionNeed, toolkit: LayerToolkit) -> None:
        self.add(toolkit, "decoder")
        self.add(toolkit, "encoder", kind=AttentionKind.ENCODER_ONLY)
        found = self.needs(replace(base, uses_mm_prefix=True), toolkit)
        assert [(need.kind, need.uses_mm_prefix) for need in found] == [
            (AttentionKind.DECODER, True),
            (AttentionKind.ENCODER_ONLY, False),
        ]

    def test_every_field_can_be_told(self, base: AttentionNeed) -> None:
        """Whoever reads a refusal sees which layers it is about."""
        plain = describe_need(replace(base, sliding_window=None))
        assert plain == "4/4 heads of 16, float32"
        changes: dict[str, Any] = {
            "kv_cache_dtype": "fp8",
            "kind": AttentionKind.ENCODER_ONLY,
            "chunk_size": 7,
            "logits_soft_cap": 2.0,
            "dcp_size": 2,
        }
        changes |= {field.name: True for field in fields(base) if field.type == "bool" and field.name != "keeps_prompt"}
        for name, value in changes.items():
            assert describe_need(replace(base, sliding_window=None, **{name: value})) != plain, name
        assert "window 99 beside the prompt" in describe_need(replace(base, keeps_prompt=True))


def chosen(create: Any, names: list[str], need: Any, **settings: Any) -> Any:
    return AttentionSelector(create, names, **settings).choose({need: ()})


class TestChoice:
    @pytest.fixture
    def need(self, world: Any) -> Any:
        return need_of(world, {"num_attention_heads": 4, "hidden_size": 64})

    def test_the_first_that_accepts_wins_and_refusals_are_kept(self, need: Any, loop_backend: Any) -> None:
        """R5.3."""
        backends = {name: loop_backend() for name in ("a", "b", "c")}
        backends["a"].refusal = "needs a GPU"
        choice = chosen(backends.__getitem__, ["a", "b", "c"], need)
        assert (choice.name, choice.backend) == ("b", backends["b"])
        assert choice.refused == (("a", "needs a GPU"),)
        assert choice.table().splitlines() == ["  a  refuses: needs a GPU", "  b  chosen", "  c  not asked"]

    def test_a_candidate_is_loaded_once_and_none_behind_the_chosen_one(self, need: Any, loop_backend: Any) -> None:
        loaded: list[str] = []

        def create(name: str) -> Any:
            loaded.append(name)
            backend = loop_backend()
            backend.refusal = "no" if name == "a" else None
            return backend

        selector = AttentionSelector(create, ["a", "b", "c"])
        assert selector.choose({need: ()}).backend is selector.choose({need: ()}).backend
        assert loaded == ["a", "b"]

    def test_a_backend_that_knows_no_latents_is_passed_over(self, world: Any, loop_backend: Any) -> None:
        """R5.12, R5.5."""
        need = need_of(world, LATENT)

        class KeysAndValues(loop_backend):
            def refuse(self, need: AttentionNeed) -> str | None:
                return "keys and values lie apart here" if need.uses_mla else None

        backends = {"apart": KeysAndValues(), "latent": loop_backend()}
        choice = chosen(backends.__getitem__, ["apart", "latent"], need)
        assert choice.backend is backends["latent"]
        assert choice.refused == (("apart", "keys and values lie apart here"),)
        with pytest.raises(ConfigError, match="'apart' was asked for but refuses: keys and values lie apart here"):
            chosen(backends.__getitem__, ["latent"], need, forced="apart")

    def test_needs_that_a_backend_has_never_heard_of_are_refused_for_it(self, need: Any, loop_backend: Any) -> None:
        """R5.5: a field that came after the backend was written."""
        with pytest.raises(ConfigError, match="loop  it does not know the need for uses_row_causality"):
            chosen({"loop": loop_backend()}.__getitem__, ["loop"], replace(need, uses_row_causality=True))

    def test_a_candidate_that_cannot_load_is_a_refusal_unless_forced(self, need: Any, loop_backend: Any) -> None:
        good = loop_backend()

        def create(name: str) -> Any:
            if name == "gone":
                raise PluginNotFoundError("no attention_backend plugin 'gone'")
            return good

        choice = chosen(create, ["gone", "good"], need)
        assert choice.refused == (("gone", "it is not installed"),)
        with pytest.raises(PluginNotFoundError):
            chosen(create, ["good"], need, forced="gone")
        told = AttentionSelector(create, ["good"], forced="gone").examine({need: ()})
        assert [str(verdict) for verdict in told] == ["refuses: no attention_backend plugin 'gone'"]

    def test_forcing_ignores_the_order_and_takes_names_from_anywhere(self, need: Any, loop_backend: Any) -> None:
        """R5.4: an out-of-tree backend is selectable by name."""
        backends = {name: loop_backend() for name in ("a", "stranger")}
        assert chosen(backends.__getitem__, ["a"], need, forced="stranger").backend is backends["stranger"]

    def test_without_candidates_the_installed_ones_are_listed(self, need: Any) -> None:
        none: dict[str, AttentionBackend] = {}
        with pytest.raises(ConfigError, match=r"(?s)no candidates.*installed: x, y; name one"):
            chosen(none.__getitem__, [], need, installed=("x", "y"))

    def test_examining_asks_those_behind_the_chosen_one_too(self, need: Any, loop_backend: Any) -> None:
        """R5.3: the whole table, for whoever looks before a start."""
        backends = {name: loop_backend() for name in "abcd"}
        backends["a"].refusal = "too old"
        backends["c"].refusal = "too new"
        told = AttentionSelector(backends.__getitem__, list("abcd")).examine({need: ()})
        assert [str(verdict) for verdict in told] == ["refuses: too old", "chosen", "refuses: too new", "would accept"]


class TestMixedLayers:
    """R5.3, R5.5: one backend serves all layers of a model, so each distinct need is asked for."""

    @pytest.fixture
    def needs(self, world: Any) -> dict[AttentionNeed, tuple[str, ...]]:
        plain = need_of(world, {"num_attention_heads": 4, "hidden_size": 64})
        return {plain: ("l0",), replace(plain, sliding_window=8): ("l1", "l2", "l3", "l4")}

    def test_the_first_that_serves_all_of_them(self, needs: Any, loop_backend: Any) -> None:
        class NoWindows(loop_backend):
            def refuse(self, need: AttentionNeed) -> str | None:
                return "no windows" if need.sliding_window else None

        backends = {"whole": NoWindows(), "any": loop_backend()}
        choice = AttentionSelector(backends.__getitem__, ["whole", "any"]).choose(needs)
        assert choice.name == "any"
        assert choice.refused == (
            ("whole", "l1, l2 and 2 more layers (4/4 heads of 16, float32, window 8): no windows"),
        )

    def test_a_reason_that_concerns_all_of_them_is_said_once(self, needs: Any, loop_backend: Any) -> None:
        class Nobody(loop_backend):
            def refuse(self, need: AttentionNeed) -> str | None:
                return "it is asleep"

        verdicts = AttentionSelector({"one": Nobody()}.__getitem__, ["one"]).examine(needs)
        assert [verdict.reason for verdict in verdicts] == ["it is asleep"]

    def test_kinds_of_layers_that_the_configuration_does_not_tell(self, world: Any, loop_backend: Any) -> None:
        """R5.5: before the first forward, with the backend's own reason."""

        class ForDecoders(loop_backend):
            def refuse(self, need: AttentionNeed) -> str | None:
                return None if need.kind is AttentionKind.DECODER else "sees one side only"

        plain = need_of(world, {"num_attention_heads": 4, "hidden_size": 64})
        both = {plain: ("decoder",), replace(plain, kind=AttentionKind.ENCODER_ONLY): ("encoder",)}
        selector = AttentionSelector({"one": ForDecoders()}.__getitem__, ["one"], forced="one")
        assert selector.choose({plain: ()}).name == "one"
        with pytest.raises(ConfigError, match=r"'one' was asked for but refuses: encoder \(.*encoder-only\): sees one"):
            selector.choose(both)

    def test_layers_are_bound_to_the_choice_and_the_table_is_logged_once(
        self, world: Any, loop_backend: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        """R5.1, R5.3."""
        toolkit = LayerToolkit.create(world.config(), device=torch.device("cpu"), dtype=torch.float32)
        for name, window in (("a", None), ("b", 8)):
            toolkit.attention(name, num_heads=4, num_kv_heads=2, head_size=16, scale=1.0, sliding_window=window)
        layer = toolkit.attention_layers["a"]
        assert isinstance(layer, AttentionLayer)
        with pytest.raises(RuntimeError, match="'a' has no backend yet"):
            _ = layer.impl
        backends = {"first": loop_backend(), "second": loop_backend()}
        backends["first"].refusal = "too slow"
        logger = logging.getLogger("test.selection")
        base = need_of(world, {"num_attention_heads": 4, "hidden_size": 64})
        with caplog.at_level(logging.INFO, logger.name):
            AttentionSelector(backends.__getitem__, ["first", "second"], logger=logger).serve(toolkit, base)
        assert isinstance(layer.impl, AttentionImpl)
        assert [record.getMessage().splitlines() for record in caplog.records] == [
            [
                "attention backend: second on a test machine for 4/2 heads of 16, float32; 4/2 heads of 16, float32, "
                "window 8",
                "  first   refuses: too slow",
                "  second  chosen",
            ]
        ]


class TestBlockSizes:
    """R5.15, R1.45."""

    @pytest.mark.parametrize(
        ("rules", "accepted", "refused"),
        [
            ([BlockSizeRule(16)], (16, 48), (8, 24)),
            ([BlockSizeRule(16), BlockSizeRule(24)], (48, 96), (16, 24)),
            ([BlockSizeRule(16), BlockSizeRule(exact=(64, 72))], (64,), (16, 72, 128)),
            ([BlockSizeRule(16, (8,)), BlockSizeRule(4)], (8, 16, 32), (4, 12)),
            ([BlockSizeRule(exact=(32, 64)), BlockSizeRule(exact=(64, 128))], (64,), (32, 128)),
        ],
    )
    def test_what_all_layers_accept(
        self, rules: list[BlockSizeRule], accepted: tuple[int, ...], refused: tuple[int, ...]
    ) -> None:
        rule = common_rule(rules)
        assert all(rule.accepts(size) for size in accepted)
        assert not any(rule.accepts(size) for size in refused)

    @settings(max_examples=25)
    @given(
        st.lists(
            st.builds(BlockSizeRule, st.sampled_from([1, 8, 16, 24]), st.sets(st.integers(1, 64)).map(tuple)),
            min_size=1,
        )
    )
    def test_what_is_common_is_accepted_by_each(self, rules: list[BlockSizeRule]) -> None:
        rule = common_rule(rules)
        for size in range(1, 129):
            each = all(one.accepts(size) for one in rules)
            assert rule.accepts(size) <= each, (size, rules)
            if all(size in one.exact for one in rules) or all(size % (one.multiple_of or size) == 0 for one in rules):
                assert rule.accepts(size)

    def test_nothing_in_common(self) -> None:
        with pytest.raises(ConfigError, match="no block size in common \\(64; 128\\)"):
            common_rule([BlockSizeRule(exact=(64,)), BlockSizeRule(exact=(128,))])

    @pytest.mark.parametrize(
        ("size", "rule", "fits"), [(48, BlockSizeRule(16), 48), (48, BlockSizeRule(exact=(16,)), 16)]
    )
    def test_blocks_are_split_for_kernels(self, size: int, rule: BlockSizeRule, fits: int) -> None:
        assert largest_fitting(size, rule) == fits
        assert largest_fitting(size + 1, rule) is None

    def test_a_backend_whose_blocks_do_not_fit_is_passed_over(self, world: Any, loop_backend: Any) -> None:
        """R5.15: whoever has the manager's blocks as they are comes next, and the reason says what to set."""
        need = replace(need_of(world, {"num_attention_heads": 4, "hidden_size": 64}), block_size=16)
        backends = {"large": loop_backend(kernel_block=64), "any": loop_backend()}
        choice = chosen(backends.__getitem__, ["large", "any"], need)
        assert choice.name == "any"
        reason = "blocks of 16 tokens cannot be divided into any that its kernels take (64); set --block-size"
        assert choice.refused == (("large", reason),)
        assert chosen(backends.__getitem__, ["large"], replace(need, block_size=128)).kernel_block_size(128) == 64
        with pytest.raises(ConfigError, match="'large' was asked for but refuses: blocks of 16 tokens"):
            chosen(backends.__getitem__, [], need, forced="large")

    def test_layers_that_want_different_blocks(self, world: Any, loop_backend: Any) -> None:
        class BySize(loop_backend):
            def block_sizes(self, need: AttentionNeed) -> BlockSizeRule:
                return BlockSizeRule(exact=(128,)) if need.head_size == 256 else BlockSizeRule(16)

        plain = replace(need_of(world, {"num_attention_heads": 4, "hidden_size": 64}), block_size=256)
        both = {plain: ("a",), replace(plain, head_size=256): ("b",)}
        selector = AttentionSelector({"one": BySize()}.__getitem__, ["one"])
        assert selector.choose({plain: ()}).kernel_block_size(256) == 256
        assert selector.choose(both).kernel_block_size(256) == 128
