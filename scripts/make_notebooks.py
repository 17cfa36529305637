"""Writes the notebooks of examples/notebooks/ and runs them, so that they hold their results and pictures.

    python scripts/make_notebooks.py [trainer link_prediction existing_checkpoints]

Their cells are here, where they can be read, linted and changed; `--no-run` writes them without results.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent.parent / "examples" / "notebooks"

# A cell that begins with "#" and a space is text; all others are code.
NOTEBOOKS = {
    "trainer": [
        "# ASWA in a Trainer\n\nA small network overfits 200 handwritten digits. One callback follows the run with "
        "five strategies and ends it with ASWA's weights in the model. Everything is embedded; it takes seconds.",
        """import numpy as np
from sklearn.datasets import load_digits
from torch import nn
from transformers import PrinterCallback, Trainer, TrainingArguments, set_seed

from aswa_hf import ASWACallback

set_seed(0)
digits = load_digits()
order = np.random.default_rng(0).permutation(len(digits.target))
images, labels = digits.images[order] / 16, digits.target[order]


def rows(start, stop):
    return [{"x": images[i].astype("float32").ravel(), "labels": int(labels[i])} for i in range(start, stop)]


train, validation, test = rows(0, 200), rows(200, 700), rows(700, len(labels))""",
        """class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, x, labels=None):
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def accuracy(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}""",
        "# ## Train\n\nThe callback is given the trainer, the metric that decides, and the strategies to compare.",
        """arguments = TrainingArguments(
    "output",
    num_train_epochs=30,
    per_device_train_batch_size=20,
    learning_rate=0.02,
    lr_scheduler_type="constant",
    eval_strategy="epoch",
    save_strategy="no",
    logging_strategy="no",
    report_to="none",
    disable_tqdm=True,
    use_cpu=True,
)
model = Network()
trainer = Trainer(model, arguments, train_dataset=train, eval_dataset=validation, compute_metrics=accuracy)
callback = ASWACallback(trainer, metric="accuracy", strategies=("aswa", "swa", "ema", "best", "last"))
trainer.add_callback(callback)
trainer.remove_callback(PrinterCallback)  # which prints every log line
_ = trainer.train()""",
        "# ## What happened\n\nGray is the running model, blue the ensemble; below, the weight of each epoch in it.",
        """from IPython.display import HTML, Image

from aswa_hf.plotting import as_png, draw_trajectories

trajectories = {name: strategy.trajectory for name, strategy in callback.strategies.items()}
Image(as_png(draw_trajectories(trajectories, metric="accuracy", title="200 digits")), width=760)""",
        "# The same as an interactive picture: point at an epoch to see why it was decided as it was.",
        """from aswa_hf import interactive, style

look = f"<style>{style.css_colors('.shown')}{interactive.CSS}</style>"
HTML(f'{look}<div class="shown">{interactive.trajectory_svg(trajectories, metric="accuracy")}</div>')""",
        "# ## Test\n\nValidation chose the weights, so the test images say what they are worth.",
        """for name, strategy in callback.strategies.items():
    with strategy.swapped():
        found = trainer.evaluate(test, metric_key_prefix="test")["test_accuracy"]
    print(f"{name:5s} validation {strategy.score:.3f}   test {found:.3f}   {strategy.members} snapshots")""",
    ],
    "link_prediction": [
        "# Link prediction\n\nA knowledge graph of the world's countries: which are neighbors, and which region each "
        "lies in. ComplEx learns it, ASWA chooses its weights, and we ask for facts that were left out.",
        """from transformers import PrinterCallback, set_seed

from aswa_hf import ASWACallback, kge
from aswa_hf.kge import ComplEx, KGETrainer, LinkPredictor, answer_query, evaluate_link_prediction, load_kg

set_seed(0)
kg = load_kg("countries")
model = ComplEx(kg.config(dim=32))
print(kg.num_entities, "entities,", {split: len(kg[split]) for split in kg})""",
        """arguments = kge.paper_arguments("output", num_train_epochs=100, learning_rate=0.02, disable_tqdm=True)
trainer = KGETrainer(model, arguments, kg)
callback = ASWACallback(trainer, metric="mrr", strategies=("aswa", "swa", "ema", "best", "last"))
trainer.add_callback(callback)
trainer.remove_callback(PrinterCallback)  # which prints every log line
_ = trainer.train()""",
        """from IPython.display import HTML, Image

from aswa_hf.plotting import as_png, draw_trajectories

trajectories = {name: strategy.trajectory for name, strategy in callback.strategies.items()}
Image(as_png(draw_trajectories(trajectories, metric="MRR", title="ComplEx on Countries")), width=760)""",
        """for name, strategy in callback.strategies.items():
    with strategy.swapped():
        found = evaluate_link_prediction(model, kg, "test")["mrr"]
    print(f"{name:5s} validation MRR {strategy.score:.3f}   test MRR {found:.3f}   {strategy.members} snapshots")""",
        "# ## Ask\n\nAlbania's region is in the test split: the model has not seen it.",
        """predictor = LinkPredictor(model, kg.vocab, kg)
