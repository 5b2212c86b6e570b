"""Runs a model plugin step by step without an engine: block tables, slots and metadata made here, by the book.

Legend: T tokens of the step, V vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from hardpoint.interfaces.attention import AttentionBackend, AttentionMetadataBuilder, CommonAttentionMetadata
from hardpoint.interfaces.kv_cache import AttentionSpec, KVCacheSpec
from hardpoint.interfaces.kv_cache_specs import CrossAttentionSpec, EncoderOnlyAttentionSpec, MambaCacheMode, MambaSpec
from hardpoint.interfaces.model import Model, ModelContext, StageOutput, StageRange
from hardpoint.interfaces.model_source import ModelInfo, WeightLoader
from hardpoint.interfaces.platform import ThreadPlan
from hardpoint.interfaces.plugin import NoOptions, ProcessRole
from hardpoint.interfaces.quantization import QuantizationMethod
from hardpoint.interfaces.worker import WorkerConfig
from hardpoint_testing_torch.local_encoder import EncodedInputs, LocalEncoder
from hardpoint_torch_runtime import ForwardContext, LayerToolkit, load_weights, set_forward_context
from hardpoint_torch_runtime.layers import StateMetadataBuilder

__all__ = ["LocalDriver", "ModelFactory", "build_model", "create_model", "worker_config"]

ModelFactory = Any
"""``(ModelContext, NoOptions) -> Model``: what a model plugin's entry point names."""


def worker_config(info: ModelInfo, *, dtype: str = "float32", block_size: int = 4) -> WorkerConfig:
    """Settings of a one-rank worker for a tiny model."""
    return WorkerConfig(
        model=info,
        dtype=dtype,
        kv_cache_dtype=dtype,
        block_size=block_size,
        max_model_len=info.max_position,
        max_num_seqs=16,
        max_num_batched_tokens=512,
        threads=ThreadPlan(compute_threads=1),
        show_progress=False,
    )


def build_model(
    factory: ModelFactory,
    loader: WeightLoader,
    config: WorkerConfig,
    backend: AttentionBackend,
    *,
    stage: StageRange | None = None,
    quantization: QuantizationMethod | None = None,
) -> tuple[Model, LayerToolkit]:
    """A model plugin's model with weights, as the torch worker builds it."""
    model, toolkit = create_model(factory, config, backend, stage=stage, quantization=quantization)
    load_weights(model, loader, config.model, show_progress=False)
    return model, toolkit


def create_model(
    factory: ModelFactory,
    config: WorkerConfig,
    backend: AttentionBackend,
    *,
    stage: StageRange | None = None,
    quantization: QuantizationMethod | None = None,
) -> tuple[Model, LayerToolkit]:
    """A model plugin's model whose weights are still to be loaded."""
    toolkit = LayerToolkit.create(
        config,
        device=torch.device("cpu"),
        dtype=getattr(torch, config.dtype),
        attention_backend=backend,
        quantization=quantization,
    )
    context = ModelContext(
        name=config.model.architecture,
        api_version=1,
        roles=frozenset({ProcessRole.WORKER}),
        rank=0,
        config=config,
        stage=stage,
        layers=toolkit,
    )
    model: Model = factory(context, NoOptions())
    return model, toolkit


@dataclass(slots=True)
class _Sequence:
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    encoded: EncodedInputs = field(default_factory=EncodedInputs)


