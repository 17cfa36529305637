"""`aswa-hf push`: a run to the Hub, with its card."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def push(
    run_dir: Annotated[Path, typer.Argument(help="A run folder, as `aswa-hf train` writes it.")],
    repo: Annotated[str, typer.Argument(help="The repository on the Hub, like me/keci-umls-aswa.")],
    private: Annotated[
        bool | None, typer.Option("--private/--public", help="Visibility of a new repository (account's default).")
    ] = None,
    tag: Annotated[str | None, typer.Option(help="Mark the commit with this tag, for a release.")] = None,
    running: Annotated[
        bool, typer.Option("--running", help="Also the running model's last weights, on the branch `running`.")
    ] = False,
    license_: Annotated[str | None, typer.Option("--license", help="The license named in the card.")] = None,
    notes: Annotated[str, typer.Option(help="A sentence of your own for the card.")] = "",
    dry_run: Annotated[
        Path | None, typer.Option(help="Write the exact files to this folder instead of pushing them.")
    ] = None,
) -> None:
    """Push a trained model to the Hub in one commit, with a card that tells how its weights were chosen.

    Example: `aswa-hf push runs/countries me/countries-keci-aswa --dry-run repository`
    """
    from aswa_hf.hub import push_to_hub, write_repository

    if dry_run is not None:
        folder = write_repository(run_dir, dry_run, repo, license=license_, notes=notes)
        files = sorted(file.name for file in folder.iterdir())
        typer.echo(f"Written to {folder}, nothing pushed: {', '.join(files)}")
        return
    url = push_to_hub(run_dir, repo, private=private, tag=tag, running=running, license=license_, notes=notes)
    typer.echo(f"Pushed to {url}")
