"""`aswa-hf push`: pushes a run to the Hub, with its card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from aswa_hf.cli.options import AsJson, loading, named_as_flags, uploading, without_bars_of_reading


def push(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, as `aswa-hf train` writes it.")],
    repo: Annotated[str, typer.Argument(metavar="REPO", help="The repository on the Hub, such as me/keci-umls-aswa.")],
    private: Annotated[
        bool | None,
        typer.Option(
            "--private/--public", metavar="", help="Visibility of a new repository (default: the account's setting)."
        ),
    ] = None,
    tag: Annotated[str | None, typer.Option(metavar="NAME", help="Tag for the commit, for a release.")] = None,
    running: Annotated[
        bool,
        typer.Option(
            "--running", metavar="", help="Also push the running model's last weights, to the branch `running`."
        ),
    ] = False,
    license_: Annotated[
        str | None, typer.Option("--license", metavar="NAME", help="The license named in the card.")
    ] = None,
    notes: Annotated[str, typer.Option(metavar="TEXT", help="A sentence to add to the card.")] = "",
    dry_run: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Write the exact files to this folder instead of pushing them."),
    ] = None,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="Stop if a request gets no answer for this long.")
    ] = 20.0,
    as_json: AsJson = False,
) -> None:
    """Push a trained model to the Hub in one commit, with a card that describes how its weights were chosen.

    Example:

    `aswa-hf push runs/countries me/countries-keci-aswa --dry-run repository`
    """
    with loading(str(run_dir)):
        from aswa_hf.hub import push_to_hub, write_repository
        from aswa_hf.hub.repository import check_tag_name

    check_tag_name(tag)
    if dry_run is not None:
        without_bars_of_reading()
        with loading(str(run_dir)):
            folder = write_repository(run_dir, dry_run, repo, license=license_, notes=notes)
        files = sorted(file.name for file in folder.iterdir())
        found = json.dumps({"folder": str(folder), "files": files})
        typer.echo(found if as_json else f"Written to {folder}, nothing pushed: {', '.join(files)}")
        return
    with uploading(repo), named_as_flags("timeout"):
        url = push_to_hub(
            run_dir, repo, private=private, tag=tag, running=running, timeout=timeout, license=license_, notes=notes
        )
    typer.echo(json.dumps({"url": url}) if as_json else f"Pushed to {url}")
