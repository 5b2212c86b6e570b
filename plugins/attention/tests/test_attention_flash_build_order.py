"""The order in which metadata of a step comes about, as the builder itself goes through it."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from flash_cases import FlashCase
from flash_double import FlashDouble
from hardpoint_attention.flash.builder import FlashMetadataBuilder
from hardpoint_attention.flash.scheduling import split_bound

STEPS = {
    "_learn_layers": "windows of layers",
    "_plain": "rows as they are",
    "_cascade": "a shared prefix",
    "_scheduled": "a stored schedule",
    "_fill_ranges": "multimodal ranges",
    "_fill_prompts": "lengths of prompts",
}


def watch(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of steps as they begin; each does what it did."""
    order: list[str] = []

    def noted(told: str, function: Any) -> Any:
        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            order.append(told)
            return function(*arguments, **named)

        return call

    for name, told in STEPS.items():
        monkeypatch.setattr(FlashMetadataBuilder, name, noted(told, getattr(FlashMetadataBuilder, name)))
    monkeypatch.setattr("hardpoint_attention.flash.builder.split_bound", noted("bound of splits", split_bound))
    return order


def test_steps_of_a_build_come_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """R5.30: layers are known before splits are bound, the branch is taken before its schedule is stored, and what is
    optional comes last; a second build goes the same way."""
    with FlashDouble().installed():
        case = FlashCase.create(3)
        order = watch(monkeypatch)
        for _ in range(2):
            order.clear()
            assert case.builder.build(case.common([(9, 1), (30, 1)])).plain.schedule is not None
            assert order == [
                "windows of layers",
                "bound of splits",
                "rows as they are",
                "a shared prefix",
                "a stored schedule",
                "multimodal ranges",
                "lengths of prompts",
            ]
