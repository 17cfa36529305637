"""Renders model_cards/ from the folders of finished runs, without their weights.

    python scripts/render_model_cards.py runs/umls-keci-0 runs/cifar10-preresnet20-0
    python scripts/render_model_cards.py    # all existing cards again, after a change of the template

The commands that made the runs are in the cards. Beside a card are the files it was made from: the configuration, the
picture, and of the trajectory file the part that the card uses.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from aswa_hf._utils.files import write_text
from aswa_hf.hub.card import read_card_data, render
from aswa_hf.hub.repository import write_repository
from aswa_hf.plotting import plot_trajectories
from aswa_hf.run_folder import CARD, CONFIG, PICTURE, TRAJECTORY
from aswa_hf.trajectory import load_trajectories

ROOT = Path(__file__).resolve().parent.parent / "model_cards"
OWNER = "your-name"
INDEX = """\
# Model cards

The cards of real runs, as `aswa-hf push` would publish them, without the weights; each names the command that makes
its checkpoint. `data/` is a folder with the data sets. Test results, the better one bold:
"""


def render_card(run: Path, root: Path = ROOT) -> Path:
    """Writes the card of a run to a folder named after the run."""
    folder = root / run.name
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        repository = write_repository(run, Path(temporary) / "repository", f"{OWNER}/{run.name}")
        shutil.copyfile(repository / CONFIG, folder / CONFIG)
        write_text(folder / TRAJECTORY, _used_part(json.loads((repository / TRAJECTORY).read_text(encoding="utf-8"))))
    return render_again(folder)


def render_again(folder: Path) -> Path:
    """Writes a card, and its picture, from the files beside it."""
    trajectories, about = load_trajectories(folder / TRAJECTORY)
    title = f"{about['run']['model']} on {about['run']['dataset']}"
    plot_trajectories(trajectories, folder / PICTURE, metric=about["metric"], title=title)
    write_text(folder / CARD, str(render(read_card_data(folder, f"{OWNER}/{folder.name}"))))
    return folder


def _used_part(content: dict[str, Any]) -> str:
    """The trajectory file with the shipped strategy's history alone, a record a line: it is read by people too."""
    shipped = content["strategies"][content["applied"]]
    records = ",\n        ".join(json.dumps(record) for record in shipped["records"])
    content["strategies"] = {content["applied"]: {"records": ["RECORDS"], "alphas": "ALPHAS"}}
    text = json.dumps(content, indent=2, allow_nan=False, ensure_ascii=False)
    return text.replace('"RECORDS"', records).replace('"ALPHAS"', json.dumps(shipped["alphas"])) + "\n"


def write_index(root: Path = ROOT) -> None:
    """Writes the page that lists all cards with what their weights came to on the test split."""
    lines = [INDEX, "| card | metric | ASWA | best of the others |", "| --- | --- | --- | --- |"]
    for folder in sorted(path.parent for path in root.glob(f"*/{CARD}")):
        data = read_card_data(folder, folder.name)
        scores = {name: values[0] for name, values in data.results("test") if values[0] is not None}
        own = scores.pop(data.shipped)
        name = max(scores, key=lambda name: scores[name])
        won = own >= scores[name]
        cells = [f"**{own:.4f}**", f"{name} {scores[name]:.4f}"]
        if not won:
            cells = [f"{own:.4f}", f"{name} **{scores[name]:.4f}**"]
        lines.append(f"| [{folder.name}]({folder.name}/{CARD}) | {data.metrics[0]} | {' | '.join(cells)} |")
    write_text(root / CARD, "\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, help="folders written by `aswa-hf train`; none: existing cards")
    runs = parser.parse_args().runs
    existing = sorted(path.parent for path in ROOT.glob(f"*/{CARD}"))
    for folder in map(render_card, runs) if runs else map(render_again, existing):
        sys.stdout.write(f"{folder}\n")
    write_index()


if __name__ == "__main__":
    main()
