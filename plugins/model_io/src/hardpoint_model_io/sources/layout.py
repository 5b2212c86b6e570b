"""Which files of a folder make up a model."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

from hardpoint.errors import ModelFormatError
from hardpoint.interfaces.model_source import ModelArtifact

# Never pickled weights (.bin, .pt), code (.py) or other formats: only these are fetched or read.
MODEL_FILE_PATTERNS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.txt",
    "chat_template.jinja",
    "chat_template.json",
    "model.safetensors.index.json",
    "*.safetensors",
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
    "1_Pooling/config.json",
    "1_LogitScore/config.json",
)
_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
_FOLDERS = ("1_Pooling/", "1_LogitScore/")
"""Of sentence-transformers; no file of other folders is read."""


def is_model_file(name: str) -> bool:
    """True for a relative name that belongs to a model folder; weights only at its top level."""
    return any(fnmatchcase(name, pattern) for pattern in MODEL_FILE_PATTERNS) and name.count("/") <= (
        1 if name.startswith(_FOLDERS) else 0
    )


def select_files(names: Iterable[str]) -> tuple[str, ...]:
    """Relative names to load, sorted: a Hugging Face folder's files, or the one GGUF file of a folder without them.

    Empty if there is neither. Raises ``ModelFormatError`` where several GGUF files leave the choice open.
    """
    listed = sorted(names)
    chosen = tuple(name for name in listed if is_model_file(name))
    gguf = [name for name in listed if name.endswith(".gguf") and "/" not in name]
    # A tokenizer or configuration beside a GGUF file is common and does not make it a Hugging Face folder.
    if any(name.endswith(".safetensors") for name in chosen) or not gguf:
        return chosen
    if gguf and all(_PART.search(name) for name in gguf):
        raise ModelFormatError(
            f"the parts of a GGUF model: {', '.join(gguf[:3])}; models are read from one file, which "
            f"`llama-gguf-split --merge {gguf[0]} WHOLE.gguf` makes of all of them"
        )
    if len(gguf) > 1:
        raise ModelFormatError(f"several GGUF files: {', '.join(gguf)}; name the one to load by its full path")
    return (gguf[0],)


def list_folder(root: str) -> list[str]:
    """Relative names of the files in ``root`` and its direct subfolders, at most 10,000 of them."""
    names: list[str] = []
    with os.scandir(root) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                names += [f"{entry.name}/{inner}" for inner in sorted(os.listdir(entry.path))[:100]]
            else:
                names.append(entry.name)
            if len(names) > 10_000:
                raise ModelFormatError(f"{root} holds more than 10,000 files; is it a model folder?")
    return names


def folder_artifact(name: str, root: str, source: str, revision: str | None = None) -> ModelArtifact:
    """Artifact of the model in the folder ``root``. Raises ``ModelFormatError`` naming the folder if it holds none."""
    try:
        files = select_files(list_folder(root))
    except OSError as error:
        raise ModelFormatError(f"{root} cannot be read: {error}") from None
    except ModelFormatError as error:
        raise ModelFormatError(f"{root}: {error}") from None
    if not files:
        raise ModelFormatError(f"{root} holds no model; it needs config.json with *.safetensors, or a *.gguf file")
    return ModelArtifact(name=name, root=os.path.abspath(root), files=files, source=source, revision=revision)


def file_artifact(name: str, path: str, source: str, revision: str | None = None) -> ModelArtifact:
    """Artifact of one file. A link named explicitly is followed: its target's folder becomes the root."""
    real = os.path.realpath(path)
    return ModelArtifact(
        name=name, root=os.path.dirname(real), files=(os.path.basename(real),), source=source, revision=revision
    )
