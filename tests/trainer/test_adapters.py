"""Adapters: averages hold them alone, and what a run writes is an ordinary adapter."""

import gc
import json

import pytest
import torch
from language import causal_config, causal_model, make_trl, saved_base, tokenizer
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, EarlyStoppingCallback, LlamaForCausalLM, TrainerCallback

from aswa_hf import ASWACallback
from aswa_hf.hub.card import read_card_data, render

peft = pytest.importorskip("peft")
pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("default")  # of TRL, PEFT and what they import

PROMPT = torch.tensor([[3, 4, 5, 6]])
LORA = {"r": 2, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
KINDS = {
    "lora": lambda: peft.LoraConfig(**LORA),
    "dora": lambda: peft.LoraConfig(use_dora=True, **LORA),
    "ia3": lambda: peft.IA3Config(
        target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"
    ),
}


def logits(model):
    with torch.no_grad():
        return model.eval()(PROMPT).logits.float()


def followed(trainer, **options):
    trainer.add_callback(callback := ASWACallback(trainer, **options))
    trainer.train()
    return callback


@pytest.mark.parametrize(
    "kind", ["lora", pytest.param("dora", marks=pytest.mark.slow), pytest.param("ia3", marks=pytest.mark.slow)]
)
def test_the_ensemble_of_an_adapter_loads_with_peft_and_merges(kind, tmp_path):
    base = saved_base(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(base)
    trainer = make_trl("SFT", tmp_path / "run", model=model, trainer={"peft_config": KINDS[kind]()})
    callback = followed(trainer, metric="mean_token_accuracy", strategies=("aswa", "swa-all"), apply="swa-all")
    trainable = {name for name, p in trainer.model.named_parameters() if p.requires_grad}
    averaged = callback.strategies["swa-all"].average.averaged
    assert averaged.keys() == trainable
    assert callback.strategies["swa-all"].members == 3
    trainer.save_model()

    loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(tmp_path / "run"))
    for name, parameter in loaded.named_parameters():
        if name in averaged:
            assert torch.equal(parameter, averaged[name]), name
    torch.testing.assert_close(logits(loaded), logits(trainer.model))
    torch.testing.assert_close(logits(loaded.merge_and_unload()), logits(trainer.model), atol=1e-5, rtol=1e-4)
    assert AutoTokenizer.from_pretrained(tmp_path / "run").chat_template == tokenizer().chat_template


def test_the_card_of_an_adapter_names_its_base_model_and_loads_with_peft(tmp_path):
    trainer = make_trl("SFT", tmp_path, num_train_epochs=1, trainer={"peft_config": KINDS["lora"]()})
    followed(trainer)
    trainer.save_model()
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "me/base"}))
    card = render(read_card_data(tmp_path, "me/adapter"))
    assert card.data.base_model == "me/base"
    assert card.data.library_name == "peft"
    lines = [
        "from peft import PeftModel",
        "from transformers import AutoModelForCausalLM",
        "",
        'base_model = AutoModelForCausalLM.from_pretrained("me/base")',
        'model = PeftModel.from_pretrained(base_model, "me/adapter")',
    ]
    assert "\n".join(lines) in card.text
    # A folder of this machine is not a name on the Hub.
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": str(tmp_path)}))
    card = render(read_card_data(tmp_path, "me/adapter"))
    assert card.data.base_model is None
    assert f'base_model = AutoModelForCausalLM.from_pretrained("path/to/{tmp_path.name}")' in card.text
    assert str(tmp_path) not in card.content


def storage_bytes():
    """The memory of all tensors that are alive."""
    found = {}
    for thing in gc.get_objects():
        # Compiled models of other tests leave tensors of other classes, which have no memory.
        if type(thing) in (torch.Tensor, nn.Parameter) and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def test_at_most_two_copies_of_the_adapter_are_kept_even_while_averaged_weights_are_evaluated(tmp_path, monkeypatch):
    trainer = make_trl("SFT", tmp_path, trainer={"peft_config": peft.LoraConfig(r=16, target_modules="all-linear")})
    adapter = sum(p.nbytes for p in trainer.model.parameters() if p.requires_grad)
    base = sum(p.nbytes for p in trainer.model.parameters() if not p.requires_grad)
    assert adapter > base / 2  # large enough to be seen
    trainer.add_callback(callback := ASWACallback(trainer, hard_updates=False))
    measured = {False: [], True: []}
    evaluate = trainer.evaluate

    def evaluating(*args, **options):
        gc.collect()
        strategy = callback.strategies["aswa"]
        measured[strategy.average.is_in_model].append(storage_bytes() - strategy.nbytes)
        return evaluate(*args, **options)

    monkeypatch.setattr(trainer, "evaluate", evaluating)
    trainer.train()
    assert len(measured[True]) == 2
    # The average itself is one copy. The other is that of the running weights, while averaged ones are in the model.
    assert callback.strategies["aswa"].nbytes == adapter
    # Beside them there are random states, to be restored.
    assert max(measured[True]) - measured[False][-1] <= adapter + 3 * torch.get_rng_state().nbytes


