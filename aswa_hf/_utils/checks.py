"""Checks of arguments."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from aswa_hf._utils.names import did_you_mean


def is_whole_number(value: Any, least: int = 1) -> bool:
    """Whether the value is an int of at least `least`; True and False are not."""
    return is_number(value) and isinstance(value, int) and value >= least


def is_number(value: Any) -> bool:
    """Whether the value is an int or a float, also NaN and infinity; True and False are not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_whole_number(name: str, value: Any, least: int = 1, *, optional: bool = False) -> None:
    """Raises ValueError unless the value is a whole number of at least `least`, or None if it is optional."""
    if not is_whole_number(value, least) and not (optional and value is None):
        expected = f"a whole number of at least {least}" + (" or None" if optional else "")
        raise ValueError(f"{name} must be {expected}, got {value!r}.")


def check_number(name: str, value: Any, low: float, high: float = math.inf, *, below: bool = False) -> None:
    """Raises ValueError unless the value is a number from `low` to `high`, which is excluded if it must be `below`."""
    if is_number(value) and low <= value < math.inf and (value < high if below else value <= high):
        return
    expected = f"a number of at least {low:g}" if high == math.inf else f"in [{low:g}, {high:g}{')' if below else ']'}"
    raise ValueError(f"{name} must be {expected}, got {value!r}.")


def check_flag(name: str, value: Any) -> None:
    """Raises TypeError unless the value is True or False: "no" would count as True."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}.")


def check_choice(name: str, value: Any, known: Iterable[str]) -> None:
    """Raises ValueError, with the nearest known value, unless `value` is one of them."""
    known = list(known)
    if value not in known:
        hint = did_you_mean(value, known)
        raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}. {hint}".rstrip())
