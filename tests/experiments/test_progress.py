"""What a run shows: a bar with the best score on a terminal, and lines alone in a file."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from aswa_hf.experiments.progress import OnStep, decisions_shown
from aswa_hf.trajectory import Decision


class Run:
    """A Trainer as far as the bar sees it, and the callback that follows it."""

    def __init__(self, greater_is_better=True):
        self.args = SimpleNamespace(num_train_epochs=3)
        self.callback_handler = SimpleNamespace(callbacks=[])
        self.add_callback = self.callback_handler.callbacks.append
        self.trajectory = []
        self.callback = SimpleNamespace(
            strategies={"swa": SimpleNamespace(trajectory=self.trajectory)},
            score=SimpleNamespace(label="mrr"),
            greater_is_better=greater_is_better,
        )

    def remove_callback(self, callback):
        if callback in self.callback_handler.callbacks:
            self.callback_handler.callbacks.remove(callback)

    def decide(self, score, epoch=None):
        index = len(self.trajectory)
        record = SimpleNamespace(index=index, epoch=epoch, decision=Decision.SOFT, score=score, running_score=score)
        self.trajectory.append(record)
        for callback in list(self.callback_handler.callbacks):
            callback.on_evaluate(None, SimpleNamespace(global_step=index + 1, max_steps=3), None)


@pytest.mark.parametrize(("greater_is_better", "expected"), [(True, [25, 50, 50, 50]), (False, [25, 25, 12.5, 12.5])])
def test_the_bar_names_the_best_score_so_far(greater_is_better, expected):
    run, words = Run(greater_is_better), []
    run.add_callback(OnStep(lambda done, total: None, words.append))
    with decisions_shown(run, run.callback, Console(file=io.StringIO())):
        for score in (None, 0.25, 0.5, 0.125, float("nan")):
            run.decide(score)
    assert words == [f", best mrr {value:.2f} %" for value in expected]


def test_a_file_gets_lines_without_a_bar():
    run, file = Run(), io.StringIO()
    with decisions_shown(run, run.callback, Console(file=file)):
        run.decide(0.25)
        run.decide(0.5, epoch=3.0)  # not every epoch ends with a decision
    assert file.getvalue().splitlines() == [
        "epoch 1   mrr (%): running  25.00   ensemble  25.00   soft",
        "epoch 3   mrr (%): running  50.00   ensemble  50.00   soft",
    ]
