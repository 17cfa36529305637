"""Checks of arguments."""

from __future__ import annotations

from typing import Any


def is_whole_number(value: Any, least: int = 1) -> bool:
    """Whether the value is an int of at least `least`; True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def check_whole_number(name: str, value: Any, least: int = 1, *, optional: bool = False) -> None:
    """Raises ValueError unless the value is a whole number of at least `least`, or None if it is optional."""
    if not is_whole_number(value, least) and not (optional and value is None):
        expected = f"a whole number of at least {least}" + (" or None" if optional else "")
        raise ValueError(f"{name} must be {expected}, got {value!r}.")
