"""Training of link predictors through the Trainer, with and without the callback."""

import math

import numpy as np
import pytest
import torch
from kge_graphs import random_graph
from training import assert_same_tensors, weights_of
from transformers import AutoModel, TrainerCallback, TrainerControl

from aswa_hf import ASWACallback
from aswa_hf.kge import ComplEx, DistMult, KGEConfig, KGETrainer, evaluate_link_prediction, paper_arguments
from aswa_hf.kge.graph import with_inverses
from aswa_hf.kge.training import KvsAll, NegativeSampling, OneVsAll, training_examples


def make_trainer(kg, folder, cls=ComplEx, scheme="kvsall", model_options=None, **options):
    torch.manual_seed(5)
    config = KGEConfig(num_entities=kg.num_entities, num_relations=kg.num_relations, dim=16, **(model_options or {}))
    arguments = {"num_train_epochs": 6, "per_device_train_batch_size": 16, "disable_tqdm": True, "use_cpu": True}
    return KGETrainer(cls(config), paper_arguments(str(folder), **(arguments | options)), kg, scheme=scheme)


def test_a_kvsall_batch_holds_all_tails_of_its_queries(tmp_path):
    kg = random_graph(tmp_path)
    triples = with_inverses(kg.triples("train"), kg.num_relations)
    examples = KvsAll(triples)
    batch = examples.__getitems__([3, 0, 7])
    for i in range(3):
        h, r = batch["heads"][i].item(), batch["relations"][i].item()
        tails = batch["labels"][batch["label_offsets"][i] : batch["label_offsets"][i + 1]]
        assert set(tails.tolist()) == {t for a, b, t in triples.tolist() if (a, b) == (h, r)}
    assert len(examples) == len({(h, r) for h, r, _ in triples.tolist()})


def test_the_other_schemes_hold_one_triple_each(tmp_path):
    kg = random_graph(tmp_path)
    triples = kg.triples("train")
    batch = OneVsAll(triples).__getitems__([4, 2])
    assert torch.stack([batch["heads"], batch["relations"], batch["labels"]], 1).tolist() == triples[[4, 2]].tolist()
    batch = NegativeSampling(triples, kg.num_entities, negatives=5).__getitems__([4, 2])
    assert batch["tails"].shape == batch["labels"].shape == (2, 6)
    assert batch["tails"][:, 0].tolist() == triples[[4, 2], 2].tolist()
    assert batch["labels"].tolist() == [[1, 0, 0, 0, 0, 0]] * 2
    with pytest.raises(ValueError, match="scheme must be one of kvsall, 1vsall, negative_sampling, got 'all'"):
        training_examples(kg, "all", inverses=True)


def recorded_batches(model):
    """A list that will hold the batches the model is trained on."""
    seen = []
    model.register_forward_pre_hook(lambda module, args, batch: seen.append(batch), with_kwargs=True)
    return seen


def plain_loss(model, scheme, batch, dense):
    """The loss of a batch, with the labels of all entities from the table `dense`."""
    heads, relations, functional = batch["heads"], batch["relations"], torch.nn.functional
    if scheme == "negative_sampling":
        scores = model.score(heads, relations, batch["tails"])
        return functional.binary_cross_entropy_with_logits(scores, batch["labels"].double())
    scores = model.score_tails(heads, relations)
    if scheme == "1vsall":
        return functional.cross_entropy(scores, batch["labels"])
    return functional.binary_cross_entropy_with_logits(scores, dense[heads, relations])


