"""A language model with adapters: the averaged weights beside those of the running model."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch

from aswa_hf._utils.files import read_object
from aswa_hf._utils.pretrained import load_strictly
from aswa_hf._utils.tensors import load_tensors
from aswa_hf.run_folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS, checkpoints
from aswa_hf.space.source import Reloading, Source, in_memory

AVERAGED, RUNNING = "averaged", "running"
BASE = "base"  # the folder of the base model inside of a Space
MAX_TEXT, MAX_TOKENS = 8000, 256  # characters of a prompt, tokens of an answer


class Texts:
    """A base model with two adapters, one of them active at a time."""

    def __init__(self, source: Source):
        self.source = source
        self._lock = threading.Lock()  # which adapter is active is a state of the one model
        self._loaded = Reloading(self._load, [source.folder / ADAPTER_WEIGHTS, source.folder / ADAPTER_CONFIG])

    def _load(self) -> tuple[Any, Any, list[str]]:
        from peft import PeftModel
        from transformers import AutoModelForCausalLM, AutoTokenizer

        folder = self.source.folder
        base = base_model(self.source)
        model = load_strictly(AutoModelForCausalLM, base, unexpected=True)
        tokens = next((place for place in (folder, base) if (Path(place) / "tokenizer_config.json").is_file()), base)
        tokenizer = AutoTokenizer.from_pretrained(tokens)
        if not (folder / ADAPTER_WEIGHTS).is_file():  # peft would open a pickle
            raise ValueError(f"{folder} has no {ADAPTER_WEIGHTS}.")
        model = PeftModel.from_pretrained(model, folder, adapter_name=AVERAGED)
        check_adapter(model, AVERAGED, folder)
        names = [AVERAGED]
        running = running_adapter(folder)
        if running is not None:
            model.load_adapter(running, RUNNING)
            check_adapter(model, RUNNING, running)
            names.append(RUNNING)
        return in_memory(model.eval()), tokenizer, names

    @property
    def adapters(self) -> list[str]:
        """The available adapters: the averaged one, and the running one if its last checkpoint is in the folder."""
        return self._loaded.get()[2]

    @torch.no_grad()
    def complete(self, prompt: Any, max_tokens: int = 40) -> dict[str, str]:
        """Returns the greedy continuation of a text by each adapter."""
        prompt = str(prompt or "")
        if not prompt.strip():
            raise ValueError("Write a text for the model to continue.")
        if len(prompt) > MAX_TEXT:
            raise ValueError(f"The text has {len(prompt):,} characters: at most {MAX_TEXT:,}.")
        model, tokenizer, names = self._loaded.get()
        encoded = tokenizer(prompt, return_tensors="pt", truncation=False)
        room = int(getattr(model.config, "max_position_embeddings", 0) or 0)
        length = encoded["input_ids"].shape[1]
        wanted = max(1, min(int(max_tokens), MAX_TOKENS))
        if room and length + 1 > room:
            raise ValueError(f"The text has {length} tokens, but the model has room for only {room}.")
        wanted = min(wanted, room - length) if room else wanted
        found = {}
        inputs = {key: encoded[key] for key in ("input_ids", "attention_mask")}
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        with self._lock:
            for name in names:
                model.set_adapter(name)
                output = model.generate(**inputs, max_new_tokens=wanted, do_sample=False, pad_token_id=pad)
                found[name] = tokenizer.decode(output[0, length:], skip_special_tokens=True)
        return found


def check_adapter(model: Any, name: str, folder: Path) -> None:
    """Raises ValueError if the file of an adapter does not hold its weights: peft only warns of missing ones."""
    from peft import get_peft_model_state_dict

    path = folder / ADAPTER_WEIGHTS
    saved = load_tensors(path)
    # Resized embeddings are saved with the adapter; by default peft would look for the base model to find out.
    embeddings = any("lora_" not in key and ("embed" in key or "lm_head" in key) for key in saved)
    loaded = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=embeddings)
    for key in sorted(saved.keys() ^ loaded.keys()):
        problem = "is missing" if key in loaded else "is unexpected"
        raise ValueError(f"{path} does not hold the weights of its adapter: {key!r} {problem}.")
    for key, tensor in saved.items():
        if not tensor.isfinite().all():
            raise ValueError(f"{path} has NaN or infinite numbers in {key!r}.")


def base_model(source: Source) -> str:
    """Returns where the base model is: in the folder of a Space, or as the adapter's configuration names it."""
    if (source.folder / BASE).is_dir():
        return str(source.folder / BASE)
    name = read_object(source.folder / ADAPTER_CONFIG).get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise ValueError(
            f"{source.folder / ADAPTER_CONFIG} does not name its base model (base_model_name_or_path), so the adapter "
            "cannot be run."
        )
    return name


def running_adapter(folder: Path) -> Path | None:
    """Returns the folder with the running model's last adapter: of a Space, or of the last checkpoint."""
    places = [folder / RUNNING, *reversed(checkpoints(folder))]
    return next((place for place in places if (place / ADAPTER_WEIGHTS).is_file()), None)
