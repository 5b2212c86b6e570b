"""R12.30: a platform from outside the tree runs a model, chosen by name or because nothing else is available."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from hardpoint import LLM, SamplingParams
from hardpoint.errors import ConfigError
from hardpoint.interfaces import LogicalDevice
from hardpoint.testing.fake_platform import FakePlatform, install_fake_platform
from tiny_llama import write_tiny_llama

pytestmark = pytest.mark.timeout(300)

PROMPT = "ab ba ab"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_llama(tmp_path_factory.mktemp("fake-device") / "tiny"))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    install_fake_platform(tmp_path)
    return tmp_path


def tokens(llm: LLM) -> list[int]:
    result = llm.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))[0]
    return list(result.outputs[0].token_ids)


def test_its_tokens_are_those_of_the_cpu(model: str, site: Path, caplog: pytest.LogCaptureFixture) -> None:
    """R12.39, R12.30, L12.23: the block size, too, comes from what the attention backend states."""
    with LLM(model, platform="cpu", num_kv_blocks=64) as llm:
        wanted = tokens(llm)
    with caplog.at_level(logging.INFO, "hardpoint.launch"):
        # The CPU is only a fallback, so the new device is taken without being named.
        llm = LLM(model, num_kv_blocks=64)
    with llm:
        assert tokens(llm) == wanted
    assert "KV block size 16, set by phase 1 of alignment (torch_reference: any multiple of 1)" in caplog.text


def test_a_masked_device_is_used_under_its_own_number(model: str, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_VISIBLE_DEVICES", "1")
    assert FakePlatform().describe(LogicalDevice(0)).name == "fake-1"
    with LLM(model, platform="fake", num_kv_blocks=64) as llm:
        assert len(tokens(llm)) == 12


def test_a_mask_that_names_no_device_stops_the_start(model: str, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R12.37: in the launcher, naming variable and value."""
    monkeypatch.setenv("FAKE_VISIBLE_DEVICES", "GPU-0")
    with pytest.raises(ConfigError, match="FAKE_VISIBLE_DEVICES='GPU-0'"):
        LLM(model, platform="fake", num_kv_blocks=64)
