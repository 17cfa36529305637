"""The files of a Space: the application, what it needs installed, its card, this package and the run."""

from __future__ import annotations

import shutil
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi

from aswa_hf._utils.files import new_folder, read_object, write_json, write_text
from aswa_hf.hub.push import MAIN_BRANCH, Branch, push_token, pushing
from aswa_hf.hub.repository import SHIPPED, check_repo_id, complete_history
from aswa_hf.hub_requests import TIMEOUT, bounded_requests
from aswa_hf.run_folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS, CARD, CONFIG, RESULTS, TRAJECTORY
from aswa_hf.space.source import EXAMPLES, GRAPH, IMAGES, LINKS, TEXT, Source, open_source

RUN = "run"
# Files of an earlier push, removed unless this one has them: old modules would be imported, old weights loaded.
REPLACED = ("aswa_hf/*", f"{RUN}/*")
APP = '''\
"""The application of a run that was trained with aswa-hf."""

from aswa_hf.space.app import build_app, launch_options

demo = build_app({run!r})

if __name__ == "__main__":
    demo.launch(**launch_options())
'''
README = """\
---
{front}---

# {title}

A model whose weights were chosen by [Adaptive Stochastic Weight Averaging](https://arxiv.org/abs/2406.19092): ask it,
and look at every decision of its training run. Made with `aswa-hf space`; start it on your own machine with
`pip install -r requirements.txt && python app.py`.
"""
# What the application of each kind of model imports, besides gradio.
NEEDED = [
    "filelock",
    "huggingface-hub",
    "jinja2",
    "numpy",
    "pydantic",
    "pyyaml",
    "safetensors",
    "torch",
    "transformers",
]
NEEDED_BY = {
    LINKS: ["datasets", "pandas", "pyarrow"],
    IMAGES: ["pillow", "timm", "datasets", "accelerate", "scikit-learn"],
    TEXT: ["accelerate", "peft"],
}


