"""The state of a run of `fit`: saved in checkpoints by atomic writes, and restored exactly.

    checkpoint_dir/checkpoint-<step>/         model.safetensors, optimizer, scheduler, … as accelerate saves them
    checkpoint_dir/checkpoint-<step>/aswa/    average.safetensors, state.json, random states in rank-<i>.safetensors,
                                              commit.json

A checkpoint is written to a hidden name and renamed when all processes have written their part. Its last file,
`aswa/commit.json`, has the size and a checksum of every other one: a damaged checkpoint is skipped.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedType, skip_first_batches
from accelerate.data_loader import DataLoaderShard
from accelerate.logging import get_logger
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from aswa_hf._utils.distributed import agree, succeeding_together
from aswa_hf._utils.files import remove_temporary, sync, write_failure
from aswa_hf._utils.locks import locked
from aswa_hf._utils.random_state import loader_parts, rng_from_tensors, rng_state, rng_tensors, set_rng_state
from aswa_hf._utils.sharding import is_sharded, row_sharded
from aswa_hf._utils.training_state import load_optimizer, load_weights, save_training
from aswa_hf.averaging import unwrap
from aswa_hf.checkpoint import AVERAGE_FILE, load_state, save_state
from aswa_hf.run_folder import (
    STATE_FOLDER,
    TRAINING,
    checkpoint_folder,
    checkpoint_step,
    checkpoints,
    commit_checkpoint,
    newest_checkpoint,
    refuse_other_sharding,
)
from aswa_hf.strategies import Strategy
from aswa_hf.trajectory import decode_numbers, encode_number

logger = get_logger(__name__)

# torch reports a full disk as a RuntimeError.
SAVING_ERRORS = (OSError, SafetensorError, RuntimeError)


@dataclass
class _Saved:
    """The schema of what a checkpoint of `fit` holds beside its strategies."""

    epoch: int
    batches: int
    step: int
    processes: int
    metric: Any
    history: list[dict[str, Any]]
    metrics: dict[str, dict[str, Any]]


@dataclass
class Place:
    """The position of a run: `batches` of `epoch`, and `step` optimizer steps."""

    loss: Tensor
    """The sum over the batches of the epoch so far."""
    epoch: int = 0
    batches: int = 0
    step: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    """The metrics of each strategy's weights."""
    epoch_began: dict[str, Any] = field(default_factory=dict)
    """The random state at the beginning of the epoch: the order of its batches follows from it."""
    asked: dict[str, Any] | None = None
    """The random state before the last batch was fetched, if a checkpoint follows it."""
    now: dict[str, Any] | None = None
    """The random state of a checkpoint within an epoch, until training resumes from it."""

    @property
    def can_be_saved(self) -> bool:
        """Whether the random state from which the next batch was made is known."""
        return self.asked is not None

    def batches_left(self, loader: Any, is_saved_next: Callable[[], bool]) -> Iterator[Any]:
        """Yields the remaining batches of the epoch; `is_saved_next` says if a checkpoint may follow the next one."""
        # The order is that of this epoch, whatever was read from the loader before.
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(self.epoch)
        if self.batches == 0:
            self.epoch_began = _state(loader)
            self.loss.zero_()
        iterator = iter(loader) if self.now is None else self._rewound(self.now, loader)
        self.now = None
        while True:
            self.asked = rng_state() if is_saved_next() else None
            try:
                batch = next(iterator)
            except StopIteration:
                return
            self.batches += 1
            yield batch

    def end_epoch(self, accelerator: Accelerator) -> dict[str, float]:
        """Moves to the next epoch; returns the training loss of this one, averaged over all processes."""
        if self.batches == 0:
            raise ValueError("train_loader yielded no batch to train on.")
        loss = accelerator.reduce(self.loss / self.batches, "mean")
        self.epoch, self.batches = self.epoch + 1, 0
        return {"train_loss": float(loss)}

    def _rewound(self, now: Mapping[str, Any], loader: Any) -> Iterator[Any]:
        """The remaining batches, produced with the same random numbers as in an uninterrupted run.

        A loader fetches one batch ahead: the next batch was fetched when the last one was requested.
        """
        # Each worker has its own random state, which is only right if it produces all its batches again.
        can_skip = isinstance(loader, DataLoaderShard) and not loader.num_workers
        skipped = max(0, self.batches - 2) if can_skip else 0
        _restore(self.epoch_began, loader)
        if skipped:
            loader = skip_first_batches(loader, skipped)
            loader.set_epoch(self.epoch)  # older versions of accelerate forget it
        iterator: Iterator[Any] = iter(loader)
        for index in range(skipped, self.batches):
            if index == self.batches - 1 and self.asked is not None:
                set_rng_state(self.asked)
            next(iterator)
        set_rng_state(now)
        return iterator

    def save(
        self, accelerator: Accelerator, root: Path, strategies: Mapping[str, Strategy], loader: Any, **about: Any
    ) -> Path:
        """Writes the checkpoint of this step, with plain values `about` the run; all processes must call it."""
        folder = checkpoint_folder(root, self.step)
        temporary = _hidden(folder)
        try:
            tables = sharded_model(accelerator)
            with succeeding_together(accelerator.device, SAVING_ERRORS):
                with _names_of_the_module(accelerator), _without(tables, accelerator):
                    accelerator.save_state(str(temporary))
                (temporary / STATE_FOLDER).mkdir(exist_ok=True)
                save_file(self._of_this_rank(loader), _rank_file(temporary, accelerator.process_index))
            if tables is not None:
                save_training(temporary / TRAINING, *tables)
            with succeeding_together(accelerator.device, SAVING_ERRORS):
                if accelerator.is_main_process or any(is_sharded(strategy.model) for strategy in strategies.values()):
                    save_state(
                        temporary / STATE_FOLDER,
                        strategies,
                        epoch=self.epoch,
                        batches=self.batches,
                        step=self.step,
                        **about,
                        processes=accelerator.num_processes,
                        history=encode_number(self.history),
                        metrics=encode_number(self.metrics),
                    )
            with succeeding_together(accelerator.device):
                if accelerator.is_main_process:
                    commit_checkpoint(temporary)
                    temporary.rename(folder)
                    sync(root)
        except SAVING_ERRORS as error:
            raise OSError(
                f"The checkpoint of step {self.step} could not be saved in {root}: {write_failure(error) or error}. "
                "Earlier ones are unchanged: remove the cause and start the same command again."
            ) from error
        return folder

    def load(
        self,
        accelerator: Accelerator,
        folder: Path,
        strategies: Mapping[str, Strategy],
        loader: Any,
        *,
        metric: Any,
        epochs: int,
    ) -> dict[str, Any]:
        """Restores a checkpoint: position, model, optimizer, scheduler and strategies. Returns what else it holds."""
        tables = sharded_model(accelerator)
        universal = _engines_with_universal_files(accelerator)
        processes = None if universal else accelerator.num_processes
        refuse_other_sharding(folder, _sharding(accelerator, tables), processes=processes)
        content = load_state(folder / STATE_FOLDER, strategies, _Saved, by="fit()")
        if content["metric"] != metric:
            raise ValueError(
                f"{folder} was decided by {content['metric']!r}, this run by {metric!r}: their scores cannot be "
                "compared. Resume with the same metric."
            )
        if content["epoch"] > epochs:
            raise ValueError(f"{folder} is already at epoch {content['epoch']}, but this run has {epochs} epochs.")
        try:
            ranks = [load_file(_rank_file(folder, rank)) for rank in range(content["processes"])]
            with _names_of_the_module(accelerator), _without(tables, accelerator), _newest_files(universal):
                accelerator.load_state(str(folder))
            if tables is not None:
                load_weights(folder / TRAINING, tables[0])
                load_optimizer(folder / TRAINING, *tables)
        except (OSError, SafetensorError, RuntimeError, ValueError, KeyError) as error:
            raise ValueError(
                f"{folder} cannot be resumed: {error}. Resume with the same model, optimizer and scheduler, or "
                "choose another checkpoint_dir."
            ) from error
        self.epoch, self.batches, self.step = (content[key] for key in ("epoch", "batches", "step"))
        self.history, self.metrics = decode_numbers(content["history"]), decode_numbers(content["metrics"])
        # With sharded tables all processes have the same batches and random numbers, however many there are.
        rank = min(accelerator.process_index, content["processes"] - 1)
        if content["processes"] == accelerator.num_processes or tables:
            if self.batches and getattr(loader, "persistent_workers", False):
                logger.warning("Persistent workers (persistent_workers=True) continue with different random numbers.")
            self._restore_random_states(ranks[rank], loader)
            return content
        logger.warning(
            f"{folder} was saved by {content['processes']} processes, this run has {accelerator.num_processes}: it "
            "resumes from there, but with different random numbers."
        )
        if not accelerator.split_batches:
            self.batches = self.batches * content["processes"] // accelerator.num_processes
        if self.batches:
            self.epoch_began, self.now = _state(loader), rng_state()
            mean = torch.stack([rank["loss"] for rank in ranks]).mean() / content["batches"]
            self.loss.copy_(mean * self.batches)
        return content

    def _of_this_rank(self, loader: Any) -> dict[str, Tensor]:
        """The random states, as tensors."""
        if self.batches == 0:
            began = _state(loader)
            states: dict[str, Any] = {"began": began}
        else:
            began = self.epoch_began
            states = {"began": began, "asked": self.asked or began, "now": rng_state()}
        tensors = {f"{kind}/{key}": t for kind, state in states.items() for key, t in rng_tensors(state).items()}
        tensors |= {f"loader/{key}": state for key, state in began["loader"].items()}
        return tensors | {"loss": self.loss.cpu()}

    def _restore_random_states(self, tensors: Mapping[str, Tensor], loader: Any) -> None:
        def under(kind: str) -> dict[str, Tensor]:
            return {key.removeprefix(f"{kind}/"): t for key, t in tensors.items() if key.startswith(f"{kind}/")}

        self.epoch_began = {**rng_from_tensors(under("began")), "loader": under("loader")}
        self.loss.copy_(tensors["loss"])
        if self.batches == 0:
            _restore(self.epoch_began, loader)
        else:
            self.asked, self.now = rng_from_tensors(under("asked")), rng_from_tensors(under("now"))