def test_only_the_active_one_of_several_adapters_is_averaged_and_the_others_stay(tmp_path):
    model = peft.get_peft_model(causal_model(), peft.LoraConfig(**LORA), adapter_name="first")
    model.add_adapter("second", peft.LoraConfig(**LORA | {"r": 3}))
    model.set_adapter("second")
    before = {n: p.detach().clone() for n, p in model.named_parameters() if ".first." in n}
    trainer = make_trl("SFT", tmp_path, model=model)
    callback = followed(trainer)
    averaged = callback.strategies["aswa"].average.averaged
    assert averaged
    assert all(".second." in name for name in averaged)
    parameters = dict(trainer.model.named_parameters())
    assert all(torch.equal(parameters[name], tensor) for name, tensor in before.items())
    trainer.save_model()
    loaded = peft.PeftModel.from_pretrained(causal_model(), str(tmp_path / "second"))
    torch.testing.assert_close(logits(loaded), logits(trainer.model))


class Int8Linear(nn.Module):
    """A frozen linear layer of whole numbers: what quantization leaves of a base model."""

    def __init__(self, linear):
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.weight = nn.Parameter((linear.weight.detach() / scale).round().to(torch.int8), requires_grad=False)

    def forward(self, x):
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale)


class Quantized(LlamaForCausalLM):
    """A causal model with a frozen int8 projection beside the adapted ones."""

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.o_proj = Int8Linear(layer.self_attn.o_proj)


def test_a_quantised_frozen_base_is_neither_averaged_nor_changed(tmp_path):
    torch.manual_seed(0)
    trainer = make_trl("SFT", tmp_path, model=Quantized(causal_config()), trainer={"peft_config": KINDS["lora"]()})
    frozen = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if not p.requires_grad}
    assert any(tensor.dtype is torch.int8 for tensor in frozen.values())
    callback = followed(trainer, strategies=("aswa", "dense-aswa", "ema"))
    assert all("lora_" in name for s in callback.strategies.values() for name in s.average.averaged)
    parameters = dict(trainer.model.named_parameters())
    assert all(torch.equal(parameters[name], tensor) for name, tensor in frozen.items())


def test_a_base_in_eight_bits_of_bitsandbytes_is_followed(tmp_path):
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    base = saved_base(tmp_path)
    config = BitsAndBytesConfig(load_in_8bit=True)
    try:
        model = AutoModelForCausalLM.from_pretrained(base, quantization_config=config)
        logits(model)
    except (ImportError, RuntimeError, NotImplementedError, ValueError) as error:
        pytest.skip(f"bitsandbytes does not run here: {error}")
    assert any(p.dtype is torch.int8 for p in model.parameters())
    trainer = make_trl("SFT", tmp_path / "run", model=model, trainer={"peft_config": KINDS["lora"]()})
    callback = followed(trainer)
    assert all("lora_" in name for name in callback.strategies["aswa"].average.averaged)
    trainer.save_model()
    base_again = AutoModelForCausalLM.from_pretrained(base, quantization_config=config)
    loaded = peft.PeftModel.from_pretrained(base_again, str(tmp_path / "run"))
    torch.testing.assert_close(logits(loaded), logits(trainer.model), atol=1e-2, rtol=1e-2)


class Keep(TrainerCallback):
    """Keeps the running weights of every epoch."""

    def __init__(self):
        self.seen = []

    def on_epoch_end(self, args, state, control, model=None, **kwargs):
        self.seen.append(model.lm_head.weight.detach().clone())


def test_bfloat16_weights_have_a_float32_average(tmp_path):
    trainer = make_trl("SFT", tmp_path, model=causal_model(torch.bfloat16))
    trainer.add_callback(keep := Keep())
    callback = followed(trainer, strategies=("swa-all",), apply="swa-all")
    average = callback.strategies["swa-all"].average.averaged["lm_head.weight"]
    assert [weights.dtype for weights in keep.seen] == [torch.bfloat16] * 3
    assert average.dtype is torch.float32
    torch.testing.assert_close(average, torch.stack(keep.seen).float().mean(0))
    assert not torch.equal(average, average.bfloat16().float())
    assert torch.equal(trainer.model.lm_head.weight, average.bfloat16())


def test_the_best_adapter_and_early_stopping_may_follow_the_ensemble(tmp_path):
    trainer = make_trl(
        "SFT", tmp_path, num_train_epochs=8, save_strategy="epoch", load_best_model_at_end=True, save_total_limit=1,
        metric_for_best_model="aswa_loss", greater_is_better=False, learning_rate=0.3,
        trainer={"peft_config": KINDS["lora"](), "callbacks": [EarlyStoppingCallback(2)]},
    )  # fmt: skip
    callback = followed(trainer)
    aswa = callback.strategies["aswa"]
    assert callback.applied == "aswa"
    assert trainer.state.best_metric == pytest.approx(aswa.score)
    # It stops two evaluations after the ensemble's last improvement, or at the end.
    last = max(i for i, record in enumerate(aswa.trajectory) if record.decision.value != "reject")
    assert len(aswa.trajectory) == min(8, last + 3)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(aswa.score, rel=1e-4)


@pytest.mark.slow
def test_a_compiled_adapter_is_followed(tmp_path):
    trainer = make_trl("SFT", tmp_path, torch_compile=True, trainer={"peft_config": KINDS["lora"]()})
    callback = followed(trainer, strategies=("aswa", "ema"))
    assert all("lora_" in n and "_orig_mod" not in n for n in callback.strategies["aswa"].average.averaged)
    trainer.save_model()
    loaded = peft.PeftModel.from_pretrained(causal_model(), str(tmp_path))
    torch.testing.assert_close(logits(loaded), logits(trainer.model), atol=1e-4, rtol=1e-3)
