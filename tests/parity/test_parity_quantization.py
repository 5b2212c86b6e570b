"""The table of accuracy of quantization methods: on the page there is what a run comes to now, in the bounds we set."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hardpoint_testing_torch import LocalDriver, relative_norm
from hardpoint_torch_runtime.layers import ParallelLinear
from quantization_accuracy import ROWS, Variant, differences, load, logits, measure, model_file, read_page, text_ids

FLOAT, INT8 = {"activations": "float"}, {"activations": "int8"}


def layer_of(driver: LocalDriver, name: str) -> ParallelLinear:
    """The linear of this name."""
    model: Any = driver.model
    found: ParallelLinear = model.get_submodule(name)
    return found


needs_model = pytest.mark.skipif(model_file() is None, reason="the demo model package is not installed")


def test_every_variant_is_on_the_page_within_bounds() -> None:
    """As they come, methods raise perplexity by less than a twentieth and keep most of the most probable tokens."""
    page = read_page()
    assert list(page) == [str(variant) for variant in ROWS]
    whole = page["none"]
    for row in page.values():
        is_coarse = "group_size" in row.name
        assert row.perplexity < (1.5 if is_coarse else 1.05) * whole.perplexity, row
        assert row.agreement > (0.6 if is_coarse else 0.85), row
    assert page["int8"].megabytes < 0.26 * whole.megabytes
    assert page["int4"].megabytes < page["int8"].megabytes
    assert page["gguf"].megabytes < page["int4"].megabytes


@pytest.mark.slow
@pytest.mark.timeout(1200)
@needs_model
def test_the_page_says_what_comes_of_it() -> None:
    rows = measure([Variant(None), Variant("int8"), Variant("int4"), Variant("gguf")])
    assert differences(rows) == []


@pytest.mark.slow
@pytest.mark.timeout(300)
@needs_model
def test_packed_blocks_compute_what_unpacked_ones_do() -> None:
    """With whole activations the same to the last digits. Rounding them costs less than 1e-2 in any layer, which adds
    up to some more in the logits."""
    path = model_file()
    assert path is not None
    ids = text_ids(path, 64)
    exact, _ = load(path, ROWS[0])
    expected = logits(exact, ids)
    for options, in_layers, in_logits in ((FLOAT, 1e-4, 1e-4), (INT8, 1e-2, 5e-2)):
        packed, _ = load(path, Variant("gguf", options))
        assert relative_norm(logits(packed, ids), expected.double()) < in_logits
        for name in ("self_attn.qkv_proj", "mlp.down_proj"):
            whole, blocks = (layer_of(one, f"model.layers.7.{name}") for one in (exact, packed))
            x = torch.randn(5, whole.shape.input_size, generator=torch.Generator().manual_seed(0))
            assert relative_norm(blocks(x), whole(x).double()) < in_layers
