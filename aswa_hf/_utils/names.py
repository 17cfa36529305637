"""Names that users type: the nearest known one, and strategies with options, as in "ema(decay=0.9995)"."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any


def did_you_mean(name: Any, known: Iterable[str]) -> str:
    """Returns a question with the known name that is nearest to an unknown one; an empty string if none is near."""
    nearest = difflib.get_close_matches(str(name), list(known), n=5)
    typed = str(name)
    swapped = {typed[:at] + typed[at + 1] + typed[at] + typed[at + 2 :] for at in range(len(typed) - 1)}
    # Two letters in the other order are a typing error, and the beginning of a name stands for it.
    nearest.sort(key=lambda other: (other not in swapped, not other.startswith(typed)))
    return f"Did you mean {nearest[0]!r}? " if nearest else ""


def split_strategies(text: str) -> list[str]:
    """Splits at the commas that are not inside parentheses."""
    return re.split(r",(?![^()]*\))", text)


def parse_strategy(text: str) -> tuple[str, dict[str, Any]]:
    """Returns the name and the options of a strategy: "ema(decay=0.9995)" → "ema", {"decay": 0.9995}."""
    match = re.fullmatch(r"\s*([^()\s]+)\s*(?:\((.*)\))?\s*", text)
    if match is None:
        raise ValueError(f"{text!r} is not a strategy. Expected a name, or a name with options: lawa(k=3).")
    name, inside = match.groups()
    options: dict[str, Any] = {}
    for part in (inside or "").split(","):
        option, equals, value = (piece.strip() for piece in part.partition("="))
        if not option and not equals:
            continue
        if not (option and equals and value) or option in options:
            raise ValueError(f"{text!r}: expected options as name=value, each once, got {part.strip()!r}.")
        options[option] = _value(value)
    return name, options


def strategy_text(name: str, options: Mapping[str, Any]) -> str:
    """Reverses `parse_strategy`."""
    return f"{name}({','.join(f'{option}={value}' for option, value in options.items())})" if options else name


def _value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text  # a word, such as cpu