@contextmanager
def opened(accelerator: Accelerator, root: Path | None, resume: bool) -> Iterator[Path | None]:
    """Locks the folder for this run and yields its last checkpoint, the same on every rank."""
    if root is None:
        yield None
        return
    with ExitStack() as until_left:
        try:
            with succeeding_together(accelerator.device):
                if accelerator.is_main_process:
                    root.mkdir(parents=True, exist_ok=True)
                    until_left.enter_context(locked(root))
                    remove_temporary(root)
                    for left_over in root.glob(".checkpoint-*"):
                        shutil.rmtree(left_over, ignore_errors=True)
        except OSError as error:
            raise OSError(f"Checkpoints cannot be kept in {root}: {error}. Choose another checkpoint_dir.") from error
        yield _last(accelerator, root, resume)


def _last(accelerator: Accelerator, root: Path, resume: bool) -> Path | None:
    newest = None
    with succeeding_together(accelerator.device, (ValueError,)):
        if accelerator.is_main_process:
            newest = newest_checkpoint(root, f"{STATE_FOLDER}/{AVERAGE_FILE}", clean=resume)
    last = agree(-1 if newest is None else checkpoint_step(newest), accelerator.device)
    folder = checkpoint_folder(root, int(last)) if last >= 0 else None
    missing = torch.tensor([int(not (folder or root).is_dir())], device=accelerator.device)
    if int(accelerator.reduce(missing)):
        raise FileNotFoundError(
            f"{folder or root} is not seen by all processes. checkpoint_dir must be shared by all machines."
        )
    if folder is not None and not resume:
        raise FileExistsError(
            f"{root} already holds a run, and resume is False. Choose another checkpoint_dir, or resume with "
            "resume=True."
        )
    return folder


