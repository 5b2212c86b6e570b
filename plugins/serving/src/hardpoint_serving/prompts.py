"""What OpenAI's routes take as input: one text, one list of ids, or a list of either."""

from __future__ import annotations

from hardpoint.errors import InvalidRequestError
from hardpoint.interfaces.engine import EngineClient, Prompt

__all__ = ["TextInput", "read_prompts"]

TextInput = str | list[str | int | list[int]]
"""As it stands in a request's body."""


def read_prompts(
    given: TextInput,
    client: EngineClient,
    *,
    param: str,
    n: int = 1,
    add_special_tokens: bool = True,
    cache_salt: str | None = None,
) -> list[Prompt]:
    """One prompt per text or list of ids. Their number is checked before anything is made of them (class 27).

    Raises ``InvalidRequestError`` that names the field ``param``.
    """
    if isinstance(given, str):
        items: list[str | list[int]] = [given]
    elif given and all(isinstance(item, int) for item in given):
        items = [given]  # type: ignore[list-item]
    elif any(isinstance(item, int) for item in given):
        raise InvalidRequestError(
            f"{param} must be a text, a list of texts, a list of token ids or a list of such lists",
            param=param,
            code="invalid_type",
        )
    else:
        items = given  # type: ignore[assignment]
    client.check_batch(len(items), n)
    return [
        Prompt(text=item, add_special_tokens=add_special_tokens, cache_salt=cache_salt)
        if isinstance(item, str)
        else Prompt(token_ids=item, cache_salt=cache_salt)
        for item in items
    ]
