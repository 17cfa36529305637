"""The README's code runs as it stands."""

import re

import pytest
import torch
from places import ROOT
from torch import nn
from training import ConvNet, accuracy, image_data, make_trainer
from transformers import Trainer

README = ROOT / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def test_the_readme_is_short_and_its_first_screen_has_picture_and_code():
    lines = README.read_text(encoding="utf-8").splitlines()
    assert len(lines) < 150
    first = "\n".join(lines[:32])
    assert all(part in first for part in ("docs/rates.png", "trainer.add_callback", "make demo", "make test"))


def block(mark: str) -> str:
    """The one block of code that contains `mark`."""
    (found,) = [code for code in BLOCKS if mark in code]
    return found


def test_the_callback_in_five_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(Trainer, "push_to_hub", lambda self: self.save_model(tmp_path / "pushed"))
    names = {
        "Trainer": Trainer,
        "model": ConvNet(),
        "args": make_trainer("conv", tmp_path, num_train_epochs=2).args,
        "train": image_data(48, seed=1),
        "validation": image_data(32, seed=2),
        "metrics": accuracy,
    }
    exec(block("trainer.push_to_hub()"), names)
    assert names["trainer"].state.epoch == 2
    assert any("eval_aswa_accuracy" in log for log in names["trainer"].state.log_history)
    assert (tmp_path / "pushed" / "model.safetensors").exists()


def test_the_loop_in_three_lines():
    model = nn.Linear(1, 1, bias=False)
    seen = []

    def train_one_epoch(model):
        with torch.no_grad():
            model.weight.fill_(len(seen))
        seen.append(model.weight.item())

    def validate(model):
        return -abs(model.weight.item() - 1.5)

    names = {"model": model, "epochs": 4, "train_one_epoch": train_one_epoch, "validate": validate}
    exec(block("aswa.apply()"), names)
    # 0, then 1 is better (hard), then the mean of 1 and 2 is best, and 3 is rejected.
    assert names["aswa"].alphas == [0, 0.5, 0.5, 0]
    assert model.weight.item() == 1.5


def test_link_prediction(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(block("LinkPredictor(model"), names)
    assert names["trainer"].state.epoch == 100
    model, vocab = names["model"], names["kg"].vocab
    head, relation, tail, score, rank = capsys.readouterr().out.split()[-5:]
    assert (head, relation, rank) == ("albania", "locatedin", "1")
    # No entity scores higher than the answer.
    question = torch.tensor([vocab.entity_id(head)]), torch.tensor([vocab.relation_id(relation)])
    with torch.no_grad():
        scores = model.eval().score_tails(*question)[0]
    assert [scores[vocab.entity_id(tail)].item(), scores.max().item()] == pytest.approx([float(score)] * 2, rel=1e-4)
