"""The one validator of requests: every front end and every field passes here, before anything is queued.

Everything raised is ``InvalidRequestError`` with ``param`` and ``code``, whatever a client or Python caller hands in:
wrong types included. Bounds come from :class:`ModelLimits` alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from hardpoint.errors import InvalidRequestError
from hardpoint.interfaces.engine import ModelLimits, Prompt, RequestOptions
from hardpoint.interfaces.request import POOLING_METHODS, Feature, Int32Array, PoolingParams, SamplingParams

MAX_CHARS_PER_TOKEN = 64
MAX_EXTENSION_BYTES = 64 * 1024
_StructT = TypeVar("_StructT", SamplingParams, PoolingParams, RequestOptions, Feature)
_TOO_LONG = "context_length_exceeded"
_LABEL = re.compile(r"[A-Za-z0-9_.:=+-]{1,128}")
_PATH = re.compile(r"\$\.(\w+)")


def _refuse(message: str, param: str, code: str = "invalid_value") -> InvalidRequestError:
    return InvalidRequestError(message, param=param, code=code)


def _require(holds: bool, message: str, param: str, code: str = "invalid_value") -> None:
    if not holds:
        raise _refuse(message, param, code)


def _shown(value: Any) -> str:
    """A value from outside as part of a message: short, whatever it is (Python refuses to print very long integers)."""
    if isinstance(value, float) or (isinstance(value, int) and value.bit_length() <= 64):
        return str(value)
    return "an integer beyond 64 bits" if isinstance(value, int) else f"a {type(value).__name__}"


def validate_batch(num_prompts: int, n: int, limits: ModelLimits) -> None:
    """Prompts and sequences of one call, before anything is built for them."""
    most, total = limits.max_prompts, max(limits.max_prompts, limits.max_n)
    _require(num_prompts >= 1, "no prompt was given", "prompt", "empty_prompt")
    _require(num_prompts <= most, f"{num_prompts} prompts were given; at most {most} are allowed", "prompt")
    _check_n(n, limits)
    message = f"{num_prompts} prompts with n={n} are {num_prompts * n} sequences; at most {total}"
    _require(num_prompts * n <= total, message, "n")


def validate_sampling(
    params: SamplingParams, prompt_len: int, limits: ModelLimits, eos_token_ids: Sequence[int] = ()
) -> SamplingParams:
    """The same parameters with exact types and ``max_tokens`` filled in. ``prompt_len`` is in tokens."""
    typed = _typed(params, SamplingParams)
    _check_n(typed.n, limits)
    message = f"n is {typed.n} with greedy sampling: all sequences would be equal; set temperature"
    _require(typed.n == 1 or not typed.is_greedy, message, "n")
    _check_stop(typed, limits)
    _check_token_fields(typed, limits)
    _check_some_token_is_left(typed, eos_token_ids)
    _check_logprobs(typed, limits)
    _check_extensions(typed)
    return _check_lengths(typed, prompt_len, limits)


def validate_pooling(params: PoolingParams, limits: ModelLimits) -> PoolingParams:
    """The same parameters with exact types."""
    typed = _typed(params, PoolingParams)
    message = f"pooling is {typed.pooling!r:.100}; it must be one of {', '.join(POOLING_METHODS)}"
    _require(typed.pooling in (None, *POOLING_METHODS), message, "pooling")
    most = limits.embedding_size or 2**31 - 1
    message = f"dimensions is {_shown(typed.dimensions)}; embeddings of this model can have from 1 to {most}"
    _require(typed.dimensions is None or 1 <= typed.dimensions <= most, message, "dimensions")
    return typed


def max_prompt_chars(limits: ModelLimits) -> int:
    """Characters of one prompt, completions and rendered chats alike. More is refused before it is tokenized."""
    return limits.max_model_len * MAX_CHARS_PER_TOKEN


def validate_prompt(prompt: Prompt, limits: ModelLimits) -> None:
    """What can be said before tokenizing: one of text and ids, plain text, a plausible length, a harmless salt."""
    if not isinstance(prompt, Prompt):
        raise _refuse(f"a prompt must be text or token ids, not {type(prompt).__name__}", "prompt", "invalid_type")
    only_one = (prompt.text is None) != (prompt.token_ids is None)
    _require(only_one, "a prompt must have either text or token ids", "prompt")
    if prompt.text is not None:
        _check_text(prompt.text, "prompt")
        _require(prompt.text != "", "the prompt is empty", "prompt", "empty_prompt")
        allowed, each = max_prompt_chars(limits), f"{MAX_CHARS_PER_TOKEN} for each token of the model's context"
        message = f"the prompt has {len(prompt.text)} characters; at most {allowed} are allowed, {each}"
        _require(len(prompt.text) <= allowed, message, "prompt", _TOO_LONG)
    if prompt.cache_salt is not None:
        _check_label(prompt.cache_salt, "cache_salt")


def validate_token_ids(token_ids: Any, limits: ModelLimits, room: int = 1) -> Int32Array:
    """Prompt ids as int32 ``[prompt]``: integers inside the vocabulary that leave ``room`` for new tokens."""
    message = f"prompt token ids must be a list of integers, not {type(token_ids).__name__}"
    _require(not isinstance(token_ids, str | bytes), message, "prompt")
    if isinstance(token_ids, list | tuple):
        _check_prompt_len(len(token_ids), limits, room)  # Converting a body full of numbers would take seconds.
    try:
        array = np.asarray(token_ids)
    except (ValueError, TypeError, OverflowError):
        array = np.zeros((), dtype=np.object_)
    _require(array.shape != (0,), "the prompt is empty", "prompt", "empty_prompt")
    is_flat = array.ndim == 1 and array.dtype.kind in "iu"
    _require(is_flat, "prompt token ids must be a flat list of integers", "prompt", "invalid_type")
    _check_prompt_len(len(array), limits, room)
    _check_vocabulary((int(array.min()), int(array.max())), "prompt", limits)
    return array.astype(np.int32)


def _check_prompt_len(num_tokens: int, limits: ModelLimits, room: int) -> None:
    left = ", one of which must be left for the answer" if room else ""
    message = f"the prompt has {num_tokens} tokens; the context length is {limits.max_model_len} tokens{left}"
    _require(num_tokens + room <= limits.max_model_len, message, "prompt", _TOO_LONG)
    most = limits.max_step_tokens or limits.max_model_len
    message = f"the prompt has {num_tokens} tokens and is computed in one step; --max-num-batched-tokens allows {most}"
    _require(num_tokens <= most, message, "prompt", _TOO_LONG)


def validate_features(features: Any) -> tuple[Feature, ...]:
    """The same features with exact types; what they hold is for the model to judge."""
    return tuple(_typed(one, Feature, "features") for one in (features if isinstance(features, tuple) else [features]))


def validate_options(options: RequestOptions) -> None:
    _typed(options, RequestOptions, "options")
    if options.tenant != "":
        _check_label(options.tenant, "tenant")
    if options.external_id is not None:
        _check_text(options.external_id, "external_id")
    _require(options.adapter is None, "this engine serves no adapters", "adapter", "unsupported")
    _require(not options.extensions, "this engine takes no request extensions", "extensions", "unsupported")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _typed(params: Any, kind: type[_StructT], what: str = "params") -> _StructT:
    """Struct constructors check neither types nor ranges; converting the fields does, and makes lists tuples."""
    if not isinstance(params, kind):
        raise _refuse(f"{what} must be {kind.__name__}, not {type(params).__name__}", what, "invalid_type")
    fields = msgspec.structs.asdict(params)
    if isinstance(fields.get("stop"), str):
        fields["stop"] = (fields["stop"],)
    try:
        return msgspec.convert(fields, kind)
    except (msgspec.ValidationError, TypeError, ValueError, OverflowError) as error:
        found = _PATH.search(str(error))
        param = found[1] if found else what
        fault = str(error).partition(" - at ")[0]
        code = "invalid_value" if {*"<>"}.intersection(fault) else "invalid_type"
        raise _refuse(f"{param} is {_shown(fields.get(param))}: {fault}", param, code) from None


def _check_n(n: Any, limits: ModelLimits) -> None:
    message = f"n is {_shown(n)}; it must be an integer from 1 to {limits.max_n}"
    _require(_is_int(n) and 1 <= n <= limits.max_n, message, "n")


def _check_text(text: Any, param: str) -> None:
    if not isinstance(text, str):
        raise _refuse(f"{param} must be text, not {type(text).__name__}", param, "invalid_type")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _refuse(f"{param} holds unpaired surrogates, which are not text", param) from None


def _check_label(text: Any, param: str) -> None:
    if not isinstance(text, str) or not _LABEL.fullmatch(text):
        raise _refuse(f"{param} must be 1 to 128 characters out of letters, digits and _.:=+-", param)


def _check_stop(params: SamplingParams, limits: ModelLimits) -> None:
    most, longest = limits.max_stop_strings, limits.max_stop_chars
    _require(len(params.stop) <= most, f"{len(params.stop)} stop strings were given; at most {most}", "stop")
    for stop in params.stop:
        _check_text(stop, "stop")
        message = f"a stop string has {len(stop)} characters; allowed are 1 to {longest}"
        _require(0 < len(stop) <= longest, message, "stop")
    can_stop = params.detokenize or not params.stop
    _require(can_stop, "stop strings need detokenize, which is off; use stop_token_ids", "stop")


def _check_vocabulary(ids: Iterable[int], param: str, limits: ModelLimits) -> None:
    for token_id in ids:
        if not 0 <= token_id < limits.vocab_size:
            message = f"{param} holds token id {_shown(token_id)}; ids go from 0 to {limits.vocab_size - 1}"
            raise _refuse(message, param, "token_id_out_of_range")


def _check_token_fields(params: SamplingParams, limits: ModelLimits) -> None:
    fields: dict[str, Sequence[int]] = {
        "stop_token_ids": params.stop_token_ids,
        "allowed_token_ids": params.allowed_token_ids,
        "logit_bias": tuple(params.logit_bias),
        "bad_words_token_ids": tuple(i for word in params.bad_words_token_ids for i in word),
    }
    for param, ids in fields.items():
        _require(len(ids) <= limits.vocab_size, f"{param} has {len(ids)} entries; at most {limits.vocab_size}", param)
        _check_vocabulary(ids, param, limits)
    _require(all(params.bad_words_token_ids), "bad_words_token_ids holds an empty sequence", "bad_words_token_ids")


def _check_some_token_is_left(params: SamplingParams, eos_token_ids: Sequence[int]) -> None:
    """Tokens that end the sequence are not drawn before ``min_tokens``: others must be allowed as well."""
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
    is_stuck = params.min_tokens and params.allowed_token_ids and stops.issuperset(params.allowed_token_ids)
    message = "allowed_token_ids holds only tokens that end the sequence; allow others too, or set min_tokens to 0"
    _require(not is_stuck, message, "allowed_token_ids")


def _check_logprobs(params: SamplingParams, limits: ModelLimits) -> None:
    highest = limits.vocab_size if limits.max_logprobs == -1 else limits.max_logprobs
    for param, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        wanted = limits.vocab_size if count == -1 else count or 0
        _require(0 <= wanted <= highest, f"{param} is {_shown(count)}; it must be from 0 to {highest}", param)


def _check_extensions(params: SamplingParams) -> None:
    if not params.extensions:
        return
    try:
        size = len(msgspec.msgpack.encode(params.extensions))
    except (TypeError, ValueError, OverflowError, RecursionError):
        raise _refuse("extensions hold values that cannot be sent to the engine", "extensions") from None
    message = f"extensions take {size} bytes; at most {MAX_EXTENSION_BYTES}"
    _require(size <= MAX_EXTENSION_BYTES, message, "extensions")


def _check_lengths(params: SamplingParams, prompt_len: int, limits: ModelLimits) -> SamplingParams:
    """Defaults first, then every comparison: an unset ``max_tokens`` must not skip one (class 28)."""
    longest = limits.max_model_len
    room = longest - prompt_len
    wanted = room if params.max_tokens is None else params.max_tokens
    _require(wanted >= 1, f"max_tokens is {_shown(wanted)}; it must be at least 1", "max_tokens")
    message = f"max_tokens is {_shown(wanted)} and the prompt has {prompt_len} tokens; the context ends at {longest}"
    _require(wanted <= room, message, "max_tokens", _TOO_LONG)
    fits = params.min_tokens <= wanted
    _require(fits, f"min_tokens is {params.min_tokens}, more than the {wanted} tokens allowed", "min_tokens")
    return msgspec.structs.replace(params, max_tokens=wanted)
