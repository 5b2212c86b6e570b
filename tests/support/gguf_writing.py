"""Checkpoints of tiny models as GGUF files: what converters change in weights, written anew from the format's facts.

Steps take the tensors of a checkpoint and its configuration, and give tensors under names of the ``gguf`` package's
table, or under final ones (``blk.0.ssm_a``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

__all__ = [
    "LLAMA_METADATA",
    "Config",
    "Step",
    "Tensors",
    "add_one_to_norms",
    "add_value",
    "decays",
    "dense_of_one",
    "fused",
    "pair_rotated_rows",
    "renamed",
    "size_of",
    "split_delta",
    "split_latent",
    "split_stack",
    "squeeze",
    "stack_experts",
    "transposed",
    "write_file",
]

Config = Mapping[str, Any]
Tensors = dict[str, np.ndarray]
Step = Callable[[Tensors, Config], Tensors]
_DRAWN: Mapping[gguf.GGMLQuantizationType, Mapping[int, float]] = {
    gguf.GGMLQuantizationType.Q4_K: {0: 6e-3, 2: 2e-2},
    gguf.GGMLQuantizationType.Q6_K: {208: 7e-4},
}
"""Of blocks where their floats lie, and how large these are beside the deviation of weights."""
LLAMA_METADATA: dict[str, Any] = {
    "embedding_length": 32,
    "block_count": 1,
    "feed_forward_length": 64,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "context_length": 128,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10_000.0,
}
"""Of the smallest Llama, without the prefix of the architecture."""
_EXPERT = re.compile(r".*\.(?P<layer>\d+)\.(?P<block>\w+)\.experts\.(?P<expert>\d+)\.(?P<part>\w+)\.weight")
PARTS = {"w1": "gate", "w3": "up", "w2": "down", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}


def size_of(config: Config, *names: str) -> Any:
    """The first of ``names`` that the configuration has."""
    return next(config[name] for name in names if config.get(name) is not None)


def pair_rotated_rows(tensors: Tensors, config: Config) -> Tensors:
    """Entry i of a head and the one half a head behind it lie side by side."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    return {name: _paired(array, heads.get(name.split(".")[-2])) for name, array in tensors.items()}


