"""Weight loader ``safetensors``: a Hugging Face folder with one file or an index of shards."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping

from hardpoint.errors import ModelFormatError
from hardpoint.interfaces.model_source import ModelArtifact, ModelInfo, WeightLoader, WeightLoaderContext, WeightTensor
from hardpoint.interfaces.plugin import NoOptions, plugin
from hardpoint.logging import get_logger
from hardpoint_model_io.files import confined_path, read_json_object, release_pages
from hardpoint_model_io.formats.safetensors import SafetensorsFile, StoredTensor, read_safetensors
from hardpoint_model_io.weights.config_json import CONFIG, describe_config, without_head
from hardpoint_model_io.weights.encoder_decoder import is_encoder_decoder
from hardpoint_model_io.weights.sizes import check_sizes
from hardpoint_model_io.weights.tied_head import has_own_head

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_INDEX_BYTES = 64 * 1024 * 1024
_logger = get_logger(__name__)
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")


class SafetensorsWeightLoader(WeightLoader):
    """Yields views of the mapped files, one shard open at a time."""

    def accepts(self, artifact: ModelArtifact) -> bool:
        """A folder with ``config.json`` or safetensors files; what is missing of them, :meth:`describe` tells."""
        return any(name == CONFIG or name.endswith(".safetensors") for name in artifact.files)

    def describe(self, artifact: ModelArtifact) -> ModelInfo:
        """Reads the configuration and the header of every shard, so that damage shows before any process starts."""
        sizes: Counter[str] = Counter()
        stored: dict[str, tuple[SafetensorsFile, StoredTensor]] = {}
        for shard in _shards(artifact):
            for name, tensor in shard.tensors.items():
                stored[name] = (shard, tensor)
                sizes[tensor.dtype.name] += tensor.num_bytes
        info = describe_config(artifact, "safetensors", sizes.most_common(1)[0][0] if sizes else None)
        check_sizes(info.config, (tensor.shape for _, tensor in stored.values()), f"{artifact.root}/{CONFIG}")
        if info.config.get("tie_word_embeddings", True) is True and not is_encoder_decoder(info.config):
            _heed_own_head(info, stored)
        return without_head(info, stored)

    def num_bytes(self, info: ModelInfo) -> int:
        return sum(tensor.num_bytes for shard in _shards(info.artifact) for tensor in shard.tensors.values())

    def tensors(self, info: ModelInfo) -> Iterator[WeightTensor]:
        for shard in _shards(info.artifact):
            for tensor in sorted(shard.tensors.values(), key=lambda entry: entry.offset):
                yield WeightTensor(tensor.name, tensor.dtype.name, tensor.shape, shard.array(tensor))
                release_pages(shard.data, tensor.offset, tensor.num_bytes)


def _heed_own_head(info: ModelInfo, stored: Mapping[str, tuple[SafetensorsFile, StoredTensor]]) -> None:
    """The weights decide, as for others who read such files; what the configuration says would give other logits."""
    if has_own_head(stored):
        if "tie_word_embeddings" in info.config:
            _logger.warning(
                "%s: %r says that head and embedding are one, but both are stored, with different values: not tied",
                info.artifact.root,
                "tie_word_embeddings",
            )
        info.config["tie_word_embeddings"] = False


def _shards(artifact: ModelArtifact) -> Iterator[SafetensorsFile]:
    """Each shard with its checked header. Raises ``ModelFormatError`` for tensors missing or given twice."""
    if INDEX in artifact.files:
        yield from _indexed_shards(artifact)
        return
    names = [name for name in artifact.files if name.endswith(".safetensors")]
    if SINGLE in names:
        names = [SINGLE]
    if not names:
        raise _without_weights(artifact)
    if len(names) > 1:
        raise ModelFormatError(
            f"{artifact.root}/{INDEX} is missing, so it is unclear which of {', '.join(names)} belong together; "
            "download it as well"
        )
    yield read_safetensors(confined_path(artifact.root, names[0]))


def _indexed_shards(artifact: ModelArtifact) -> Iterator[SafetensorsFile]:
    path = confined_path(artifact.root, INDEX)
    weight_map = read_json_object(path, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFormatError(f"{path}: 'weight_map' must map tensor names to files")
    expected: dict[str, set[str]] = {}
    for tensor, shard_name in weight_map.items():
        if not isinstance(shard_name, str) or not shard_name.endswith(".safetensors"):
            raise ModelFormatError(
                f"{path}: tensor {tensor!r} is said to be in {shard_name!r}, not a .safetensors file"
            )
        expected.setdefault(shard_name, set()).add(tensor)
    seen: set[str] = set()
    for shard_name, tensors in sorted(expected.items()):
        shard = read_safetensors(confined_path(artifact.root, shard_name))
        if missing := tensors - shard.tensors.keys():
            raise ModelFormatError(f"{shard.path}: tensor {min(missing)!r} is missing, though {INDEX} promises it")
        if twice := seen & shard.tensors.keys():
            raise ModelFormatError(f"{shard.path}: tensor {min(twice)!r} is also in another shard")
        seen |= shard.tensors.keys()
        yield shard


def _without_weights(artifact: ModelArtifact) -> ModelFormatError:
    try:
        pickled = sorted(name for name in os.listdir(artifact.root) if name.endswith(_PICKLED))
    except OSError:
        pickled = []
    if pickled:
        return ModelFormatError(
            f"{artifact.root} has only pickled weights ({pickled[0]}), which could run code and are never loaded; "
            "convert them where you trust the file: "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, safe_serialization=True)"
        )
    return ModelFormatError(f"{artifact.root} has no weights: {SINGLE} or {INDEX} with its shards is missing")


@plugin("weight_loader", options=NoOptions, capabilities={"architectures": "any"})
def create(ctx: WeightLoaderContext, options: NoOptions) -> WeightLoader:
    return SafetensorsWeightLoader()
