"""Damaged, incomplete, unknown and unsupported models: one line that names the culprit and says what to do.

SECURITY-AND-FAULTS, table of faults ("corrupt or truncated weights, config, tokenizer") and classes 6, 8 and 11.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from cli_support import CommandLine, Finished
from hardpoint import LLM
from hardpoint.errors import HardpointError, ModelFormatError, ModelNotFoundError, UnsupportedModelError
from tiny_llama import CONFIG, write_tiny_gguf

Damage = Callable[[bytes], bytes]
MAX_SECONDS = 10
ADVICE = re.compile(
    r"download|give |set |needed|need|must|supported|convert|install|missing|leave|check", re.IGNORECASE
)


def generate(hardpoint: CommandLine, model: object) -> Finished:
    return hardpoint("generate", model, "--prompt", "Hello", "--max-tokens", 2, "--json")


def require_named(done: Finished, culprit: object, fault: str, error: str = "ModelFormatError") -> None:
    """One line of the form ``hardpoint: Error: message`` with the culprit, the fault and an advice, and soon."""
    line = done.complaint()
    assert line.startswith(f"hardpoint: {error}: "), line
    assert str(culprit) in line
    assert fault in line
    assert ADVICE.search(line), line
    assert done.status == 1
    assert done.out == ""
    assert done.seconds < MAX_SECONDS


def cut_at(data: bytes, mark: bytes, extra: int = 0) -> bytes:
    return data[: data.index(mark) + extra]


def test_what_is_damaged_below_works_undamaged(hardpoint: CommandLine, sound_folder: Path, sound_gguf: Path) -> None:
    texts = [generate(hardpoint, model).json_lines()[0]["token_ids"] for model in (sound_folder, sound_gguf)]
    assert len(texts[0]) == len(texts[1]) == 2


GGUF_DAMAGE: Mapping[str, tuple[Damage, str]] = {
    "empty": (lambda data: b"", "is empty"),
    "text": (lambda data: b"<!DOCTYPE html><title>404</title>", "does not begin with 'GGUF'"),
    "other magic": (lambda data: b"GGML" + data[4:], "does not begin with 'GGUF'"),
    "noise": (lambda data: bytes(range(256)) * 8, "does not begin with 'GGUF'"),
    "magic only": (lambda data: data[:4], "truncated"),
    "version": (lambda data: data[:4] + b"\x63\0\0\0" + data[8:], "version 99"),
    "big-endian": (lambda data: data[:4] + b"\0\0\0\x03" + data[8:], "big-endian"),
    "tensor count": (lambda data: data[:8] + b"\xff" * 8 + data[16:], "claims 18446744073709551615 tensors"),
    "metadata count": (lambda data: data[:16] + b"\xff\xff\xff\x7f" + data[20:], "claims 2147483647 metadata"),
    "header cut": (lambda data: data[:20], "truncated"),
    "metadata cut": (lambda data: cut_at(data, b"tokenizer.ggml.tokens", 900), "'tokenizer.ggml.tokens'"),
    "table cut": (lambda data: cut_at(data, b"blk.0.attn_q", 10), "tensor name"),
    "dimensions": (lambda data: data.replace(b"blk.0.attn_q.weight\x02", b"blk.0.attn_q.weight\xff"), "255 dimensions"),
    "data cut": (lambda data: data[:-5000], "the file has only"),
    "no data": (lambda data: cut_at(data, b"output_norm.weight", 42), "the file has only"),
    "vocabulary": (lambda data: data.replace(b"ggml.tokens", b"ggml.tokenz"), "'tokenizer.ggml.tokens'"),
    "tensor name": (lambda data: data.replace(b"token_embd.weight", b"token_embf.weight"), "'token_embd.weight'"),
    "size": (lambda data: data.replace(b"llama.embedding_length", b"llama.embedding_lengtz"), "llama.embedding_length"),
}


@pytest.mark.parametrize("name", GGUF_DAMAGE)
def test_a_damaged_gguf_file_is_named(
    hardpoint: CommandLine, sound_gguf: Path, gguf_of: Callable[[bytes], Path], name: str
) -> None:
    damage, fault = GGUF_DAMAGE[name]
    path = gguf_of(damage(sound_gguf.read_bytes()))
    require_named(generate(hardpoint, path), path, fault)


def test_another_gguf_architecture_is_unsupported_not_corrupt(
    hardpoint: CommandLine, sound_gguf: Path, gguf_of: Callable[[bytes], Path]
) -> None:
    path = gguf_of(sound_gguf.read_bytes().replace(b"llama", b"zzama"))
    require_named(generate(hardpoint, path), path, "'zzama'", "UnsupportedModelError")


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"embedding_length": 10**9}, "'hidden_size' is 1000000000"),
        ({"block_count": 10**9}, "'llama.block_count' is 1000000000"),
        ({"feed_forward_length": 2 * 10**9}, "'llama.feed_forward_length' is 2000000000"),
        ({"embedding_length": 0}, "'llama.embedding_length' is 0"),
        ({"attention.head_count": 3}, "no multiple of the 3 attention heads"),
        ({"attention.head_count_kv": 3}, "do not divide evenly over 3"),
    ],
)
def test_sizes_in_a_gguf_file_that_cannot_be(
    hardpoint: CommandLine, tmp_path: Path, change: dict[str, int], fault: str
) -> None:
    path = write_tiny_gguf(tmp_path / "model.gguf", **change)
    done = generate(hardpoint, path)
    line = done.complaint()
    assert line.startswith(f"hardpoint: ModelFormatError: {path}")
    assert fault in line
    assert done.seconds < MAX_SECONDS


SAFETENSORS_DAMAGE: Mapping[str, tuple[Damage, str, str]] = {
    "empty": (lambda data: b"", "is empty", "ModelFormatError"),
    "header cut": (lambda data: data[:100], "the header claims", "ModelFormatError"),
    "header length": (lambda data: b"\xff" * 8 + data[8:], "claims 18446744073709551615", "ModelFormatError"),
    "header text": (lambda data: data[:8] + b"x" + data[9:], "header cannot be read", "ModelFormatError"),
    "data cut": (lambda data: data[:-100], "the tensors end at", "ModelFormatError"),
    "offsets": (lambda data: data.replace(b"offsets\":[0,", b"offsets\":[9,"), "needs", "ModelFormatError"),
    "dtype": (lambda data: data.replace(b'"F32"', b'"Q99"'), "'Q99'", "UnsupportedModelError"),
}  # fmt: skip


@pytest.mark.parametrize("name", SAFETENSORS_DAMAGE)
def test_a_damaged_safetensors_file_is_named(hardpoint: CommandLine, folder: Path, name: str) -> None:
    damage, fault, error = SAFETENSORS_DAMAGE[name]
    path = folder / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    require_named(generate(hardpoint, folder), path, fault, error)


@pytest.mark.parametrize("text", ["", "not json {", "[1, 2]", '{"hidden_size": 32', "\x00\x01", "[" * 100_000])
def test_a_configuration_that_is_no_object_is_named(hardpoint: CommandLine, folder: Path, text: str) -> None:
    path = folder / "config.json"
    path.write_text(text)
    require_named(generate(hardpoint, folder), path, "not a valid JSON object")


HUGE = 10**9
BAD_FIELDS: list[tuple[str, Any]] = [
    *((name, value) for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
                                 "intermediate_size", "num_hidden_layers") for value in ("32", -1, 0, 3.5, True, HUGE)),
    *((name, None) for name in ("vocab_size", "max_position_embeddings")),
    *(("max_position_embeddings", value) for value in ("long", -1, 10**12, 512.0)),
    *(("eos_token_id", value) for value in (HUGE, -1, "x", [1, None])),
    ("num_key_value_heads", 3),
    ("num_hidden_layers", 10**5),
    ("text_config", 5),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), BAD_FIELDS, ids=lambda part: str(part))
def test_a_configuration_field_that_cannot_be_is_named(
    hardpoint: CommandLine, folder: Path, field: str, value: Any
) -> None:
    """Before anything is allocated, in the launcher: neither 10**9 wide layers nor 10**9 of them."""
    change_config(folder, field, value)
    done = generate(hardpoint, folder)
    line = done.complaint()
    assert line.startswith(f"hardpoint: ModelFormatError: {folder}/config.json: ")
    assert field in line or "over 3 key/value heads" in line
    assert done.seconds < MAX_SECONDS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("hidden_size", None, "ModelFormatError"),
        ("num_hidden_layers", None, "ModelFormatError"),
        ("hidden_size", [32], "ModelFormatError"),
        ("rope_theta", "x", "ModelFormatError"),
        ("rope_theta", 0, "ModelFormatError"),
        ("rms_norm_eps", "x", "ModelFormatError"),
        ("tie_word_embeddings", "yes", "ModelFormatError"),
        ("hidden_act", "weird", "UnsupportedModelError"),
        ("rope_scaling", {"rope_type": "magic", "factor": 2.0}, "UnsupportedModelError"),
        ("rope_scaling", "x", "ModelFormatError"),
    ],
    ids=str,
)
def test_a_field_that_only_the_architecture_can_judge_is_named(
    hardpoint: CommandLine, folder: Path, field: str, value: Any, error: str
) -> None:
    change_config(folder, field, value)
    line = generate(hardpoint, folder).complaint()
    assert line.startswith(f"hardpoint: {error}: ")
    assert field in line or "rotary settings in the model's config.json" in line or "rope_type" in line


def test_weights_that_do_not_fit_the_configuration_name_the_tensors(hardpoint: CommandLine, folder: Path) -> None:
    change_config(folder, "tie_word_embeddings", False)
    require_named(generate(hardpoint, folder), folder, "lm_head.weight")


@pytest.mark.parametrize("value", [None, [], "LlamaForCausalLM", [3]], ids=str)
def test_a_configuration_without_an_architecture_is_named(hardpoint: CommandLine, folder: Path, value: Any) -> None:
    change_config(folder, "architectures", value)
    require_named(generate(hardpoint, folder), folder / "config.json", "'architectures'", "UnsupportedModelError")


def test_an_architecture_without_a_plugin_names_the_entry_point_to_install(
    hardpoint: CommandLine, folder: Path
) -> None:
    change_config(folder, "architectures", ["GhostForCausalLM"])
    done = generate(hardpoint, folder)
    require_named(done, folder, "hardpoint.model.v1:GhostForCausalLM", "UnsupportedModelError")
    assert "hardpoint models list" in done.err, "where what is installed is listed"


@pytest.mark.parametrize(
    ("missing", "fault"),
    [("config.json", "is missing"), ("model.safetensors", "has no weights"), ("tokenizer.json", "is missing")],
)
def test_a_missing_file_is_named(hardpoint: CommandLine, folder: Path, missing: str, fault: str) -> None:
    (folder / missing).unlink()
    done = generate(hardpoint, folder)
    require_named(done, folder, fault)
    assert missing in done.err


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("tokenizer.json", "{}", "not a valid tokenizer"),
        ("tokenizer.json", '{"version": "1.0", "model"', "not a valid tokenizer"),
        ("tokenizer_config.json", "[", "not a valid JSON object"),
        ("tokenizer_config.json", '{"eos_token": 5}', "must be a text"),
        ("generation_config.json", "{", "not a valid JSON object"),
    ],
)
def test_damage_in_a_file_beside_the_weights_is_named(
    hardpoint: CommandLine, folder: Path, name: str, text: str, fault: str
) -> None:
    (folder / name).write_text(text)
    done = generate(hardpoint, folder)
    require_named(done, folder, fault)
    assert name in done.err


def test_a_template_that_cannot_be_compiled_names_model_and_setting(hardpoint: CommandLine, folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message")
    require_named(generate(hardpoint, folder), folder, "--chat-template-file")


def test_an_empty_folder_holds_no_model(hardpoint: CommandLine, tmp_path: Path) -> None:
    require_named(generate(hardpoint, tmp_path), tmp_path, "holds no model")


def test_several_gguf_files_ask_for_a_choice(hardpoint: CommandLine, tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    done = generate(hardpoint, tmp_path)
    assert "a.gguf, b.gguf; name the one to load" in done.complaint()


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("smollm3", "known names: "),
        ("/nowhere/model", "does not exist"),
        ("nothing.gguf", "does not exist"),
        ("nobody/nothing", "nobody/nothing"),
    ],
)
def test_an_unknown_name_lists_what_can_be_given(hardpoint: CommandLine, name: str, fault: str) -> None:
    require_named(generate(hardpoint, name), repr(name), fault, "ModelNotFoundError")


@pytest.mark.parametrize("kind", ["fifo", "device", "text"])
def test_what_is_no_model_file_is_refused_without_waiting(hardpoint: CommandLine, tmp_path: Path, kind: str) -> None:
    """Class 11: only regular files are read."""
    path = tmp_path / "thing"
    if kind == "fifo":
        path = tmp_path / "pipe.gguf"
        os.mkfifo(path)
    elif kind == "device":
        path = Path("/dev/zero")
    else:
        path.write_text("hello")
    done = generate(hardpoint, path)
    assert done.complaint().startswith("hardpoint: ModelFormatError: ")
    assert str(path.parent) in done.err
    assert path.name in done.err
    assert done.seconds < MAX_SECONDS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        (("architectures", ["GhostForCausalLM"]), UnsupportedModelError, "GhostForCausalLM"),
        (("hidden_act", "weird"), UnsupportedModelError, "hidden_act"),
        (("hidden_size", HUGE), ModelFormatError, "hidden_size"),
        (("tie_word_embeddings", False), ModelFormatError, "lm_head.weight"),
        (("rope_theta", "x"), ModelFormatError, "rope_theta"),
    ],
    ids=lambda part: str(part)[:40],
)
def test_python_meets_the_same_faults_as_named_exceptions(
    folder: Path, change: tuple[str, Any], error: type[HardpointError], named: str
) -> None:
    change_config(folder, *change)
    with pytest.raises(error, match=named) as caught:
        LLM(str(folder))
    assert type(caught.value) is error


def test_python_meets_missing_and_damaged_files_as_named_exceptions(
    folder: Path, gguf_of: Callable[[bytes], Path]
) -> None:
    with pytest.raises(ModelFormatError, match="GGUF"):
        LLM(str(gguf_of(b"GGML....")))
    with pytest.raises(ModelNotFoundError, match="smollm2"):
        LLM("smollm3")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelFormatError, match=r"tokenizer\.json is missing"):
        LLM(str(folder))


def change_config(folder: Path, field: str, value: Any) -> None:
    """A value of None leaves the field out."""
    document = {key: entry for key, entry in {**CONFIG, field: value}.items() if entry is not None}
    (folder / "config.json").write_text(json.dumps(document))
