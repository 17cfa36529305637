"""Run folders for applications, written without training."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from kge_graphs import write_graph

from aswa_hf.kge import ComplEx, load_kg
from aswa_hf.trajectory import Decision, Record, Trajectory, save_trajectories

HOSTILE = "<img src=x onerror=alert(1)>"
LONG = "a very long label " * 20
DECISIONS = ["init", "hard", "soft", "soft", "reject", "hard", "soft", "reject"]


def trajectory(decisions=DECISIONS) -> Trajectory:
    records, members, score = Trajectory(), 0, 0.1
    for index, name in enumerate(decisions):
        members = {"init": 1, "hard": 1, "soft": members + 1, "reject": members}[name]
        score = score if name == "reject" else round(score + 0.05, 4)
        running = score if name in ("init", "hard") else score - 0.02
        lookahead = None if name == "init" else score if name == "soft" else score - 0.01
        records.append(Record(index, 10 * index, index + 1.0, running, lookahead, score, members, Decision(name)))
    return records


def write_history(folder: Path, metric: str, dataset: str, model: str) -> None:
    found = trajectory()
    results = {"aswa": {"validation": {metric: 0.35}, "test": {metric: 0.3}}, "last": {"test": {metric: 0.2}}}
    about = {"task": "link-prediction", "dataset": dataset, "model": model, "strategies": results}
    save_trajectories(
        folder / "aswa_trajectory.json",
        {"aswa": found},
        metric=metric,
        greater_is_better=True,
        applied="aswa",
        run=about,
    )


def link_run(folder: Path) -> Path:
    """A link predictor over labels of which some are hostile; a likes b and then c, with certainty."""
    triples = {
        "train": [("a", "likes", "b"), ("b", "likes", "c"), ("c", "knows", "a"), (HOSTILE, "likes", LONG.strip())],
        "valid": [("a", "likes", "c")],
        "test": [("b", "knows", "a")],
    }
    kg = load_kg(write_graph(folder.parent / "graph", triples))
    torch.manual_seed(0)
    model = ComplEx(kg.config(dim=8))
    model.save_pretrained(folder)
    kg.vocab.save_pretrained(folder)
    settings = {"dataset": {"name": "graph", "source": str(folder.parent / "graph")}, "model": "complex"}
    (folder / "settings.json").write_text(json.dumps(settings))
    write_history(folder, "mrr", "graph", "complex")
    return folder


def image_run(folder: Path) -> Path:
    """A classifier of digits with new weights."""
    from aswa_hf.vision import timm_classifier

    torch.manual_seed(0)
    model = timm_classifier("preresnet20_cifar", [str(i) for i in range(10)], channels=1, size=16)
    model.save_pretrained(folder)
    write_history(folder, "accuracy", "digits", "preresnet20_cifar")
    return folder


def adapter_run(folder: Path) -> Path:
    """A tiny language model with two adapters: the averaged one, and a running one in its last checkpoint."""
    from peft import LoraConfig, get_peft_model
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ["<unk>", "<pad>", "the", "cat", "sat", "on", "a", "mat", "and", "then", "it", "ran", "off"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    base = folder.parent / "base"
    torch.manual_seed(0)
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(words), max_position_embeddings=64, eos_token_id=None, **size)
    model = LlamaForCausalLM(config)
    model.save_pretrained(base)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>").save_pretrained(base)
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    adapted = get_peft_model(LlamaForCausalLM.from_pretrained(base), lora)
    for place, seed in ((folder, 1), (folder / "checkpoint-5", 2)):
        torch.manual_seed(seed)
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_" in name:
                    parameter.normal_()
        adapted.save_pretrained(place)
    write_history(folder, "eval_loss", "words", "LlamaForCausalLM")
    return folder