def _paired(array: np.ndarray, num_heads: int | None) -> np.ndarray:
    if num_heads is None:
        return array
    halves = array.reshape(num_heads, 2, array.shape[0] // num_heads // 2, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)


def add_one_to_norms(tensors: Tensors, config: Config) -> Tensors:
    """Of families that multiply by one plus the weight; gated norms within mixers have none."""
    del config
    return {
        name: array + np.float32(1) if name.endswith("norm.weight") and "linear_attn" not in name else array
        for name, array in tensors.items()
    }


def transposed(*parts: str) -> Step:
    """Matrices of ``parts`` as [output, input]."""

    def step(tensors: Tensors, config: Config) -> Tensors:
        del config
        return {
            name: np.ascontiguousarray(array.T) if name.endswith(tuple(f"{part}.weight" for part in parts)) else array
            for name, array in tensors.items()
        }

    return step


def fused(part: str, num_groups: Callable[[Config], int]) -> Step:
    """Groups of queries, a key and a value as all queries, all keys, all values."""

    def step(tensors: Tensors, config: Config) -> Tensors:
        heads = size_of(config, "num_attention_heads", "n_head")
        return {
            name: _in_order(array, heads, num_groups(config)) if f".{part}." in name else array
            for name, array in tensors.items()
        }

    return step


def _in_order(array: np.ndarray, num_heads: int, num_groups: int) -> np.ndarray:
    size = array.shape[0] // (num_heads + 2 * num_groups)
    groups = array.reshape(num_groups, num_heads // num_groups + 2, size, *array.shape[1:])
    parts = (groups[:, :-2], groups[:, -2:-1], groups[:, -1:])
    return np.concatenate([part.reshape(-1, *array.shape[1:]) for part in parts])


def stack_experts(tensors: Tensors, config: Config) -> Tensors:
    """Matrices of all experts of a layer in one tensor."""
    del config
    found: Tensors = {}
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name, array in tensors.items():
        if (match := _EXPERT.fullmatch(name)) is None:
            found[name] = array
        else:
            stem = f"blk.{match['layer']}.ffn_{PARTS[match['part']]}_exps.weight"
            stacks.setdefault(stem, {})[int(match["expert"])] = array
    for stem, experts in stacks.items():
        found[stem] = np.stack([experts[number] for number in range(len(experts))])
    return found


def split_stack(
    stack: str,
    suffix: str = "",
    *,
    kind: str = "weight",
    to: str = "exps",
    turned: bool = False,
    alternates: bool = False,
) -> Step:
    """A stack of gates over ups (or of both in turns) as one of gates and one of ups; others are only renamed.

    ``stack``: the name before ``gate_up_proj`` or ``down_proj``; ``turned``: stored as [input, output].
    """
    pattern = re.compile(rf".*\.(\d+)\.{stack}\.(gate_up_proj|down_proj|input_linear|output_linear){suffix}")

    def step(tensors: Tensors, config: Config) -> Tensors:
        del config
        found: Tensors = {}
        for name, array in tensors.items():
            if (match := pattern.fullmatch(name)) is None:
                found[name] = array
                continue
            whole = array.swapaxes(-1, -2) if turned else array
            end = f"_{to}" if to else ""
            prefix, axis = f"blk.{match[1]}.ffn", -2 if kind == "weight" and array.ndim > 1 else -1
            if match[2] in ("down_proj", "output_linear"):
                found[f"{prefix}_down{end}.{kind}"] = whole
                continue
            half = whole.shape[axis] // 2
            order = np.arange(2 * half).reshape(half, 2).T if alternates else np.arange(2 * half).reshape(2, half)
            for part, rows in zip(("gate", "up"), order, strict=True):
                found[f"{prefix}_{part}{end}.{kind}"] = whole.take(rows, axis)
        return found

    return step


def decays(*, groups: int = 0) -> Step:
    """What states decay by in the place of its logarithm. With ``groups``, as for Mamba-2: what belongs to heads is a
    column, and the norm of the mixer a row for each group."""

    def step(tensors: Tensors, config: Config) -> Tensors:
        del config
        found: Tensors = {}
        for name, array in tensors.items():
            layer = next((part for part in name.split(".") if part.isdecimal()), "")
            if name.endswith(".A_log"):
                found[f"blk.{layer}.ssm_a"] = -np.exp(array.reshape(-1, 1) if groups else array)
            elif name.endswith(".D"):
                found[f"blk.{layer}.ssm_d"] = array.reshape(-1, 1) if groups else array
            elif name.endswith(".dt_bias"):
                found[f"blk.{layer}.ssm_dt.bias"] = array
            elif groups and name.endswith((".mixer.norm.weight", ".mamba.norm.weight")):
                found[f"blk.{layer}.ssm_norm.weight"] = array.reshape(groups, -1)
            else:
                found[name] = array
        return found

    return step


def renamed(old: str, new: str) -> Step:
    """The format's table knows the tensors by other names."""

    def step(tensors: Tensors, config: Config) -> Tensors:
        del config
        return {name.replace(old, new): array for name, array in tensors.items()}

    return step


def dense_of_one(tensors: Tensors, config: Config) -> Tensors:
    """Some checkpoints of Jamba hold the only expert of a dense layer by number."""
    period, offset = config["expert_layer_period"], config["expert_layer_offset"]
    found: Tensors = {}
    for name, array in tensors.items():
        layer = next((part for part in name.split(".") if part.isdecimal()), "0")
        is_sparse = int(layer) % period == offset
        found[name if is_sparse else name.replace(".experts.0.", ".")] = array
    return found


def split_delta(tensors: Tensors, config: Config) -> Tensors:
    """Groups of a query, a key, values and gates as all queries, all keys, all values; and all gates apart."""
    groups, per_group = (
        config["linear_num_key_heads"],
        config["linear_num_value_heads"] // config["linear_num_key_heads"],
    )
    key, value = config["linear_key_head_dim"], per_group * config["linear_value_head_dim"]
    found: Tensors = {}
    for name, array in tensors.items():
        if not name.endswith("in_proj_qkvz.weight"):
            found[name] = array
            continue
        parts = np.split(array.reshape(groups, -1, array.shape[1]), np.cumsum([key, key, value]), axis=1)
        flat = [part.reshape(-1, array.shape[1]) for part in parts]
        layer = name.split(".")[2]
        found[f"blk.{layer}.attn_qkv.weight"] = np.concatenate(flat[:3])
        found[f"blk.{layer}.attn_gate.weight"] = flat[3]
    return found


def split_latent(tensors: Tensors, config: Config) -> Tensors:
    """What makes keys and values of latents apart, and the former turned around: for attention that absorbs them."""
    heads, plain = config["num_attention_heads"], config["qk_nope_head_dim"]
    found: Tensors = {}
    for name, array in tensors.items():
        if not name.endswith("kv_b_proj.weight"):
            found[name] = array
            continue
        keys, values = np.split(array.reshape(heads, -1, array.shape[1]), [plain], axis=1)
        layer = name.split(".")[2]
        found[f"blk.{layer}.attn_k_b.weight"] = keys.swapaxes(1, 2)
        found[f"blk.{layer}.attn_v_b.weight"] = values
    return found


def squeeze(tensors: Tensors, config: Config) -> Tensors:
    """Converters leave out dimensions of one entry in gates of shared experts and convolutions."""
    del config
    return {
        name: array.squeeze() if "shared_expert_gate" in name or "conv1d.weight" in name else array
        for name, array in tensors.items()
    }


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """In the type that converters give it."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def quantized(array: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Blocks of ``array``; of the types that the ``gguf`` package only reads, drawn ones of about the same size."""
    if kind not in _DRAWN:
        blocks: np.ndarray = gguf.quants.quantize(array, kind)
        return blocks
    num_weights, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(int(np.abs(array).sum() * 1000) % (1 << 31))
    rows = array.shape[:-1]
    raw = generator.integers(0, 256, (*rows, array.shape[-1] // num_weights, num_bytes), dtype=np.uint8)
    for at, scale in _DRAWN[kind].items():
        drawn = generator.uniform(0.5, 1.0, (*raw.shape[:-1], 1)) * scale * array.std()
        raw[..., at : at + 2] = drawn.astype(np.float16).view(np.uint8)
    return raw.reshape(*rows, -1)


def write_file(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    tensors: Tensors,
    num_layers: int,
    kind: gguf.GGMLQuantizationType | None = None,
) -> None:
    """``kind``: of all matrices that it can hold and converters give it; norms and convolutions stay as they are."""
    (arch,) = [key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture]
    names = gguf.get_tensor_name_map(arch, num_layers)
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        add_value(writer, key if key.startswith("tokenizer.") else f"{architecture}.{key}", value)
    for name, array in tensors.items():
        stored = name if name.startswith(("blk.", "rope_", "cls.")) else names.get_name(name, (".weight", ".bias"))
        assert stored is not None, f"the format has no name for {name}"
        array = np.ascontiguousarray(array, dtype=np.float32)
        if kind is None or array.ndim < 2 or array.shape[-1] % 32 or "conv1d" in stored or "ssm_norm" in stored:
            writer.add_tensor(stored, array)
        else:
            writer.add_tensor(stored, quantized(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
