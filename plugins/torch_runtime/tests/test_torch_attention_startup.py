"""What layers ask for reaches the backend; what a start would decide elsewhere; and no layer knows a backend."""

from __future__ import annotations

import ast
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hardpoint_torch_runtime.layers
from hardpoint.errors import HardpointError, ModelFormatError, PluginLoadError, UnsupportedModelError
from hardpoint.interfaces.attention import AttentionImpl, AttentionLayerParams, AttentionNeed
from hardpoint.interfaces.kv_cache import KVCacheConfig, KVCacheGroup, spec_to_wire
from hardpoint.interfaces.kv_cache_specs import ChunkedLocalAttentionSpec, FullAttentionSpec, SlidingWindowSpec
from hardpoint.interfaces.platform import DeviceDescription
from hardpoint.interfaces.plugin import PluginDeclaration, ProbeResult, ProbeStatus
from hardpoint.interfaces.worker import ParallelSlice
from hardpoint_testing_torch.plain_attention import PlainAttentionBackend
from hardpoint_torch_runtime import LayerToolkit
from hardpoint_torch_runtime.attention_startup import attention_for_layers, attention_report
from hardpoint_torch_runtime.backend_selection import AttentionSelector
from hardpoint_torch_runtime.layers import AttentionLayer
from hardpoint_torch_runtime.runner.attention_groups import AttentionGroups
from hardpoint_torch_runtime.runner.input_batch import InputBuilder
from hardpoint_torch_runtime.runner.slot_state import SlotState

CPU = torch.device("cpu")
ELSEWHERE = DeviceDescription(device_type="acme", name="an absent device", capability=(9, 0))
LAYERS = Path(hardpoint_torch_runtime.layers.__file__).parent


class Watched(PlainAttentionBackend):
    """Remembers the layers it was asked to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[AttentionLayerParams] = []

    def create_impl(self, params: AttentionLayerParams) -> AttentionImpl:
        self.made.append(params)
        return super().create_impl(params)


def toolkit(world: Any, backend: PlainAttentionBackend | None = None) -> LayerToolkit:
    return LayerToolkit.create(world.config(), device=CPU, dtype=torch.float32, attention_backend=backend)


def add(tools: LayerToolkit, name: str, **layer: Any) -> AttentionLayer:
    return tools.attention(name, num_heads=4, num_kv_heads=2, head_size=8, scale=1.0, **layer)


def test_everything_that_a_layer_has_reaches_its_computation(world: Any) -> None:
    """R5.1, R5.2: one implementation object, made from the layer's own parameters."""
    backend = Watched()
    layer: dict[str, Any] = {
        "sliding_window": 5,
        "keeps_prompt": True,
        "logits_soft_cap": 3.0,
        "sinks": torch.zeros(4),
        "key_scale": torch.ones(1),
        "value_scale": torch.ones(1),
    }
    add(toolkit(world, backend), "a", **layer)
    (params,) = backend.made
    assert {name: getattr(params, name) for name in layer} == layer


def test_the_layers_own_window_wins_over_its_groups(world: Any) -> None:
    """R5.45, P5.10: layers with windows and without share a group, and each computes with what is its own."""
    backend = Watched()
    tools = toolkit(world, backend)
    add(tools, "local", sliding_window=5)
    add(tools, "global")
    specs = tools.kv_cache_specs()
    merged = FullAttentionSpec(
        block_size=world.block_size, num_kv_heads=2, head_size=8, dtype="float32", sliding_window=5
    )
    config = KVCacheConfig(num_blocks=4, groups=(KVCacheGroup(tuple(specs), spec_to_wire(merged)),), tensors=())
    made = AttentionGroups(
        config,
        config.layer_specs(specs),
        backend,
        backend.block_sizes(None),  # type: ignore[arg-type]
        max_rows=2,
        max_tokens=8,
        max_model_len=16,
        device=CPU,
    )
    assert [group.layer_names for group in made.groups] == [("local", "global")]
    assert [params.sliding_window for params in backend.made] == [5, None]


def test_what_is_kept_is_what_masks_can_reach(world: Any) -> None:
    """A prompt that stays visible stays in the cache, whatever the window."""
    tools = toolkit(world)
    for name, layer in (
        ("window", {"sliding_window": 5}),
        ("prompt", {"sliding_window": 5, "keeps_prompt": True}),
        ("chunk", {"chunk_size": 8}),
    ):
        add(tools, name, **layer)
    assert {name: type(spec) for name, spec in tools.kv_cache_specs().items()} == {
        "window": SlidingWindowSpec,
        "prompt": FullAttentionSpec,
        "chunk": ChunkedLocalAttentionSpec,
    }