class LocalDriver:
    """Holds the KV cache of one model and runs mixed batches over it.

    The cache starts as NaN and freed blocks become NaN again, and blocks are handed out in random order: reading what
    does not belong to a sequence shows at once.
    """

    def __init__(self, model: Model, toolkit: LayerToolkit, *, num_blocks: int = 400, seed: int = 0) -> None:
        self.model = model
        self._layers = toolkit.attention_layers
        if toolkit.attention_backend is None:
            raise ValueError("the toolkit has no attention backend; bind one, or make the toolkit with one")
        self._backend = toolkit.attention_backend
        self._block_size = toolkit.config.block_size
        self._free = list(range(1, num_blocks))
        random.Random(seed).shuffle(self._free)
        self._sequences: dict[str, _Sequence] = {}
        self._encoder = LocalEncoder(model, self._block_size, lambda: self._free.pop())
        self._caches: dict[str, torch.Tensor] = {}
        self._states: dict[str, tuple[torch.Tensor, ...]] = {}
        self._builders: dict[Any, tuple[AttentionMetadataBuilder, list[str]]] = {}
        for name, spec in model.kv_cache_specs().items():
            self._add_layer(name, spec, num_blocks, toolkit.config)

    def _add_layer(self, name: str, spec: Any, num_blocks: int, config: WorkerConfig) -> None:
        if isinstance(spec, MambaSpec):
            self._add_recurrent(name, spec, num_blocks)
            return
        if not isinstance(spec, AttentionSpec):
            raise TypeError(
                f"layer {name!r} keeps {type(spec).__name__}; this driver knows attention caches and recurrent states"
            )
        value_size = spec.head_size if spec.value_head_size is None else spec.value_head_size
        shape = (num_blocks, spec.num_kv_heads, spec.block_size, spec.head_size + value_size)
        self._caches[name] = torch.full(shape, torch.nan, dtype=getattr(torch, spec.dtype))
        if spec not in self._builders:
            builder = self._backend.create_builder(
                spec, [name], config.max_num_seqs, config.max_num_batched_tokens, torch.device("cpu")
            )
            self._builders[spec] = (builder, [])
        self._builders[spec][1].append(name)

    def _add_recurrent(self, name: str, spec: MambaSpec, num_blocks: int) -> None:
        """Its states lie beside the other layers' blocks; one for the whole sequence is in place of the first."""
        self._states[name] = tuple(
            torch.full((num_blocks, *shape), torch.nan, dtype=getattr(torch, dtype))
            for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
        )
        if spec not in self._builders:
            self._builders[spec] = (StateMetadataBuilder(spec, torch.device("cpu")), [])
        self._builders[spec][1].append(name)

    def num_computed(self, name: str) -> int:
        return self._sequences[name].num_computed if name in self._sequences else 0

    def free(self, name: str) -> None:
        """Forget a sequence; blocks that no other one shares are poisoned."""
        sequence = self._sequences.pop(name)
        shared = {block for other in self._sequences.values() for block in other.blocks}
        blocks = [block for block in sequence.blocks if block not in shared] + sequence.encoded.blocks
        for cache in self._caches.values():
            cache[blocks] = torch.nan
        self._free = blocks[::-1] + self._free

    @property
    def shares_prefixes(self) -> bool:
        """False where a layer keeps one state of a sequence, that behind its last token, or an encoder's tokens: no
        prefix has them."""
        return not any(
            isinstance(spec, CrossAttentionSpec)
            or (isinstance(spec, MambaSpec) and spec.mode is not MambaCacheMode.ALL)
            for spec in self._builders
        )

    @property
    def takes_chunks(self) -> bool:
        """False for encoders, whose tokens see those behind them: their prompts are computed in one step."""
        return not any(isinstance(spec, EncoderOnlyAttentionSpec) for spec in self._builders)

    def share(self, name: str, owner: str, num_tokens: int) -> None:
        """Begin ``name`` with the first ``num_tokens`` of ``owner``, whole blocks, as if they were found in a cache."""
        blocks, rest = divmod(num_tokens, self._block_size)
        if rest or num_tokens > self.num_computed(owner) or name in self._sequences:
            raise ValueError(
                f"{name!r} cannot begin with {num_tokens} tokens of {owner!r}: it must be new, and they whole "
                f"blocks of {self._block_size} among the {self.num_computed(owner)} that are computed"
            )
        self._sequences[name] = _Sequence(num_tokens, self._sequences[owner].blocks[:blocks])

    @torch.inference_mode()
    def step(self, chunks: Mapping[str, Sequence[int]], *, num_padding: int = 0) -> dict[str, torch.Tensor]:
        """Feed each named sequence its next tokens, all in one step. Returns logits [tokens, V] per sequence, or the
        hidden states [tokens, C] of a model that does not generate."""
        output = self.run(chunks, num_padding=num_padding)
        if isinstance(output, StageOutput):
            raise TypeError("this stage has no head; use run() and hand its intermediates to the next stage")
        logits = self.model.logits(output) if "generate" in self.model.info.tasks else output
        return dict(zip(chunks, torch.split(logits, [len(chunk) for chunk in chunks.values()]), strict=True))

    @torch.inference_mode()
    def run(
        self,
        chunks: Mapping[str, Sequence[int]],
        *,
        num_padding: int = 0,
        intermediates: Mapping[str, torch.Tensor] | None = None,
        embeddings: torch.Tensor | None = None,
    ) -> torch.Tensor | StageOutput:
        """What the model yields for a step: hidden states [T, C] without padding, or a stage's output as it is.

        Inputs other than ids must come without padding.
        """
        common = self._common(chunks)
        pad = [0] * num_padding
        tokens = [token for chunk in chunks.values() for token in chunk] + pad
        ends = {name: self.num_computed(name) for name in chunks}
        positions = [
            position for name, chunk in chunks.items() for position in range(ends[name] - len(chunk), ends[name])
        ]
        slots = torch.cat((common.slot_mapping, torch.full((num_padding,), -1)))
        mappings = dict.fromkeys(self._layers, slots)
        inputs = [self._sequences[name].encoded for name in chunks]
        encoded, encoder_slots = self._encoder.enter(inputs)
        built = []
        for spec, (builder, layers) in self._builders.items():
            if isinstance(spec, CrossAttentionSpec):
                mappings.update(dict.fromkeys(layers, encoder_slots))
                built.append((builder.build(self._encoder.crossed(common, inputs, encoder_slots)), layers))
            else:
                built.append((builder.build(_for_spec(spec, common)), layers))
        context = ForwardContext(
            attention_metadata={layer: metadata for metadata, layers in built for layer in layers},
            slot_mapping=mappings,
            kv_caches=self._caches,
            states=self._states,
            num_tokens=common.num_tokens,
            encoder_hidden=encoded,
        )
        ids = torch.tensor(tokens) if intermediates is None and embeddings is None else None
        with set_forward_context(context):
            output = self.model.forward(ids, torch.tensor(positions + pad), intermediates, embeddings)
        return output if isinstance(output, StageOutput) else output[: common.num_tokens]

    def _common(self, chunks: Mapping[str, Sequence[int]]) -> CommonAttentionMetadata:
        slots: list[int] = []
        for name, chunk in chunks.items():
            slots += self._grow(self._sequences.setdefault(name, _Sequence()), len(chunk))
        sequences = [self._sequences[name] for name in chunks]
        lengths = [len(chunk) for chunk in chunks.values()]
        starts = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        seq_lens = np.array([sequence.num_computed for sequence in sequences], dtype=np.int32)
        table = np.zeros((len(sequences), max(len(sequence.blocks) for sequence in sequences)), dtype=np.int32)
        for row, sequence in enumerate(sequences):
            table[row, : len(sequence.blocks)] = sequence.blocks
        return CommonAttentionMetadata(
            num_rows=len(sequences),
            num_tokens=sum(lengths),
            max_query_len=max(lengths),
            max_seq_len=int(seq_lens.max()),
            query_start_loc=torch.from_numpy(starts),
            query_start_loc_cpu=starts,
            seq_lens=torch.from_numpy(seq_lens),
            seq_lens_cpu=seq_lens,
            block_table=torch.from_numpy(table),
            slot_mapping=torch.tensor(slots, dtype=torch.int64),
            block_size=self._block_size,
        )

    def _grow(self, sequence: _Sequence, count: int) -> list[int]:
        begin = sequence.num_computed
        sequence.num_computed += count
        while len(sequence.blocks) * self._block_size < sequence.num_computed:
            sequence.blocks.append(self._free.pop())
        size = self._block_size
        return [sequence.blocks[p // size] * size + p % size for p in range(begin, sequence.num_computed)]


def _for_spec(spec: KVCacheSpec, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
    """One state for a whole sequence has one position for all of its tokens; an encoder's tokens see both sides."""
    if isinstance(spec, EncoderOnlyAttentionSpec):
        return replace(common, causal=False)
    if isinstance(spec, MambaSpec) and spec.mode is MambaCacheMode.NONE:
        return replace(common, block_size=common.max_seq_len)
    return common
