"""``--loader dummy``: every architecture runs without weights, on the same made-up ones each time."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from hardpoint import LLM, Prompt, SamplingParams
from hardpoint.config import AppConfig, EngineConfig
from hardpoint.errors import ConfigError, UnsupportedModelError
from hardpoint.interfaces import Feature, PositionLogprobs
from hardpoint_testing_torch import ParityCase, write_tiny_tokenizer
from hardpoint_testing_torch.tiny_models import forget_foreign_tokens, tiny_fields
from model_cases import CASES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PLAIN = {case.architecture: case for case in reversed(CASES)}
"""The first case of each architecture."""
PROMPT = Prompt(token_ids=[3, 1, 4, 1, 5, 9, 2, 6])


def write_config(case: ParityCase, folder: Path) -> Path:
    """``config.json`` and a tokenizer, and nothing else."""
    config = getattr(transformers, case.architecture).config_class(**tiny_fields(case.config))
    config.architectures = [case.architecture]
    forget_foreign_tokens(config)
    config.save_pretrained(folder)
    write_tiny_tokenizer(folder, config.get_text_config().vocab_size)
    return folder


def spoken(folder: Path) -> Prompt:
    """A spectrogram for an encoder."""
    config = json.loads((folder / "config.json").read_text())
    length = config["max_source_positions"]
    data = np.linspace(-1, 1, config["num_mel_bins"] * 2 * length, dtype=np.float32).reshape(-1, 2 * length)
    digest = hashlib.sha256(data.tobytes()).hexdigest()
    data_of = {"input_features": data}
    feature = Feature(
        modality="audio", content_hash=digest, offset=0, length=1, num_encoder_tokens=length, data=data_of
    )
    return Prompt(token_ids=[3], features=(feature,))


def answer(folder: Path, *, seed: int = 0, dtype: str = "float32", **settings: Any) -> list[float]:
    """Log-probabilities of a short greedy answer, or an embedding."""
    limits = {"block_size": 4, "max_model_len": 64, "max_num_seqs": 2, "num_kv_blocks": 400}
    document = {
        "engines": {"tiny": EngineConfig.sections(str(folder), loader="dummy", dtype=dtype, **limits, **settings)},
        "plugins": {"weight_loader": {"dummy": {"seed": seed, "scale": 0.2}}},
    }
    with LLM.from_config(AppConfig.model_validate(document)) as llm:
        if not getattr(transformers, folder.name, transformers.LlamaForCausalLM).can_generate():
            return [float(value) for value in np.ravel(llm.embed(PROMPT)[0].embedding)]
        params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=3)
        (output,) = llm.generate(spoken(folder) if "Whisper" in folder.name else PROMPT, params)
    positions: tuple[PositionLogprobs, ...] = output.outputs[0].logprobs or ()
    return [one.logprob for position in positions for one in position.top]


@pytest.mark.parametrize("architecture", sorted(PLAIN))
def test_made_up_weights_are_the_same_each_time_and_others_by_another_seed(architecture: str, tmp_path: Path) -> None:
    folder = write_config(PLAIN[architecture], tmp_path / architecture)
    first, again, other = (answer(folder, seed=seed) for seed in (1, 1, 2))
    assert first
    assert first == again
    assert first != other


def test_ranks_take_their_shares_of_the_same_tensors(tmp_path: Path) -> None:
    folder = write_config(PLAIN["MixtralForCausalLM"], tmp_path / "mixture")
    alone = answer(folder)
    assert answer(folder, executor="multiproc", tensor_parallel_size=2) == pytest.approx(alone, abs=1e-5)


def test_an_architecture_without_a_plugin_is_refused_all_the_same(tmp_path: Path) -> None:
    """Nobody could say which weights to make up."""
    folder = write_config(PLAIN["LlamaForCausalLM"], tmp_path / "ghost")
    path = folder / "config.json"
    path.write_text(path.read_text().replace("LlamaForCausalLM", "GhostForCausalLM"))
    with pytest.raises(UnsupportedModelError, match="GhostForCausalLM"):
        answer(folder)


def test_a_model_larger_than_any_memory_says_what_to_change(tmp_path: Path) -> None:
    """A table of 2**50 bytes, which not even an address space has room for."""
    folder = write_config(PLAIN["MixtralForCausalLM"], tmp_path / "vast")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "vocab_size": 2**31 - 1, "hidden_size": 2**17}))
    with pytest.raises(ConfigError, match=r"more memory for weights and positions .* narrower --dtype") as caught:
        answer(folder)
    assert "\n" not in str(caught.value)
