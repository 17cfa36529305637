"""Commands of `aswa-hf` in the process of the tests, which saves the seconds that importing takes."""

import sys

import pytest

from aswa_hf.cli import main


def call(*arguments):
    """A command's exit status, or its one line of complaint."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["aswa-hf", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
    return ended.value.code or 0


def outcome(capsys, *arguments):
    """A command's exit status, output and errors, among them its complaint."""
    capsys.readouterr()
    code = call(*arguments)
    printed = capsys.readouterr()
    status, message = (1, code) if isinstance(code, str) else (code, "")
    return status, printed.out, printed.err + message
