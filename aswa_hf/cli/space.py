"""`aswa-hf serve` and `aswa-hf space`: a run as an application in the browser."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from aswa_hf.cli.options import AsJson, loading, uploading

RUN = Annotated[
    str, typer.Argument(metavar="RUN", help="A run folder, an averaged checkpoint, a saved model or a Hub repository.")
]


def serve(
    run: RUN,
    port: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, max=65535, help="The port (default: a free one from 7860 on)."),
    ] = None,
    host: Annotated[
        str, typer.Option(metavar="NAME", help="The address to listen on; 0.0.0.0 allows other machines.")
    ] = "127.0.0.1",
    open_browser: Annotated[bool, typer.Option("--open", metavar="", help="Open a browser.")] = False,
) -> None:
    """Show a run in the browser: ask its model, follow its decisions, compare its strategies.

    Needs gradio: `pip install "aswa-hf[space]"`. Ctrl-C stops it.

    Example:

    `aswa-hf serve runs/countries --open`
    """
    with loading(run) as clear:
        from aswa_hf.space import serve as start

        def announce(address: str) -> None:
            clear()
            typer.echo(f"{run} is at {address} (Ctrl-C stops it)")
            sys.stdout.flush()

        start(run, announce, server_name=host, server_port=port, inbrowser=open_browser)


def space(
    run: RUN,
    output_dir: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Write the files of the Space to this new folder.")
    ] = None,
    push: Annotated[str | None, typer.Option(metavar="REPO", help="Push the Space to owner/name on the Hub.")] = None,
    private: Annotated[
        bool | None,
        typer.Option("--private/--public", metavar="", help="Visibility of a new Space (default: the account's)."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Turn a run into a Gradio Space: a folder of files, or a Space on the Hub.

    Example:

    `aswa-hf space runs/countries --output-dir my-space`
    """
    if (output_dir is None) == (push is None):
        raise ValueError("Give --output-dir for a folder, or --push for a Space on the Hub.")
    with loading(run):
        from aswa_hf.space import push_space, write_space
    if push is not None:
        with uploading(push):
            url = push_space(run, push, private=private)
        typer.echo(json.dumps({"url": url}) if as_json else f"Pushed to {url}")
        return
    folder = write_space(run, Path(str(output_dir)))
    files = sorted(file.name for file in folder.iterdir())
    if as_json:
        typer.echo(json.dumps({"folder": str(folder), "files": files}))
    else:
        typer.echo(f"Written to {folder}: {', '.join(files)}")
