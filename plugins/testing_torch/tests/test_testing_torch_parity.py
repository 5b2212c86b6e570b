"""The comparison with oracles: sound models pass in every mode, and what is wrong shows where it is wrong."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from hardpoint.interfaces.model import Model, ModelContext
from hardpoint.interfaces.plugin import NoOptions
from hardpoint_testing_torch import (
    MODES,
    LocalDriver,
    ModeResult,
    ParityCase,
    ParityReport,
    PlainAttention,
    PlainAttentionBackend,
    TinyModel,
    Verdict,
    build_model,
    check_parity,
    installed_factory,
    make_tiny_model,
    measure_parity,
    run_parity,
    worker_config,
)
from hardpoint_testing_torch.__main__ import main
from hardpoint_testing_torch.double_oracle import DoubleOracle
from hardpoint_testing_torch.engine_parity import GenerationParity
from hardpoint_testing_torch.state_dict_loader import StateDictLoader

SMALL: dict[str, Any] = {"num_hidden_layers": 2, "vocab_size": 60}
LLAMA = ParityCase("LlamaForCausalLM", SMALL)


def create(ctx: ModelContext, options: NoOptions) -> Model:
    model: Model = installed_factory("model", "LlamaForCausalLM")(ctx, options)
    return model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("tiny"), **SMALL)


@torch.inference_mode()
def test_an_oracle_in_float64_says_the_same_of_a_chunk_as_of_its_tokens_one_by_one(tmp_path: Path) -> None:
    """Two forms of one recurrence, both in float32 as ``transformers`` has them: anything left narrow would show."""
    sizes: dict[str, Any] = {
        "layer_types": ["linear_attention", "full_attention"],
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 12,
        "linear_value_head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "rms_norm_eps": 1e-2,
    }
    model = make_tiny_model("Qwen3NextForCausalLM", tmp_path, **SMALL, **sizes).oracle
    tokens = torch.arange(24)[None] % SMALL["vocab_size"]
    oracle = DoubleOracle(model)
    whole, cache, parts = oracle(tokens).logits[0], None, []
    for token in tokens[0]:
        found = oracle(token.view(1, 1), past_key_values=cache, use_cache=True)
        cache = found.past_key_values
        parts.append(found.logits[0, 0])
    assert torch.allclose(torch.stack(parts), whole, rtol=0, atol=1e-11)
    assert 1e-9 < float((model(tokens).logits[0] - whole).abs().max()) < 1e-2
    assert model.dtype is torch.float32


def test_only_models_that_generate_are_judged_in_float64(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="LlamaModel does not generate"):
        run_parity(ParityCase("LlamaModel", SMALL, double_oracle=True), tmp_path)


@pytest.mark.parametrize(
    ("result", "verdict", "magnitude"),
    [
        (ModeResult("m", 3e-6), Verdict.OK, -5),
        (ModeResult("m", 1e-4), Verdict.OK, -4),
        (ModeResult("m", 1.1e-4), Verdict.OVER, -3),
        (ModeResult("m", 0.02, limit=0.03), Verdict.OK, -1),
        (ModeResult("m", 0.0), Verdict.OK, None),
        (ModeResult("m", 0.0, num_differences=1), Verdict.OVER, None),
        (ModeResult("m", math.inf), Verdict.OVER, None),
        (ModeResult("m", math.nan), Verdict.OVER, None),
        (ModeResult("m", note="does not apply"), Verdict.NOT_RUN, None),
    ],
)
def test_verdicts(result: ModeResult, verdict: Verdict, magnitude: int | None) -> None:
    assert (result.verdict, result.magnitude) == (verdict, magnitude)
    assert str(verdict) in str(result)


def test_a_report_names_what_is_over_its_limit() -> None:
    sound, wrong, none = ModeResult("a", 1e-6), ModeResult("b", 0.5, num_differences=7), ModeResult("c", note="why")
    ParityReport("A", "plain", (sound, none)).require_ok()
    with pytest.raises(
        AssertionError, match=r"A \(plain\) differs from its oracle: b: over limit, error 5.0e-01.*7 gre"
    ):
        ParityReport("A", "plain", (sound, wrong, none)).require_ok()
    with pytest.raises(AssertionError, match="no mode was run"):
        ParityReport("A", "plain", (none,)).require_ok()
    report = ParityReport("A", "plain", (sound, wrong, none))
    assert str(report).splitlines()[0] == "A (plain)"
    assert "c: not run (why)" in str(report)
    assert report.by_mode["b"] is wrong


def test_a_sound_model_has_a_report_of_every_way(tiny: TinyModel) -> None:
    report = check_parity(tiny, create, PlainAttentionBackend())
    modes = ["prefill", "chunk", "decode", "batch", "prefix", "preempt", "greedy"]
    assert [result.mode for result in report.results] == modes
    assert all(result.verdict is Verdict.OK for result in report.results)


class NextDoor(PlainAttention):
    """Once there is something from earlier steps, the first token is read in place of the second."""

    def stored(self, cache: torch.Tensor, metadata: Any, row: int) -> torch.Tensor:
        states = super().stored(cache, metadata, row)
        starts = metadata.query_start_loc_cpu
        if int(starts[row + 1] - starts[row]) == len(states):
            return states
        return torch.cat((states[:1], states[:1], states[2:]))


class NextDoorBackend(PlainAttentionBackend):
    impl = NextDoor


def test_a_fault_shows_in_the_modes_that_meet_it(tiny: TinyModel) -> None:
    """Whole prompts never read what was computed before."""
    report = measure_parity(tiny, create, NextDoorBackend())
    verdicts = {result.mode: result.verdict for result in report.results}
    assert verdicts.pop("prefill") is Verdict.OK
    assert set(verdicts.values()) == {Verdict.OVER}
    with pytest.raises(AssertionError, match="chunk: over limit"):
        check_parity(tiny, create, NextDoorBackend())


def test_only_whole_computed_blocks_can_be_shared(tiny: TinyModel) -> None:
    model, toolkit = build_model(
        create, StateDictLoader(tiny.tensors()), worker_config(tiny.info), PlainAttentionBackend()
    )
    driver = LocalDriver(model, toolkit)
    driver.step({"owner": list(range(10))})
    for name, count in (("new", 3), ("new", 12), ("owner", 4)):
        with pytest.raises(ValueError, match=rf"{name!r} cannot begin with {count} tokens of 'owner'"):
            driver.share(name, "owner", count)
    driver.share("new", "owner", 8)
    assert driver.num_computed("new") == 8


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["prefill", "decode", "prefix", "preempt"])
def test_the_engine_and_an_oracle_that_disagrees(mode: str, tmp_path: Path) -> None:
    parity = GenerationParity(LLAMA, tmp_path)
    sound = parity.run(mode)
    assert sound.verdict is Verdict.OK
    assert sound.num_positions >= 50
    with torch.no_grad():
        parity._tiny.oracle.lm_head.weight[7] += 0.5
    wrong = parity.run(mode)
    assert wrong.verdict is Verdict.OVER
    assert wrong.error is not None
    assert wrong.error > 1e-3


@pytest.mark.slow
def test_what_does_not_apply_is_not_run_and_says_why(tmp_path: Path) -> None:
    case = ParityCase("BertModel", SMALL, skipped={"tp2": "one is enough here"})
    report = run_parity(case, tmp_path, modes=["batch", "decode", "tp2"])
    assert [result.verdict for result in report.results] == [Verdict.OK, Verdict.NOT_RUN, Verdict.NOT_RUN]
    assert report.by_mode["decode"].note == "an encoder computes whole prompts, once"
    assert report.by_mode["tp2"].note == "one is enough here"


def test_an_unknown_mode_is_refused_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"'sideways' is unknown; there are {', '.join(MODES)}"):
        run_parity(LLAMA, tmp_path, modes=["sideways"])


@pytest.mark.slow
def test_the_command_prints_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["Qwen3ForCausalLM", "--config", "head_dim=16", "--config", "tie_word_embeddings=true", "--mode", "prefill"]
    assert main(given) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == "Qwen3ForCausalLM (plain)"
    assert second.startswith("  prefill: ok, error ")


@pytest.mark.parametrize(("text", "complaint"), [("head_dim", "is no FIELD=JSON"), ("hidden_act=silu", "is no JSON")])
def test_the_command_refuses_a_field_that_is_none(
    text: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["LlamaForCausalLM", "--config", text])
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (["Qwn3ForCausalLM"], "no model class 'Qwn3ForCausalLM' (did you mean 'Qwen3ForCausalLM'?)"),
        (["Trainer"], "no model class 'Trainer'"),
        (["BambaForCausalLM"], "BambaForCausalLM does not take these sizes, set others with --config"),
    ],
)
def test_the_command_refuses_what_has_no_oracle(
    given: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*given, "--mode", "TP2"])
    assert complaint in capsys.readouterr().err