def write_space(run: str | Path, folder: str | Path, repo_id: str | None = None) -> Path:
    """Writes a Space for a run folder, an averaged checkpoint or a Hub repository to a new folder.

    A run on this machine is copied into it; a repository is loaded by its name when the Space starts.
    """
    if repo_id is not None:
        check_repo_id(repo_id)
    gradio = gradio_version()  # before anything is written
    source = open_source(run)
    pinned = requirements(source.kind)
    folder = Path(folder)
    with new_folder(folder):
        on_the_hub = not Path(run).is_dir()
        if not on_the_hub:
            _copy_run(source, folder / RUN)
        package = Path(__file__).parent.parent
        shutil.copytree(package, folder / package.name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
        write_text(folder / "app.py", APP.format(run=source.name if on_the_hub else RUN))
        write_text(folder / "requirements.txt", "\n".join(pinned) + "\n")
        front = front_matter(source, gradio, model=source.name if on_the_hub else None)
        write_text(folder / CARD, README.format(front=front, title=source.title.replace("\n", " ")))
    return folder


def push_space(
    run: str | Path,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | None = None,
    endpoint: str | None = None,
    timeout: float = TIMEOUT,
) -> str:
    """Writes the Space of a run, pushes it in one commit and returns its URL; can be repeated.

    A Space that exists is replaced: files of an earlier version of the package or of another run are removed.
    """
    check_repo_id(repo_id)
    token = push_token(token)
    with tempfile.TemporaryDirectory() as temporary, bounded_requests(timeout):
        folder = write_space(run, Path(temporary) / "space", repo_id)
        branch = Branch(HfApi(endpoint=endpoint, token=token), repo_id, MAIN_BRANCH, "space", REPLACED)
        with pushing("create the Space", repo_id, token) as step:
            url = branch.create_repository(step, private, space_sdk="gradio")
        with pushing("upload the files and commit them", repo_id, token) as step:
            branch.commit(folder, "Add the application of a run", step)
    return url


def requirements(kind: str) -> list[str]:
    """Returns the versions that are installed here, with which the application was tested."""
    names = {*NEEDED, *NEEDED_BY.get(kind, ["datasets"]), "gradio", "matplotlib", "timm", "tqdm", "rich"}
    # A build for one device, such as 2.9+cpu, is not on the index.
    return [f"{name}=={_version(name).partition('+')[0]}" for name in sorted(names)]


def gradio_version() -> str:
    """Returns the installed version of gradio, which applications need and a Space names; raises if there is none."""
    return _version("gradio")


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        raise ModuleNotFoundError(
            f'The application of a run needs {name}, which is not installed. Run: pip install "aswa-hf[space]"'
        ) from None


def front_matter(source: Source, gradio: str, model: str | None = None) -> str:
    """Returns the metadata of a Space as YAML: how the Hub starts and shows it."""
    import yaml

    about: dict[str, Any] = {
        "title": _one_line(source.title, 60),
        "emoji": "📈",
        "colorFrom": "blue",
        "colorTo": "green",
        "sdk": "gradio",
        "sdk_version": gradio,
        "python_version": f"{sys.version_info.major}.{sys.version_info.minor}",
        "app_file": "app.py",
        "pinned": False,
        "short_description": "Ask a model and see how its weights were chosen",
        "tags": ["aswa", "weight-averaging"],
    }
    if model is not None:
        about["models"] = [model]
    return str(yaml.safe_dump(about, sort_keys=False, allow_unicode=True))


def _one_line(text: str, longest: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= longest else text[: longest - 1] + "…"


def _copy_run(source: Source, folder: Path) -> None:
    """Copies what the application reads of a run: the model, its history, its card, its graph or examples."""
    folder.mkdir()
    for pattern in SHIPPED:
        for file in source.folder.glob(pattern):
            shutil.copyfile(file, folder / file.name)
    for name in (CARD, RESULTS, GRAPH):
        if (source.folder / name).is_file():
            shutil.copyfile(source.folder / name, folder / name)
    if (source.folder / TRAJECTORY).is_file():
        write_json(folder / TRAJECTORY, complete_history(source.folder))
    if source.kind == LINKS and not (folder / GRAPH).exists():
        from aswa_hf.kge import KGVocab
        from aswa_hf.space.links import read_graph

        graph = read_graph(source, KGVocab.from_pretrained(source.folder))
        if graph is not None:
            graph.save(folder / GRAPH)
    if source.kind == IMAGES:
        from aswa_hf.space.images import write_examples

        if (source.folder / EXAMPLES).is_dir():
            shutil.copytree(source.folder / EXAMPLES, folder / EXAMPLES)
        else:
            write_examples(source, folder / EXAMPLES)
    if source.kind == TEXT:
        _copy_adapters(source, folder)


def _copy_adapters(source: Source, folder: Path) -> None:
    """Copies the running model's adapter, and the base model if it is a folder here."""
    from aswa_hf.space.text import BASE, RUNNING, base_model, running_adapter

    running = running_adapter(source.folder)
    if running is not None:
        (folder / RUNNING).mkdir()
        for name in (ADAPTER_WEIGHTS, ADAPTER_CONFIG):
            shutil.copyfile(running / name, folder / RUNNING / name)
    base = Path(base_model(source))
    if base.is_dir():
        (folder / BASE).mkdir()
        for pattern in SHIPPED:
            for file in base.glob(pattern):
                shutil.copyfile(file, folder / BASE / file.name)
        for place in (folder, folder / RUNNING):
            if (place / ADAPTER_CONFIG).is_file():
                content = read_object(place / ADAPTER_CONFIG)
                write_json(place / ADAPTER_CONFIG, {**content, "base_model_name_or_path": BASE})
    elif not (folder / CONFIG).exists() and base.is_absolute():
        raise ValueError(f"The base model {base} does not exist, so a Space could not load it.")
