"""What models ask of attention backends is found without weights: layers on no device ask for what real ones do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hardpoint.testing.doctor_device import described_on, parse_device
from hardpoint_cuda.platform import CudaPlatform
from hardpoint_testing_torch import ParityCase, worker_config
from hardpoint_testing_torch.tiny_models import model_info, tiny_fields
from hardpoint_testing_torch.worker_world import installed_plugins
from hardpoint_torch_runtime import LayerToolkit
from hardpoint_torch_runtime.attention_needs import attention_need, bare_need, describe_need, layer_needs
from hardpoint_torch_runtime.attention_startup import attention_report
from hardpoint_torch_runtime.model_loading import create_model
from model_cases import CASES

pytestmark = pytest.mark.slow

LAST = {case.architecture: case for case in CASES}


@pytest.mark.parametrize("case", LAST.values(), ids=LAST)
def test_layers_without_memory_ask_for_the_same(
    case: ParityCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R5.5, R5.16: of every architecture there is, on a device that is not there."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    model_class: Any = getattr(transformers, case.architecture)
    hf_config = model_class.config_class(**tiny_fields(case.config))
    hf_config.architectures = [case.architecture]
    (tmp_path / "config.json").write_text(json.dumps(hf_config.to_dict(), default=str), encoding="utf-8")
    config = worker_config(model_info(tmp_path, case.architecture))
    plugins = installed_plugins()
    platform, device = described_on(CudaPlatform(environment={}), parse_device("cuda sm_90 80GiB").description, 1)
    report = attention_report(plugins, platform, config, device)
    assert report.notes == ()
    toolkit = LayerToolkit.create(config, device=torch.device("cpu"), dtype=getattr(torch, config.dtype))
    create_model(plugins, config, toolkit)
    base = attention_need(config, device)
    # A model without attention layers asks for nothing but that a backend can be there.
    needs = layer_needs(base, toolkit.attention_layers.values()) or {bare_need(base): ()}
    found = [(row.need, row.layers) for row in report.layers]
    assert found == [(describe_need(need), names) for need, names in needs.items()]
    assert report.chosen is not None
