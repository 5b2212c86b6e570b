"""Model folders that bring code: it is never run, neither with assertions nor without (classes 6 and 8)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from cli_support import CommandLine, run_process
from hardpoint import LLM, SamplingParams
from hardpoint.errors import ModelFormatError, UnsupportedModelError

MODULE = "from pathlib import Path\nPath({canary!r}).write_text('ran')\n\nclass Canary:\n    pass\n"
AUTO_MAP = {
    "AutoConfig": "modeling_canary.Canary",
    "AutoModelForCausalLM": "modeling_canary.Canary",
    "AutoTokenizer": ["modeling_canary.Canary", None],
}


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    """The file that the folder's code would write."""
    return tmp_path / "canary"


@pytest.fixture
def armed(folder: Path, canary: Path) -> Path:
    """A sound model whose configuration points to code beside it."""
    (folder / "modeling_canary.py").write_text(MODULE.format(canary=str(canary)))
    change(folder / "config.json", auto_map=AUTO_MAP, trust_remote_code=True)
    change(folder / "tokenizer_config.json", auto_map=AUTO_MAP, tokenizer_class="Canary")
    return folder


def change(path: Path, **entries: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


def write_pickle(path: Path, canary: Path) -> None:
    """A pickle that writes the canary when it is loaded, in the textual protocol."""
    path.write_bytes(f"cposix\nsystem\n(S'echo ran > {canary}'\ntR.".encode())


def test_the_canary_sings_when_it_is_run(armed: Path, canary: Path) -> None:
    """Otherwise its silence below would mean nothing."""
    run_process(command=[sys.executable, str(armed / "modeling_canary.py")])
    assert canary.read_text() == "ran"


def test_a_known_architecture_runs_without_the_code_beside_it(armed: Path, canary: Path) -> None:
    with LLM(str(armed), num_kv_blocks=64) as llm:
        results = llm.generate("Hello", SamplingParams(max_tokens=2, temperature=0.0))
    assert len(results[0].outputs[0].token_ids) == 2
    assert not canary.exists()


def test_an_architecture_known_only_to_the_code_beside_it_is_unsupported(armed: Path, canary: Path) -> None:
    change(armed / "config.json", architectures=["CanaryForCausalLM"], model_type="canary")
    with pytest.raises(UnsupportedModelError, match="CanaryForCausalLM"):
        LLM(str(armed))
    assert not canary.exists()


def test_pickled_weights_are_refused_with_the_way_to_convert_them(folder: Path, canary: Path) -> None:
    (folder / "model.safetensors").unlink()
    write_pickle(folder / "pytorch_model.bin", canary)
    with pytest.raises(ModelFormatError, match=r"pytorch_model\.bin.*never loaded.*safe_serialization=True"):
        LLM(str(folder))
    assert not canary.exists()


def test_pickled_weights_beside_safe_ones_are_not_looked_at(folder: Path, canary: Path) -> None:
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt"):
        write_pickle(folder / name, canary)
    with LLM(str(folder), num_kv_blocks=64) as llm:
        assert llm.generate("Hello", SamplingParams(max_tokens=1))
    assert not canary.exists()


@pytest.mark.parametrize("name", ["model.gguf", "model.safetensors"])
def test_a_pickle_under_a_safe_name_is_refused(folder: Path, canary: Path, name: str) -> None:
    write_pickle(folder / name, canary)
    with pytest.raises(ModelFormatError, match=name):
        LLM(str(folder / name) if name.endswith(".gguf") else str(folder))
    assert not canary.exists()


@pytest.mark.slow
def test_it_is_the_same_without_assertions(armed: Path, canary: Path, tmp_path: Path) -> None:
    """``python -O`` removes every ``assert``: no guard may be one."""
    change(armed / "config.json", architectures=["CanaryForCausalLM"])
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "config.json").write_text((armed / "config.json").read_text())
    write_pickle(pickled / "pytorch_model.bin", canary)
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF" + bytes(8))
    source = (
        "import sys\nfrom hardpoint.cli import main\nprint(__debug__, [main(['generate', model, '--prompt', 'x']) "
        "for model in sys.argv[1:]])"
    )
    done = run_process(armed, pickled, damaged, command=[sys.executable, "-O", "-c", source])
    assert done.out == "False [1, 1, 1]\n", done.err
    said = [line for line in done.err.splitlines() if line.startswith("hardpoint: ")]
    assert [line.split(": ")[1] for line in said] == ["UnsupportedModelError", "ModelFormatError", "ModelFormatError"]
    assert "Traceback" not in done.err
    assert not canary.exists()


def test_the_process_ends_with_one_line_and_status_one(folder: Path) -> None:
    """As a user sees it: the command in a process of its own, weights cut short."""
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    done = run_process("generate", folder, "--prompt", "Hello")
    assert done.complaint().startswith(f"hardpoint: ModelFormatError: {path}")
    assert done.status == 1
    assert len(done.err.splitlines()) == 1
    assert done.seconds < 10


def test_a_server_refuses_a_bad_model_in_the_same_words(hardpoint: CommandLine, folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    done = hardpoint("serve", folder, "--port", 0)
    assert done.status != 0
    assert f"{folder}/tokenizer.json is missing" in done.err
    assert "Traceback" not in done.err + done.out
