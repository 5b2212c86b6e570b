"""Vision transformers beside those of Hugging Face with the same weights, whole and divided among ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import msgspec
import pytest
import torch
from transformers import CLIPVisionConfig, CLIPVisionModel, SiglipVisionConfig, SiglipVisionModel
from transformers.models.idefics3.configuration_idefics3 import Idefics3VisionConfig
from transformers.models.idefics3.modeling_idefics3 import Idefics3VisionTransformer

from hardpoint.errors import ModelFormatError, UnsupportedModelError
from hardpoint.interfaces.model import Model, WeightRule
from hardpoint.interfaces.model_source import ModelArtifact, ModelInfo
from hardpoint.interfaces.worker import ParallelSlice
from hardpoint_models.siglip import VisionTower, fractional_positions, vision_rules
from hardpoint_models.siglip_config import VisionConfig, read_siglip
from hardpoint_testing_torch import StateDictLoader, relative_error, worker_config
from hardpoint_testing_torch.rank_threads import RankMeeting, RankThreads, ThreadCommunicator
from hardpoint_torch_runtime import LayerToolkit, load_weights

SIZES: Mapping[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 30,
    "patch_size": 5,
}
INFO = ModelInfo(
    artifact=ModelArtifact(name="tower", root=".", files=(), source="local"),
    architecture="Tower",
    config=dict(SIZES),
    max_position=64,
    vocab_size=8,
    dtype="float32",
    loader="safetensors",
)


class Holder(torch.nn.Module):
    """As much of a model as loading needs."""

    def __init__(self, config: VisionConfig, layers: LayerToolkit) -> None:
        super().__init__()
        self.tower = VisionTower("tower", config, layers)

    def weight_rules(self) -> Sequence[WeightRule]:
        pooled = [WeightRule(f"head.{name}", None) for name in ("probe", "*.*", "*.*.*")]
        stored = SIZES["num_hidden_layers"]
        return [*vision_rules("tower", "tower", self.tower.config, stored), *pooled]

    def holds(self, parameter: str) -> bool:
        return True


def randomized(module: torch.nn.Module) -> torch.nn.Module:
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(
                torch.randn(parameter.shape) * (0.2 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5)
            )
    return module.float().eval()


def tower(
    config: VisionConfig, oracle: torch.nn.Module, rank: int = 0, meeting: RankMeeting | None = None
) -> VisionTower:
    size = 1 if meeting is None else meeting.size
    parallel = ParallelSlice(world_size=size, rank=rank, tensor_parallel_size=size)
    toolkit = LayerToolkit.create(
        msgspec.structs.replace(worker_config(INFO), parallel=parallel),
        device=torch.device("cpu"),
        dtype=torch.float32,
        communicator=None if meeting is None else ThreadCommunicator(meeting, rank),
    )
    holder = Holder(config, toolkit)
    stored = {name.removeprefix("vision_model."): value for name, value in oracle.state_dict().items()}
    named = {name if name.startswith("head.") else f"tower.{name}": value for name, value in stored.items()}
    load_weights(cast(Model, holder), StateDictLoader(named), INFO, show_progress=False, rank=rank)
    return holder.tower


def read(fields: Mapping[str, Any], *, fractional: bool = False) -> VisionConfig:
    kinds = ("siglip_vision_model", "idefics3_vision")
    return read_siglip(
        fields, "Tower", model_types=kinds, defaults={"num_channels": 3}, fractional_positions=fractional
    )


@pytest.mark.parametrize("activation", ["gelu_pytorch_tanh", "relu"])
@torch.inference_mode()
def test_siglip_sees_all_patches(activation: str) -> None:
    """Of images whose sides are no multiple of a patch as well."""
    fields = {**SIZES, "image_size": 33, "hidden_act": activation, "num_channels": 2, "layer_norm_eps": 1e-3}
    oracle = randomized(SiglipVisionModel(SiglipVisionConfig(**fields, vision_use_head=True)))
    pixels = torch.randn(3, 2, 33, 33)
    found = tower(read(fields), oracle)(pixels)
    assert found.shape == (3, 36, 48)
    assert relative_error(found, oracle(pixels).last_hidden_state) < 1e-5


@pytest.mark.parametrize("size", [2, 4])
@torch.inference_mode()
def test_ranks_together_are_the_whole(size: int) -> None:
    oracle, meeting = randomized(Idefics3VisionTransformer(Idefics3VisionConfig(**SIZES))), RankMeeting(size)
    pixels, patches = torch.randn(2, 3, 30, 30), torch.ones(2, 6, 6, dtype=torch.bool)
    patches[1, 4:] = False
    expected = oracle(pixels, patch_attention_mask=patches).last_hidden_state

    @torch.inference_mode()
    def run(rank: int) -> torch.Tensor:
        return tower(read(SIZES, fractional=True), oracle, rank, meeting)(pixels, patches)

    for found in RankThreads.run(size, run, patience_s=60.0):
        assert relative_error(found, expected) < 1e-5
    assert meeting.num_meetings == 2 * SIZES["num_hidden_layers"], "two sums per layer, and nothing else"


@pytest.mark.parametrize("shape", [(6, 6), (6, 4), (1, 5), (3, 3), (2, 6)])
@torch.inference_mode()
def test_idefics3_places_patches_by_their_share_of_the_image(shape: tuple[int, int]) -> None:
    """A padded image beside a whole one: other patches than the real ones are seen by nobody."""
    oracle = randomized(Idefics3VisionTransformer(Idefics3VisionConfig(**SIZES)))
    ours = tower(read(SIZES, fractional=True), oracle)
    pixels, patches = torch.randn(2, 3, 30, 30), torch.zeros(2, 6, 6, dtype=torch.bool)
    patches[0] = True
    patches[1, : shape[0], : shape[1]] = True
    expected = oracle(pixels, patch_attention_mask=patches).last_hidden_state
    assert relative_error(ours(pixels, patches), expected) < 1e-5
    # What is in the padding changes only what is made of the padding.
    changed = torch.where(patches.repeat_interleave(5, 1).repeat_interleave(5, 2)[:, None], pixels, pixels + 1)
    assert torch.allclose(ours(changed, patches)[patches.flatten(1)], expected[patches.flatten(1)], atol=1e-5)


@pytest.mark.parametrize("grid", [*range(1, 33), 70])
def test_places_are_those_of_the_models(grid: int) -> None:
    """For every size of image that fits, also where rounding decides."""
    config = Idefics3VisionConfig(**{**SIZES, "hidden_size": 4, "image_size": grid, "patch_size": 1})
    embeddings = Idefics3VisionTransformer(config).embeddings
    with torch.no_grad():
        embeddings.position_embedding.weight[:] = torch.arange(grid**2)[:, None].float()
        embeddings.patch_embedding.weight.zero_()
        embeddings.patch_embedding.bias.zero_()
    patches = torch.zeros(grid, grid, grid, dtype=torch.bool)
    for index in range(grid):
        patches[index, : index + 1, : grid - index] = True
    expected = embeddings(torch.zeros(grid, 3, grid, grid), patches)[..., 0]
    assert torch.equal(fractional_positions(patches, grid).float(), expected)


@torch.inference_mode()
def test_clip_has_a_token_of_its_own_and_a_norm_before_the_layers() -> None:
    oracle = randomized(CLIPVisionModel(CLIPVisionConfig(**SIZES, hidden_act="gelu")))
    config = replace(
        read({**SIZES, "hidden_act": "gelu"}),
        patch_bias=False,
        has_class_token=True,
        has_input_norm=True,
        has_output_norm=False,
        norm_eps=1e-5,
    )
    pixels = torch.randn(2, 3, 30, 30)
    states = oracle(pixels, output_hidden_states=True).hidden_states
    for num_layers in (1, 2):
        found = tower(replace(config, num_layers=num_layers), oracle)(pixels)
        assert found.shape == (2, 37, 48)
        assert relative_error(found, states[num_layers]) < 1e-5


@pytest.mark.parametrize(
    ("fields", "error", "named"),
    [
        ({"hidden_act": "of_nobody"}, UnsupportedModelError, "hidden_act"),
        ({"model_type": "dinov2"}, UnsupportedModelError, "model_type"),
        ({"image_size": [30, 20]}, UnsupportedModelError, "image_size"),
        ({"patch_size": [5, 5]}, UnsupportedModelError, "patch_size"),
        ({"num_attention_heads": 5}, ModelFormatError, "num_attention_heads"),
        ({"patch_size": 31}, ModelFormatError, "patch_size"),
        ({"patch_size": 0}, ModelFormatError, "patch_size"),
        ({"hidden_size": None}, ModelFormatError, "hidden_size"),
        ({"layer_norm_eps": -1.0}, ModelFormatError, "layer_norm_eps"),
        ({"num_hidden_layers": 20_000}, ModelFormatError, "num_hidden_layers"),
    ],
)
def test_other_towers_are_refused_by_name(fields: dict[str, Any], error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        read({**SIZES, **fields})
