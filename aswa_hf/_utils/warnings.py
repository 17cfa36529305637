"""Warnings that point at the user's own line."""

from __future__ import annotations

import sys
import warnings


def warn_caller(message: str) -> None:
    """Warns at the line outside this package that led here."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals["__name__"].partition(".")[0] == "aswa_hf":
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
