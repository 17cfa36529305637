"""Every decision with its scores, and the picture of all of them, in the Trainer's reporters."""

import uuid

import pytest
from training import make_trainer, with_aswa

SCALARS = {"decision", "members", "running_score", "lookahead_score", "score"}
pytestmark = [pytest.mark.pictures, pytest.mark.filterwarnings("default")]


def reported_run(folder, reporter, monkeypatch, **options):
    """A run of two epochs, and ASWA's records."""
    monkeypatch.setenv("TRACKIO_DIR", str(folder / "trackio"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(folder))
    trainer = make_trainer(
        "conv", folder / "run", num_train_epochs=2, save_strategy="no", report_to=reporter, **options
    )
    callback = with_aswa(trainer)
    trainer.train()
    return callback.strategies["aswa"].trajectory


def test_tensorboard_has_every_decision_and_the_picture(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "logs"))
    records = reported_run(tmp_path, "tensorboard", monkeypatch)
    (file,) = tmp_path.rglob("events.out.tfevents.*")
    events = EventAccumulator(str(file.parent))
    events.Reload()
    found = {
        tag.removeprefix("train/aswa/"): events.Scalars(tag) for tag in events.Tags()["scalars"] if "/aswa/" in tag
    }
    assert found.keys() == SCALARS
    assert [event.step for event in found["decision"]] == [6, 12]
    assert [event.value for event in found["decision"]] == [record.decision.code for record in records]
    for name in ("running_score", "score"):
        assert [e.value for e in found[name]] == pytest.approx([getattr(record, name) for record in records])
    assert [event.value for event in found["lookahead_score"]] == pytest.approx([records[1].lookahead_score])
    assert events.Tags()["images"] == ["aswa/trajectory"]
    assert events.Images("aswa/trajectory")[0].width > 100


def test_trackio_has_every_decision_and_the_picture(tmp_path, monkeypatch):
    # It is read at the first import; if that was earlier, the name of the project keeps other runs apart.
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    project = f"aswa-{uuid.uuid4().hex}"
    records = reported_run(
        tmp_path, "trackio", monkeypatch, project=project, run_name="one", trackio_static_space_id=False
    )
    logs = SQLiteStorage.get_logs(project, "one")
    decided = [row for row in logs if any(key.endswith("aswa/decision") for key in row)]
    assert len(decided) == 2
    for row, record in zip(decided, records, strict=True):
        found = {key.split("aswa/")[-1]: value for key, value in row.items() if "aswa/" in key}
        assert found["decision"] == record.decision.code
        assert found["score"] == pytest.approx(record.score)
    assert any("aswa/trajectory" in row for row in logs)


def test_wandb_offline_has_every_decision_and_the_picture(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    records = reported_run(tmp_path, "wandb", monkeypatch)
    found = dict(wandb.run.summary)
    wandb.finish()
    assert found["train/aswa/decision"] == records[-1].decision.code
    assert found["train/aswa/score"] == pytest.approx(records[-1].score)
    assert "aswa/trajectory" in found


def test_a_reporter_that_fails_is_a_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter.add_image", lambda *args, **options: 1 / 0)
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "logs"))
    with caplog.at_level("WARNING"):
        records = reported_run(tmp_path, "tensorboard", monkeypatch)
    assert len(records) == 2
    assert "TensorBoardCallback did not take trajectory.png: ZeroDivisionError" in caplog.text
