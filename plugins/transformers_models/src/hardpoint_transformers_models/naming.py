"""The names under which checkpoints store what a model of ``transformers`` has as parameters.

The library renames what it reads, and stacks the matrices of a layer's experts. Both are turned round here: for each
parameter the names of the stored tensors that fill it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter, WeightRenaming

from hardpoint.interfaces.model import WeightRule
from hardpoint_transformers_models.experts import StackedExperts
from hardpoint_transformers_models.refusal import refusal

__all__ = ["Naming"]


class Naming:
    """Of one model, which must still have the parameters of the library."""

    def __init__(self, architecture: str, model: Any) -> None:
        self._architecture = architecture
        transforms = get_model_conversion_mapping(model, add_legacy=False)
        self._renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
        self._converters = [one for one in transforms if isinstance(one, WeightConverter)]
        self.stacks: dict[str, StackedExperts] = {}
        self._parts: dict[str, tuple[Sequence[str], int]] = {}
        for name, parameter in model.named_parameters():
            self._note_stack(name, parameter)

    def rules(self, targets: Mapping[str, str]) -> list[WeightRule]:
        """Where what fills a parameter is to go: ``targets`` by the library's names, ``module.*`` for all of one's."""
        rules: dict[WeightRule, None] = {}
        for name, target in targets.items():
            for stored, shard in self._stored(name):
                rules[_rule(stored, target, shard)] = None
        return list(rules)

    def _stored(self, name: str) -> Iterator[tuple[str, str | None]]:
        """Names with the part that they fill. One that the library would not rename is an alternative."""
        yield from ((one, None) for one in dict.fromkeys((self._renamed(name), name)))
        sources, num_experts = self._parts.get(name, ((), 0))
        for expert in range(num_experts):
            for part, source in enumerate(sources):
                yield self._renamed(source.replace("*", str(expert), 1)), f"{expert}/{part}"

    def _renamed(self, name: str) -> str:
        stored = name
        for renaming in reversed(self._renamings):
            stored, _ = renaming.reverse_transform().rename_source_key(stored)
        read = stored
        for renaming in self._renamings:
            read, _ = renaming.rename_source_key(read)
        if read != name:
            raise refusal(
                self._architecture,
                f"the library reads {name} under names that cannot be told from it ({stored} would be read as {read})",
            )
        return stored

    def _note_stack(self, name: str, parameter: torch.Tensor) -> None:
        for converter in self._converters:
            target = next((one for one in converter._original_target_patterns if name.endswith(one)), None)
            if target is None:
                continue
            operations = [type(one) for one in converter.operations]
            if operations not in ([MergeModulelist], [MergeModulelist, Concatenate]) or parameter.dim() != 3:
                shown = " and ".join(one.__name__ for one in operations) or "nothing"
                raise refusal(
                    self._architecture, f"{name} is made of stored tensors by {shown}; stacks of experts are understood"
                )
            begin = name.removesuffix(target)
            sources = [begin + source for source in converter._original_source_patterns]
            self._parts[name] = (sources, parameter.shape[0])
            module, _, own = name.rpartition(".")
            stack = self.stacks.setdefault(module, StackedExperts({}, {}))
            stack.shapes[own] = tuple(parameter.shape)
            stack.num_parts[own] = len(sources)


def _rule(stored: str, target: str, shard: str | None) -> WeightRule:
    """One rule for all layers: where both names have the same first number, it may be any."""
    numbers = [re.search(r"\.(\d+)\.", name) for name in (stored, target)]
    if all(numbers) and len({found[1] for found in numbers if found}) == 1:
        stored, target = (re.sub(r"\.\d+\.", ".*.", name, count=1) for name in (stored, target))
    return WeightRule(stored, target, shard)
