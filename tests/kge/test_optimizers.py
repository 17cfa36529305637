"""Optimizers for embedding tables: their arithmetic, and that runs find them by name."""

import pytest
import torch
from transformers import Trainer

from aswa_hf.experiments import KGERun, train_kge
from aswa_hf.kge import paper_arguments
from aswa_hf.kge.optimizers import RowwiseAdagrad, optimizer_of


def test_a_row_has_one_sum():
    table = torch.nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
    optimizer = RowwiseAdagrad([table], lr=0.5)
    gradients = [
        torch.tensor([[1.0, 7.0], [0.0, 0.0], [2.0, 2.0]]),
        torch.tensor([[0.0, 0.0], [0.0, 0.0], [4.0, 0.0]]),
    ]
    for gradient in gradients:
        table.grad = gradient
        optimizer.step()
    # The means of squares: 25 and 4 in the first step, 8 in the second.
    expected = torch.tensor([[0.9, 1.3], [3.0, 4.0], [4.5 - 2 / 12**0.5, 5.5]])
    torch.testing.assert_close(table.detach(), expected)
    assert optimizer.state[table]["sum"].tolist() == [25.0, 0.0, 12.0]


def test_weight_decay_is_added_to_the_gradient_and_cores_have_rows_too():
    core = torch.nn.Parameter(torch.ones(2, 3, 4))
    optimizer = RowwiseAdagrad([core], lr=0.1, weight_decay=0.5)
    core.grad = torch.zeros_like(core)
    optimizer.step()  # the gradient is 0.5 everywhere, so is the root of its mean square
    torch.testing.assert_close(core.detach(), torch.full((2, 3, 4), 0.9))


@pytest.mark.parametrize(
    ("name", "expected"),
    [("adamw", 1 - 0.1 * 0.5), ("adam", 1 - 0.1), ("adagrad", 1 - 0.1), ("adagrad-rowwise", 1 - 0.1)],
)
def test_weight_decay_is_decoupled_in_adamw_and_part_of_the_gradient_elsewhere(name, expected, tmp_path):
    """Without any other gradient, a step is 1 − lr·decay for AdamW and −lr for those that scale their gradients."""
    model = torch.nn.Embedding(2, 3)
    torch.nn.init.ones_(model.weight)
    args = paper_arguments(str(tmp_path), learning_rate=0.1, weight_decay=0.5, eval_strategy="no")
    trainer = Trainer(model, args, optimizer_cls_and_kwargs=optimizer_of(name, args))
    optimizer = trainer.create_optimizer()
    model.weight.grad = torch.zeros_like(model.weight)
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), torch.full((2, 3), expected))


def test_runs_find_every_optimizer_schedule_and_loss_by_name(tmp_path):
    """Each combination trains, and is resumed from its only checkpoint."""
    common = {"dataset": "countries", "dim": 8, "epochs": 4, "batch_size": 400, "strategies": ("aswa", "last")}
    runs = {
        "AdamW": {"optimizer": "adamw", "weight_decay": 0.1, "schedule": "linear", "loss": "softmax"},
        "Adagrad": {"optimizer": "adagrad", "schedule": "cosine", "loss": "softmax-query", "eval_every": 2},
        "RowwiseAdagrad": {
            "optimizer": "adagrad-rowwise",
            "schedule": "plateau",
            "scheme": "negative_sampling",
            "loss": "softmax",
            "negatives": 4,
            "shared_negatives": True,
            "regularizer": "n3",
            "regularization": 0.01,
            "relation_prediction": 0.1,
        },
    }
    for name, options in runs.items():
        folder = tmp_path / name
        finished = train_kge(KGERun(**common, **options), folder)
        decisions = finished.strategies["aswa"].trajectory
        assert [record.epoch for record in decisions] == ([2.0, 4.0] if name == "Adagrad" else [1.0, 2.0, 3.0, 4.0])
        saved = torch.load(next(folder.glob("checkpoint-*/optimizer.pt")), weights_only=True)
        keys = {"AdamW": "exp_avg", "Adagrad": "sum", "RowwiseAdagrad": "sum"}
        tables = [state[keys[name]] for state in saved["state"].values()]
        assert [table.dim() for table in tables] == [1 if name == "RowwiseAdagrad" else 2] * 2
        assert finished.model.config.loss == options["loss"]