@pytest.mark.parametrize("scheme", ["kvsall", "1vsall", "negative_sampling"])
@pytest.mark.parametrize("inverse_relations", [True, False])
def test_every_scheme_learns_the_training_triples_as_a_plain_loop_does(scheme, inverse_relations, tmp_path):
    kg = random_graph(tmp_path / "graph")
    options = {"num_train_epochs": 3, "learning_rate": 0.01, "eval_strategy": "no"}
    model_options = {"inverse_relations": inverse_relations}
    trainer = make_trainer(kg, tmp_path, scheme=scheme, model_options=model_options, **options)
    trainer.model.double()  # what the order of a sum changes then is far below the tolerance, also after many steps
    model = ComplEx(trainer.model.config).double()
    model.load_state_dict(trainer.model.state_dict())
    batches = recorded_batches(trainer.model)
    trainer.train()

    triples = kg.triples("train")
    if inverse_relations:
        triples = with_inverses(triples, kg.num_relations)
    dense = torch.zeros(kg.num_entities, 2 * kg.num_relations, kg.num_entities, dtype=torch.float64)
    dense[tuple(torch.from_numpy(triples).T)] = 1
    epoch = batches[: len(batches) // 3]
    seen = [torch.cat([batch[name] for batch in epoch]) for name in ("heads", "relations")]
    if scheme == "kvsall":
        assert sorted(zip(*map(torch.Tensor.tolist, seen), strict=True)) == sorted({(h, r) for h, r, _ in triples})
    else:
        tails = [batch["tails"][:, 0] if scheme == "negative_sampling" else batch["labels"] for batch in epoch]
        assert sorted(torch.stack([*seen, torch.cat(tails)], 1).tolist()) == sorted(triples.tolist())

    def loss_of_the_epoch():
        with torch.no_grad():
            return sum(plain_loss(model, scheme, batch, dense) for batch in epoch)

    before = loss_of_the_epoch()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for batch in batches:
        optimizer.zero_grad()
        plain_loss(model, scheme, batch, dense).backward()
        optimizer.step()
    assert loss_of_the_epoch() < before
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(trainer.model.state_dict()[name], tensor, rtol=1e-6, atol=1e-8)


def test_the_callback_follows_mrr_and_checkpoints_hold_the_vocabulary(tmp_path):
    kg = random_graph(tmp_path / "graph", entities=30, triples=200)
    trainer = make_trainer(kg, tmp_path / "run", save_strategy="epoch")
    callback = ASWACallback(trainer, metric="mrr", strategies=("aswa", "best", "last"))
    trainer.add_callback(callback)
    trainer.train()
    aswa = callback.strategies["aswa"]
    assert len(aswa.trajectory) == 6
    assert aswa.score == pytest.approx(evaluate_link_prediction(trainer.model, kg, "validation")["mrr"])
    running = [log["eval_mrr"] for log in trainer.state.log_history if "eval_mrr" in log]
    assert [record.running_score for record in aswa.trajectory] == running
    assert sum("eval_aswa_hits@10" in log for log in trainer.state.log_history) == 6

    trainer.save_model()
    loaded = AutoModel.from_pretrained(tmp_path / "run")
    assert_same_tensors(weights_of(loaded), weights_of(trainer.model))
    checkpoint = next((tmp_path / "run").glob("checkpoint-*"))
    assert type(kg.vocab).from_pretrained(checkpoint).entities == kg.vocab.entities


def test_test_split_and_metric_prefix(tmp_path):
    kg = random_graph(tmp_path / "graph")
    trainer = make_trainer(kg, tmp_path)
    metrics = trainer.evaluate("test", metric_key_prefix="test")
    expected = evaluate_link_prediction(trainer.model, kg, "test")
    assert {name: metrics[f"test_{name}"] for name in expected} == expected


def test_a_model_of_another_graph_is_refused(tmp_path):
    kg = random_graph(tmp_path / "graph")
    model = DistMult(KGEConfig(num_entities=5, num_relations=1, dim=4))
    with pytest.raises(ValueError, match="The model has 5 entities and 1 relations, the graph 12 and 3"):
        KGETrainer(model, paper_arguments(str(tmp_path)), kg)


def test_a_logged_loss_is_the_mean_of_some_of_its_steps(tmp_path, monkeypatch):
    kg = random_graph(tmp_path / "graph")

    def train(at_least):
        """The logged losses, those of the single steps, and the weights at the end."""
        monkeypatch.setattr("aswa_hf.kge.training.LOSSES_PER_LOG", at_least)
        options = {"per_device_train_batch_size": 4, "num_train_epochs": 3, "learning_rate": 1e-3}
        trainer = make_trainer(kg, tmp_path, **options)
        losses = []
        trainer.model.register_forward_hook(lambda module, args, output: losses.append(output.loss.item()))
        trainer.train()
        return [row["loss"] for row in trainer.state.log_history if "loss" in row], losses, weights_of(trainer.model)

    all_logged, losses, all_weights = train(10**6)
    some_logged, measured, some_weights = train(5)
    per_epoch = len(losses) // 3
    every = per_epoch // 5
    assert every > 1
    for epoch in range(3):
        of_epoch = losses[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert all_logged[epoch] == pytest.approx(np.mean(of_epoch), rel=1e-5)
        # Every so many steps the loss is measured, and repeated until the next time.
        repeated = [of_epoch[step - step % every] for step in range(per_epoch)]
        assert some_logged[epoch] == pytest.approx(np.mean(repeated), rel=1e-5)
    steps = range(3 * per_epoch)
    assert [math.isfinite(loss) for loss in measured] == [step % per_epoch % every == 0 for step in steps]
    assert_same_tensors(all_weights, some_weights)


def test_a_length_given_in_steps_measures_losses_as_often(tmp_path):
    trainer = make_trainer(random_graph(tmp_path / "graph"), tmp_path, max_steps=40, num_train_epochs=1)
    per_epoch = len(trainer.get_train_dataloader())
    trainer.train()
    assert trainer._measure_every == max(1, per_epoch // 8)


def test_a_callback_can_stop_the_training_at_an_evaluation(tmp_path):
    class Stop(TrainerCallback):
        def on_evaluate(self, args, state, control, **kwargs):
            return TrainerControl(should_training_stop=True)

    trainer = make_trainer(random_graph(tmp_path / "graph"), tmp_path)
    trainer.add_callback(Stop())
    trainer.train()
    assert trainer.state.epoch == 1
    with pytest.raises(TypeError, match="takes the name of a split of the graph, got a Dataset"):
        trainer.evaluate(trainer.kg["test"])


def test_what_cannot_be_trained_on_is_refused(tmp_path):
    kg = random_graph(tmp_path / "graph")
    with pytest.raises(ValueError, match="dispatch_batches"):
        make_trainer(kg, tmp_path, accelerator_config={"dispatch_batches": True})
    kg["train"] = kg["train"].select([])
    with pytest.raises(ValueError, match="The split 'train' has no triples to learn from"):
        make_trainer(kg, tmp_path)