predictor.predict(head="albania", relation="locatedin", k=5)""",
        "# Questions of several hops are answered by beam search, with the steps that lead to each answer.",
        """answer_query(predictor, "2p: france, neighbor, locatedin", k=3, chains=True)""",
        "# The neighborhood of an entity: solid lines are in the graph, dashed ones predicted.",
        """from aswa_hf.hub import save_run
from aswa_hf.space.links import Links
from aswa_hf.space.render import CSS, neighborhood
from aswa_hf.space.source import open_source

saved = save_run(model, "run", callback.strategies, metric="mrr", processor=kg.vocab, dataset="countries")
links = Links(open_source(saved))
drawn = neighborhood("albania", links.neighborhood("albania"))
HTML(f'<style>{CSS}</style><div class="gradio-container">{drawn}</div>')""",
    ],
    "existing_checkpoints": [
        "# Checkpoints that already exist\n\nA run that knew nothing of ASWA left its checkpoints behind. Averaging "
        "them afterwards needs only a function that scores a model.",
        """from transformers import PrinterCallback, set_seed

from aswa_hf import average_checkpoints
from aswa_hf.kge import ComplEx, KGETrainer, evaluate_link_prediction, load_kg, paper_arguments

set_seed(0)
kg = load_kg("countries-s1")
arguments = paper_arguments(
    "output",
    num_train_epochs=200,
    learning_rate=0.02,
    eval_strategy="no",
    save_strategy="steps",
    save_steps=20,
    disable_tqdm=True,
)
trainer = KGETrainer(ComplEx(kg.config(dim=32)), arguments, kg)
trainer.remove_callback(PrinterCallback)  # which prints every log line
_ = trainer.train()""",
        """def validation_mrr(model):
    return evaluate_link_prediction(model, kg, "validation")["mrr"]


result = average_checkpoints("output", validation_mrr, output="averaged")
for name, alpha, record in zip(result.checkpoints, result.alphas, result.trajectory, strict=True):
    print(f"{name:15s} alpha {alpha:.2f}   {record.decision.value:6s}   ensemble {record.score:.4f}")""",
        "# The decisions as a picture: the running model is each checkpoint, the ensemble the average so far.",
        """from IPython.display import Image

from aswa_hf.plotting import as_png, draw_trajectories

Image(as_png(draw_trajectories({"aswa": result.trajectory}, metric="MRR", title="Ten checkpoints")), width=760)""",
        "# ## On the test split\n\nBeside the best and the last checkpoint, and the uniform mean of all.",
        """from aswa_hf.kge import KGEModel


def test_mrr(folder):
    return evaluate_link_prediction(KGEModel.from_pretrained(folder), kg, "test")["mrr"]


average_checkpoints("output", strategy="uniform", output="uniform")
best = max(result.trajectory, key=lambda record: record.running_score)
for name, folder in {
    "ASWA": "averaged",
    "uniform mean": "uniform",
    "best checkpoint": f"output/{result.checkpoints[best.index]}",
    "last checkpoint": f"output/{result.checkpoints[-1]}",
}.items():
    print(f"{name:16s} test MRR {test_mrr(folder):.3f}")""",
    ],
}


def notebook(name: str) -> nbformat.NotebookNode:
    """Returns a notebook without results."""
    cells = [
        nbformat.v4.new_markdown_cell(text.removeprefix("# ") if text.startswith("# ## ") else _plain(text))
        if text.startswith("# ")
        else nbformat.v4.new_code_cell(text)
        for text in NOTEBOOKS[name]
    ]
    for number, cell in enumerate(cells):
        cell["id"] = f"{name}-{number}"
    about = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return nbformat.v4.new_notebook(cells=cells, metadata=about)


def _plain(text: str) -> str:
    """A first cell has a heading; others that begin with one # are text."""
    return text if "\n\n" in text else text.removeprefix("# ")


def run(found: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Runs a notebook in a temporary folder, and removes what differs from run to run: messages and times."""
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        NotebookClient(found, timeout=600, kernel_name="python3", resources=resources).execute()
    for cell in found.cells:
        if cell.cell_type == "code":
            cell.metadata.pop("execution", None)
            cell.outputs = [
                output for output in cell.outputs if output.output_type != "stream" or output.name != "stderr"
            ]
    found.metadata.pop("language_info", None)
    return found


def main() -> None:
    names = [name for name in sys.argv[1:] if not name.startswith("-")] or list(NOTEBOOKS)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in names:
        found = notebook(name) if "--no-run" in sys.argv else run(notebook(name))
        nbformat.write(found, FOLDER / f"{name}.ipynb")


if __name__ == "__main__":
    main()
