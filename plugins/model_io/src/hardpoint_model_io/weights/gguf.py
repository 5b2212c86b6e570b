"""Weight loader ``gguf``: describes a GGUF file and yields its tensors under Hugging Face names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from hardpoint.errors import ModelFormatError, UnsupportedModelError
from hardpoint.interfaces.model_source import ModelArtifact, ModelInfo, WeightLoader, WeightLoaderContext, WeightTensor
from hardpoint.interfaces.plugin import NoOptions, plugin
from hardpoint_model_io.files import confined_path, release_pages, starts_with
from hardpoint_model_io.formats.gguf import MAGIC, GgufFile, GgufTensor, read_gguf
from hardpoint_model_io.formats.gguf_config import build_config, token_id
from hardpoint_model_io.formats.gguf_names import IGNORED_TENSORS, MappedName, map_tensor_name
from hardpoint_model_io.formats.gguf_record import GgufArchitecture
from hardpoint_model_io.formats.gguf_stems import POOLING_METHODS, SENTENCE_FIELD
from hardpoint_model_io.formats.gguf_table import architectures, find_architecture
from hardpoint_model_io.formats.gguf_vocabulary import end_token_ids
from hardpoint_model_io.weights.config_json import unused_positions
from hardpoint_model_io.weights.encoder_decoder import DECODER_PROMPT, decoder_prompt, is_encoder_decoder
from hardpoint_model_io.weights.gguf_tensors import TensorReader
from hardpoint_model_io.weights.sizes import check_sizes


class GgufWeightLoader(WeightLoader):
    """``packed`` yields blocks as stored (uint8 ``[rows, bytes per row]``); otherwise they become float32.

    Plain tensors (float32, float16, bfloat16 as uint16) are views of the file in both cases, unless their values must
    be computed.
    """

    def __init__(self, packed: bool = False) -> None:
        self._packed = packed

    def accepts(self, artifact: ModelArtifact) -> bool:
        """A single file called ``.gguf`` or beginning with the magic number; :meth:`describe` tells of damage."""
        if len(artifact.files) != 1:
            return False
        (name,) = artifact.files
        return name.endswith(".gguf") or starts_with(confined_path(artifact.root, name), MAGIC)

    def describe(self, artifact: ModelArtifact) -> ModelInfo:
        file, row = _open(artifact)
        config = build_config(file, row)
        check_sizes(config, (tensor.shape for tensor in file.tensors.values()), file.path)
        for _ in _mapped(file, row):
            # Whatever has no place in the architecture is told before anything is read.
            pass
        return ModelInfo(
            artifact=artifact,
            architecture=row.architecture,
            config=config,
            max_position=config["max_position_embeddings"] - unused_positions(config),
            vocab_size=config["vocab_size"],
            dtype=_dominant_dtype(file),
            loader="gguf",
            eos_token_ids=end_token_ids(file),
            bos_token_id=token_id(file, "bos_token_id"),
            generation=_generation(config, file.path),
            tasks=_tasks(row, config),
        )

    def num_bytes(self, info: ModelInfo) -> int:
        file, row = _open(info.artifact)
        reader = TensorReader(file, info.config, self._packed)
        return sum(reader.num_bytes(stored, mapped) for stored, mapped in _mapped(file, row))

    def tensors(self, info: ModelInfo) -> Iterator[WeightTensor]:
        file, row = _open(info.artifact)
        reader = TensorReader(file, info.config, self._packed)
        for stored, mapped in _mapped(file, row):
            yield from reader.read(stored, mapped)
            release_pages(file.data, stored.offset, stored.num_bytes)


def _mapped(file: GgufFile, row: GgufArchitecture) -> Iterator[tuple[GgufTensor, MappedName]]:
    """Tensors in the order of the file with what becomes of them; of those that are joined the leading part.

    Raises ``ModelFormatError`` for a join of which a part is missing, ``UnsupportedModelError`` for a tensor that has
    no place in the architecture; both name the tensor.
    """
    for stored in sorted(file.tensors.values(), key=lambda tensor: tensor.offset):
        if stored.name in IGNORED_TENSORS:
            continue
        mapped = map_tensor_name(row, stored.name, file.path)
        for part in mapped.parts:
            if part not in file.tensors:
                raise ModelFormatError(
                    f"{file.path}: tensor {part!r} is missing beside {stored.name!r}; the file is incomplete"
                )
        if not mapped.parts or mapped.parts[0] == stored.name:
            yield stored, mapped


def _tasks(row: GgufArchitecture, config: Mapping[str, Any]) -> tuple[str, ...]:
    """A model that generates does not embed in a way that it was not made for."""
    sentence = config.get(SENTENCE_FIELD)
    is_known = sentence is None or sentence["pooling_method"] in POOLING_METHODS.values()
    return row.tasks if is_known or "generate" not in row.tasks else ("generate",)


def _generation(config: Mapping[str, Any], path: str) -> dict[str, Any]:
    if not is_encoder_decoder(config):
        return {}
    return {DECODER_PROMPT: decoder_prompt(config, {}, config["vocab_size"], path)}


def _open(artifact: ModelArtifact) -> tuple[GgufFile, GgufArchitecture]:
    if len(artifact.files) != 1:
        raise ModelFormatError(f"{artifact.root}: a GGUF model is one file, not {len(artifact.files)}")
    file = read_gguf(confined_path(artifact.root, artifact.files[0]))
    _refuse_part(file)
    return file, find_architecture(file)


def _refuse_part(file: GgufFile) -> None:
    """Of a model in several files each has some of the tensors, and the first one all of the metadata."""
    count = file.metadata.get("split.count")
    if isinstance(count, int) and count > 1:
        raise UnsupportedModelError(
            f"{file.path} is one of the {count} parts of a model, and models are read from one file; join all of them "
            "with `llama-gguf-split --merge FIRST_PART WHOLE.gguf`"
        )


def _dominant_dtype(file: GgufFile) -> str:
    sizes: Counter[str] = Counter()
    for tensor in file.tensors.values():
        sizes[tensor.type.storage_name] += tensor.num_bytes
    return sizes.most_common(1)[0][0] if sizes else "float32"


@plugin("weight_loader", options=NoOptions, capabilities={"architectures": architectures()})
def create(ctx: WeightLoaderContext, options: NoOptions) -> WeightLoader:
    return GgufWeightLoader(packed=ctx.packed)
