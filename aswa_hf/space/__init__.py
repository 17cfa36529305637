"""A run as an application in the browser: on this machine, or as a Space on the Hub.

Everything but `app` works without gradio, which is imported when an application is built.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aswa_hf.space.folder import gradio_version, push_space, write_space

__all__ = ["build_app", "push_space", "serve", "write_space"]


def build_app(run: Any) -> Any:
    """Returns the gradio application of a run folder, an averaged checkpoint or a Hub repository."""
    return _app().build_app(run)


def serve(run: Any, announce: Callable[[str], None] | None = None, **options: Any) -> None:
    """Starts the application of a run; `options` go to gradio's `launch()`: `server_port=`, `inbrowser=`, …

    `announce` is called with the address once the application is ready; gradio then prints nothing.
    """
    _app().serve(run, announce, **options)


def _app() -> Any:
    gradio_version()  # raises if there is none
    from aswa_hf.space import app

    return app