def drop_all_but(keep: int | None, root: Path) -> None:
    """Removes the oldest checkpoints."""
    for path in checkpoints(root)[: -keep if keep else 0]:
        # Renamed first: a folder with the name of a checkpoint is always complete.
        shutil.rmtree(path.rename(_hidden(path)), ignore_errors=True)


def _hidden(checkpoint: Path) -> Path:
    return checkpoint.with_name(f".{checkpoint.name}")


def _rank_file(checkpoint: Path, rank: int) -> Path:
    return checkpoint / STATE_FOLDER / f"rank-{rank}.safetensors"


def _state(loader: Any) -> dict[str, Any]:
    """The global random state and that of the loader's own generators."""
    parts = enumerate(loader_parts(loader))
    generators = {str(index): getattr(part, "generator", None) for index, part in parts}
    own = {index: g.get_state() for index, g in generators.items() if isinstance(g, torch.Generator)}
    return {**rng_state(), "loader": own}


def _restore(state: Mapping[str, Any], loader: Any) -> None:
    set_rng_state(state)
    for index, part in enumerate(loader_parts(loader)):
        # A seedable sampler has no generator before its first epoch, and seeds it for each.
        if str(index) in state["loader"] and isinstance(getattr(part, "generator", None), torch.Generator):
            part.generator.set_state(state["loader"][str(index)])