@pytest.mark.parametrize("keeps_prompt", [False, True])
def test_steps_tell_how_long_prompts_are_where_layers_ask(
    world: Any, make_step: Any, make_row: Any, keeps_prompt: bool
) -> None:
    """R5.23, R5.37: filled on the host and copied only where some layer keeps prompts; padding has none."""
    spec = FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=8, dtype="float32")
    config = KVCacheConfig(num_blocks=4, groups=(KVCacheGroup(("a",), spec_to_wire(spec)),), tensors=())
    backend = Watched()
    made = AttentionGroups(
        config,
        {"a": spec},
        backend,
        backend.block_sizes(None),  # type: ignore[arg-type]
        max_rows=3,
        max_tokens=8,
        max_model_len=16,
        device=CPU,
        keeps_prompt=keeps_prompt,
    )
    state = SlotState(3, 16, made.block_sizes)
    inputs = InputBuilder(state, 8, CPU, made.kernel_blocks, has_prompt_lens=made.keeps_prompt)
    state.enter(make_row(0, [1, 2, 3], [1]))
    state.enter(make_row(2, [1, 2, 3, 4, 5], [2, 3]))
    step = make_step(0, [(2, 1, 4, 1, True), (0, 1, 2, 1, True)])
    batch = inputs.build(step, pad_rows=3)
    common = made._common(batch, step, 0, False)
    if keeps_prompt:
        assert common.prompt_lens is not None
        assert common.prompt_lens_cpu is not None
        assert common.prompt_lens.tolist() == common.prompt_lens_cpu.tolist() == [5, 3, 0]
        again = inputs.build(step, pad_rows=3)
        assert again.prompt_lens is not None
        assert again.prompt_lens.data_ptr() == common.prompt_lens.data_ptr(), "I5.4"
    else:
        assert (common.prompt_lens, common.prompt_lens_cpu) == (None, None)


