"""Sampling flags shared by the commands, and how they become :class:`SamplingParams`."""

from __future__ import annotations

import argparse

from hardpoint.errors import ConfigError
from hardpoint.interfaces import OutputKind, SamplingParams

__all__ = ["add_sampling_arguments", "sampling_params"]


def add_sampling_arguments(parser: argparse.ArgumentParser, *, max_tokens: int) -> None:
    """Add the flags. ``max_tokens`` is the default length."""
    group = parser.add_argument_group("sampling")
    add = group.add_argument
    add("--max-tokens", type=int, default=max_tokens, metavar="N", help="tokens to generate (default: %(default)s)")
    add("--temperature", type=float, default=1.0, metavar="T", help="0 is greedy (default: %(default)s)")
    add("--top-p", type=float, default=1.0, metavar="P", help="keep the most likely tokens of this total probability")
    add("--top-k", type=int, default=0, metavar="K", help="keep the K most likely tokens; 0 keeps all")
    add("--min-p", type=float, default=0.0, metavar="P", help="drop tokens less likely than P times the likeliest")
    add("--sampling-seed", type=int, metavar="S", help="seed of each request")
    add("--stop", action="append", default=[], metavar="TEXT", help="text that ends generation; repeatable")
    add("--ignore-eos", action="store_true", help="generate the full length")


def sampling_params(arguments: argparse.Namespace, output_kind: OutputKind) -> SamplingParams:
    """The parameters asked for; their ranges are checked where every request is checked."""
    if arguments.max_tokens < 1:
        raise ConfigError(f"--max-tokens {arguments.max_tokens} must be at least 1")
    return SamplingParams(
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        min_p=arguments.min_p,
        seed=arguments.sampling_seed,
        stop=tuple(arguments.stop),
        ignore_eos=arguments.ignore_eos,
        output_kind=output_kind,
    )