def sharded_model(accelerator: Accelerator) -> tuple[nn.Module, Any] | None:
    """Returns model and optimizer if each process has its own rows of a table; else None.

    Raises ValueError if there are more of them than a checkpoint can hold.
    """
    models = [unwrap(model) for model in accelerator._models]
    if not any(row_sharded(model) for model in models):
        return None
    if len(models) > 1 or len(accelerator._optimizers) > 1:
        raise ValueError(
            f"A run with a sharded table has one model and one optimizer, got {len(models)} and "
            f"{len(accelerator._optimizers)}. Prepare the others with another Accelerator."
        )
    return models[0], (accelerator._optimizers or [None])[0]


def _sharding(accelerator: Accelerator, tables: Any) -> str:
    """How the weights are spread over the processes."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return "zero-3" if accelerator.state.deepspeed_plugin.zero_stage == 3 else "zero"
    return "rows" if tables else "fsdp" if accelerator.distributed_type == DistributedType.FSDP else "complete"


def _engines_with_universal_files(accelerator: Accelerator) -> list[Any]:
    """The DeepSpeed engines that are configured to load files which any number of processes can read."""
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        return []
    return [engine for engine in accelerator._models if engine.load_universal_checkpoint()]


@contextmanager
def _newest_files(engines: list[Any]) -> Iterator[None]:
    """The engines load the files that DeepSpeed has last converted, not those that accelerate names."""
    for engine in engines:
        load = engine.load_checkpoint

        def load_newest(folder: str, _name: str, load: Any = load, **options: Any) -> Any:
            return load(folder, **options)

        engine.load_checkpoint = load_newest
    try:
        yield
    finally:
        for engine in engines:
            del engine.load_checkpoint


@contextmanager
def _without(tables: Any, accelerator: Accelerator) -> Iterator[None]:
    """Saves and loads all but model and optimizer, of which accelerate would save only the main process's rows."""
    if tables is None:
        yield
        return
    models, optimizers = accelerator._models, accelerator._optimizers
    accelerator._models, accelerator._optimizers = [], []
    try:
        yield
    finally:
        accelerator._models, accelerator._optimizers = models, optimizers


@contextmanager
def _names_of_the_module(accelerator: Accelerator) -> Iterator[None]:
    """Weights are saved and loaded by their names in the user's module: any number of processes reads them."""

    def save(models: list[nn.Module], weights: list[dict[str, Tensor]], _folder: str) -> None:
        if weights:
            weights[:] = [unwrap(model).state_dict() for model in models]

    def load(models: list[nn.Module], _folder: str) -> None:
        models[:] = [unwrap(model) for model in models]

    hooks = [accelerator.register_save_state_pre_hook(save), accelerator.register_load_state_pre_hook(load)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