def test_no_layer_knows_a_backend() -> None:
    """R5.1: layers read nothing of a backend but how it writes, and compare with none of its names or classes."""
    allowed = {"kv_write_mode", "create_impl", "name"}
    for path in sorted(LAYERS.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
                owner = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
                if owner.lstrip("_") in ("backend", "attention_backend"):
                    assert node.attr in allowed, f"{path.name}:{node.lineno} reads {owner}.{node.attr}"
            if isinstance(node, ast.Compare):
                sides = [side for side in (node.left, *node.comparators) if isinstance(side, ast.Attribute)]
                about = [side for side in sides if side.attr == "name" and "backend" in ast.unparse(side.value)]
                assert not about, f"{path.name}:{node.lineno} decides by a backend's name"
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
                assert not any("flash" in name or "triton" in name for name in names), f"{path.name}:{node.lineno}"


def test_another_backend_changes_no_layer(world: Any, loop_backend: Any) -> None:
    """R5.2: what computes is exchanged behind the layer."""
    tools = toolkit(world)
    layer = add(tools, "a")
    impls = []
    for backend in (loop_backend(), Watched()):
        tools.bind_attention(backend)
        assert layer.backend is backend
        impls.append(layer.impl)
    assert type(impls[0]) is not type(impls[1])
    assert "plain" in layer.extra_repr().lower() or layer.backend.name in layer.extra_repr()


class TestReport:
    """R5.3, R5.5: the decision of a start, made where the device is not."""

    def report(self, world: Any, **changes: Any) -> Any:
        return attention_report(world.plugins, world.platform, world.config(**changes), ELSEWHERE)

    def test_it_asks_about_the_layers_and_the_absent_device(self, world: Any, loop_backend: Any) -> None:
        asked: list[AttentionNeed] = []

        class Asking(loop_backend):
            def refuse(self, need: AttentionNeed) -> str | None:
                asked.append(need)
                return None

        world.backend = Asking()
        report = self.report(world)
        assert {need.device for need in asked} == {ELSEWHERE}
        assert [(row.layers, row.need) for row in report.layers] == [
            (("layers.0.attn", "layers.1.attn"), "4/2 heads of 4, float32")
        ]
        assert (report.device, report.chosen, report.notes) == ("an absent device", "loop", ())
        assert (report.block_size, report.kernel_block_size) == (world.block_size, world.block_size)

    def test_all_candidates_answer(self, world: Any) -> None:
        world.platform.candidates = ("missing", "loop", "gone")
        report = self.report(world)
        assert [(row.name, str(row)) for row in report.candidates] == [
            ("missing", "refuses: it is not installed"),
            ("loop", "chosen"),
            ("gone", "refuses: it is not installed"),
        ]

    def test_nobody_accepts(self, world: Any) -> None:
        world.backend.refusal = "not today"
        report = self.report(world)
        assert (report.chosen, report.kernel_block_size) == (None, None)
        assert [str(row) for row in report.candidates] == ["refuses: not today"]

    def test_ranks_have_their_share_of_the_heads(self, world: Any) -> None:
        config = world.config().model.config
        assert config["num_attention_heads"] == 4
        seen: list[tuple[int, bool]] = []

        def factory(ctx: Any) -> Any:
            seen.append((ctx.layers.parallel.size, ctx.layers.device.type == "meta"))
            raise PluginLoadError("it wants more than is here")

        world.plugins.factories["model", "TinyForCausalLM"] = factory
        report = self.report(world, parallel=ParallelSlice(world_size=2, tensor_parallel_size=2))
        assert seen == [(2, True)]
        assert [(row.layers, row.need) for row in report.layers] == [((), "2/1 heads of 4, float32")]
        assert "goes by the model's configuration alone: it wants more than is here" in report.notes[0]

    @pytest.mark.parametrize("kind", [UnsupportedModelError, ModelFormatError])
    def test_a_model_that_cannot_be_run_has_no_report(self, world: Any, kind: type[HardpointError]) -> None:
        def factory(ctx: Any) -> Any:
            raise kind("nobody runs it")

        world.plugins.factories["model", "TinyForCausalLM"] = factory
        with pytest.raises(kind, match="nobody runs it"):
            self.report(world)

    def test_the_worker_answers_before_it_is_started(self, world: Any) -> None:
        worker = world.create()
        assert worker.explain_attention(ELSEWHERE).chosen == "loop"
        with pytest.raises(RuntimeError, match="call init_device first"):
            _ = worker.device


def test_the_worker_computes_with_the_choice(world: Any) -> None:
    """R5.5: after loading, before any forward."""
    world.platform.candidates = ("missing", "loop")
    worker = world.create()
    worker.init_device()
    worker.load_model()
    attention = worker.loaded.attention
    assert (attention.name, attention.backend) == ("loop", world.backend)
    assert attention.refused == (("missing", "it is not installed"),)
    assert [need.num_heads for need in attention.needs] == [4]


def broken_probe() -> ProbeResult:
    raise OSError("no driver")


@pytest.mark.parametrize(
    ("probe", "refused"),
    [
        (lambda: ProbeResult(ProbeStatus.ABSENT, "install acme-kernels"), "it is absent: install acme-kernels"),
        (lambda: ProbeResult(ProbeStatus.BROKEN, "driver too old"), "it is broken: driver too old"),
        (broken_probe, "its probe raised OSError: no driver"),
        (lambda: ProbeResult(ProbeStatus.AVAILABLE, "here"), None),
        (None, None),
    ],
)
def test_a_backend_that_cannot_run_here_is_refused_at_the_start(world: Any, probe: Any, refused: str | None) -> None:
    """R5.5, R5.3: what accepts every need and lacks a package would fail in the first forward."""

    class Declared(type(world.plugins)):  # type: ignore[misc]
        """Access that tells what plugins declare, as a process's own does."""

        def load_factory(self, kind: str, name: str) -> Any:
            return SimpleNamespace(declaration=PluginDeclaration(kind, probe=probe if name == "first" else None))

    plugins = Declared(dict(world.plugins.factories))
    plugins.factories["attention_backend", "first"] = plugins.factories["attention_backend", "loop"]
    world.platform.candidates = ("first", "loop")
    report = attention_report(plugins, world.platform, world.config(), ELSEWHERE)
    assert report.chosen == ("first" if refused is None else "loop")
    assert report.candidates[0].reason == (refused or "")


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_tells_of_the_candidates(world: Any, rank: int, caplog: pytest.LogCaptureFixture) -> None:
    """R5.3: one table per start, however many processes choose."""
    parallel = ParallelSlice(rank=rank, world_size=2, tensor_parallel_size=2)
    logger = logging.getLogger("test.attention_startup")
    with caplog.at_level(logging.INFO, logger.name):
        attend = attention_for_layers(
            world.plugins, world.platform, world.config(parallel=parallel), ELSEWHERE, CPU, logger
        )
        tools = toolkit(world)
        add(tools, "a")
        assert attend(tools).name == "loop"
    assert len(caplog.records) == (rank == 0)


def test_only_the_candidates_that_are_needed_are_created(world: Any) -> None:
    names: list[str] = []

    def create(name: str) -> Any:
        names.append(name)
        return world.backend

    selector = AttentionSelector(create, ("one", "two"))
    tools = toolkit(world)
    add(tools, "a")
    base = AttentionNeed(4, 2, 8, "float32", "float32", ELSEWHERE)
    selector.serve(tools, base)
    assert names == ["one"]


def test_a_layer_that_was_never_bound_says_so(world: Any) -> None:
    layer = add(toolkit(world), "a")
    for name in ("impl", "backend"):
        with pytest.raises(RuntimeError, match="'a' has no backend yet; bind one first"):
            getattr(layer, name)
    assert "no backend" in layer.extra_repr()
