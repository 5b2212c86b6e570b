"""Writes one model in the formats that engines load: ``python convert.py FILE.gguf FOLDER NAME...``.

All of them hold the weights of the GGUF file, dequantized and where the format asks for it quantized anew: engines
that are compared compute one model. Needs ``gguf``, for folders ``torch``, ``transformers`` and ``safetensors``.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

_STORED_AS = {"fp32.gguf": gguf.GGMLQuantizationType.F32, "q8_0.gguf": gguf.GGMLQuantizationType.Q8_0}
_FILE_TYPES = {"fp32.gguf": gguf.LlamaFileType.ALL_F32, "q8_0.gguf": gguf.LlamaFileType.MOSTLY_Q8_0}
_INT8 = 127.0
_W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "linear": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
            "input_activations": {
                "num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True,
            },
        }
    },
}  # fmt: skip
"""Weights in int8 with a scale per output, activations quantized per token as they come: the form of vLLM."""


def write_gguf(source: Path, target: Path) -> None:
    """Matrices in the type that the target's name says, vectors in float32, everything else as it was."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields[gguf.Keys.General.ARCHITECTURE].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == gguf.Keys.General.ARCHITECTURE:
            continue
        value = int(_FILE_TYPES[target.name]) if field.name == gguf.Keys.General.FILE_TYPE else field.contents()
        is_array = field.types[0] is gguf.GGUFValueType.ARRAY
        writer.add_key_value(field.name, value, field.types[0], field.types[-1] if is_array else None)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        kind = _STORED_AS[target.name] if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_folder(source: Path, target: Path) -> None:
    """Float32 weights in the format of Hugging Face, with the tokenizer; its linear layers in int8 for ``hf-w8a8``."""
    import torch
    import transformers
    from safetensors.torch import save_file

    transformers.utils.logging.disable_progress_bar()
    options = {"gguf_file": source.name, "local_files_only": True}
    model = transformers.AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **options)
    config = model.config.to_dict()
    config.pop("quantization_config", None)
    config |= {"dtype": "float32", "architectures": [type(model).__name__]}
    tensors = {name: value.contiguous() for name, value in model.state_dict().items()}
    if config.get("tie_word_embeddings"):
        tensors.pop("lm_head.weight", None)
    if target.name == "hf-w8a8":
        linear = {
            name
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear) and name not in _W8A8["ignore"]
        }
        tensors = dict(_in_int8(tensors, linear))
        config["quantization_config"] = _W8A8
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(config, indent=1, default=str), encoding="utf-8")
    transformers.AutoTokenizer.from_pretrained(source.parent, **options).save_pretrained(target)


def _in_int8(tensors: Mapping[str, Any], linear: set[str]) -> Iterator[tuple[str, Any]]:
    """Values [O, I] in int8 and scales [O, 1] in float32 in the place of each linear layer's weight."""
    import torch

    for name, value in tensors.items():
        if name.removesuffix(".weight") in linear and name.endswith(".weight"):
            scale = value.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / _INT8
            yield name, (value / scale).round().to(torch.int8)
            yield f"{name}_scale", scale
        else:
            yield name, value


FORMATS: Mapping[str, Callable[[Path, Path], None]] = {
    **dict.fromkeys(_STORED_AS, write_gguf),
    **dict.fromkeys(("hf-fp32", "hf-w8a8"), write_folder),
}


def convert(source: Path, folder: Path, name: str) -> None:
    """Under its final name only when it is whole."""
    target = folder / "unfinished" / name
    shutil.rmtree(target.parent, ignore_errors=True)
    (target.parent if name in _STORED_AS else target).mkdir(parents=True)
    FORMATS[name](source, target)
    target.rename(folder / name)
    target.parent.rmdir()


if __name__ == "__main__":
    for wanted in sys.argv[3:]:
        convert(Path(sys.argv[1]), Path(sys.argv[2]), wanted)
