"""Shows the `>>>` examples of docstrings as code; Markdown would take them for quotations."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Puts every paragraph that begins with `>>>` into a fenced block."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = re.sub(
                r"^(>>> .+(?:\n(?!\n).+)*)", r"```pycon\n\1\n```", obj.docstring.value, flags=re.MULTILINE
            )
