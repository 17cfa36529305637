"""`WeightAverage`: averages a model's weights by name, and puts averaged weights into the model.

Averaged: the trainable floating-point parameters, in float32 or higher precision regardless of the model's dtype.
Copied: the persistent buffers (with `average_buffers`, floating-point buffers are averaged too). One copy of the
weights is kept, plus another (the running weights) while averaged weights are in the model. All updates are in place:
compiled modules, optimizers and gradient hooks keep their tensors. If the model is sharded, each process averages the
rows it holds. If an optimizer writes few rows of a table, only the rows in which the running weights and the average
may differ are read, written and kept: those written since Θ_A := Θ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from aswa_hf._utils.distributed import broadcast_from_rank_0, world_size
from aswa_hf._utils.fingerprints import fingerprint
from aswa_hf._utils.sharding import (
    RowSharded,
    as_shards,
    is_dtensor,
    local_shards,
    parts_for,
    refuse_unsupported_sharding,
    reshard,
)
from aswa_hf._utils.signals import uninterrupted
from aswa_hf._utils.touched_rows import RowSet, TrackedTable, tracked_tables
from aswa_hf._utils.zero import (
    is_partitioned,
    master_weights,
    module_of,
    refuse_unsupported_settings,
    release_gathered,
    set_master_weights,
    whole_of,
)

# The shape, dtype and device of tensors by name.
Layout = dict[str, tuple[torch.Size, torch.dtype, torch.device]]
# Elements per chunk for weights whose dtype or device differs from the average's: little memory, few calls.
_CHUNK = 1 << 20
# The models that hold averaged weights until a block ends.
_HOLDING: WeakSet[nn.Module] = WeakSet()
# Elements per chunk where several averages take the same weights, which stay in the cache until all are updated.
_CACHED = 1 << 19
# How many of the rows that should be equal are compared, before all of them are assumed to be equal.
_SAMPLED = 4096


def unwrap(model: nn.Module) -> nn.Module:
    """Returns the user's module inside `torch.compile`, DDP, `DataParallel` and a DeepSpeed engine."""
    while True:
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        elif (inside := module_of(model)) is not None:
            refuse_unsupported_settings(model.config)  # type: ignore[arg-type]
            model = inside
        else:
            return model


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Returns the buffers that a checkpoint of the model contains, by name."""
    return {name: buffer.detach() for name, buffer in _tensors(model)[1].items()}


def _tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns the trainable parameters and persistent buffers (not copies), by name; sharded ones stay sharded."""
    sharded = reshard(model)
    # One cheap pass: EMA needs it after every step, where for a small model it costs as much as the arithmetic.
    parameters: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    seen: dict[int, list[Tensor]] = {}
    for path, module in model.named_modules():
        # A compiled submodule must not change the names its weights are saved under.
        prefix = f"{path}.".replace("_orig_mod.", "") if path else ""
        for name, parameter in module._parameters.items():
            # Only floating-point and complex tensors can require a gradient.
            if parameter is None or not parameter.requires_grad:
                continue
            split = is_partitioned(parameter)
            # Empty tensors have no data pointer, and that of a sharded one is not where its rows are.
            elsewhere = split or (sharded and is_dtensor(parameter))
            memory = id(parameter) if elsewhere else parameter.data_ptr() or id(parameter)
            if memory in seen and any(_same_layout(parameter, other) for other in seen[memory]):
                continue
            seen.setdefault(memory, []).append(parameter)
            if isinstance(module, RowSharded):
                parameters[prefix + name] = module.whole()
            else:
                parameters[prefix + name] = whole_of(parameter) if split else parameter
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                buffers[prefix + name] = buffer
    return parameters, buffers


class WeightAverage:
    """An average Θ_A of the weights Θ in `model`; empty until the first `assign` or `load`."""

    def __init__(
        self,
        model: nn.Module,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        average_buffers: bool = False,
    ):
        if not isinstance(model, nn.Module):
            raise TypeError(f"Expected a torch.nn.Module to average, got {type(model).__name__}.")
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"dtype must be torch.float32 or torch.float64, got {dtype}: an average of lower precision soon "
                "stops changing. The model itself may have any dtype."
            )
        self.model = unwrap(model)
        self.dtype = dtype
        self.device = _usable(device) if device is not None else None
        self.average_buffers = average_buffers
        self.averaged: dict[str, Tensor]
        self.copied: dict[str, Tensor]
        # Of tracked tables, the rows in which Θ_A and Θ may differ.
        self._different: dict[str, RowSet]
        # Kept, because it is compared with that of the running weights after every step.
        self._layout: Layout
        self.clear()
        parameters, _ = _tensors(self.model)
        refuse_unsupported_sharding(self.model, parameters)
        if not parameters:
            raise ValueError(
                f"{type(self.model).__name__} has no trainable floating-point parameter (requires_grad=True): there "
                "is nothing to average. Build the strategy after unfreezing the parameters."
            )
        for name, parameter in parameters.items():
            if torch.promote_types(parameter.dtype, dtype) == torch.complex128:
                raise ValueError(
                    f"The average of the parameter {name!r} ({parameter.dtype}) with dtype={dtype} would be "
                    "complex128, which safetensors files cannot hold. Use complex64 parameters, and float32."
                )
        if on_meta := next((name for name, p in parameters.items() if p.is_meta), None):
            raise ValueError(f"Parameter {on_meta!r} is on the meta device. Load the weights before averaging them.")

    @property
    def is_empty(self) -> bool:
        return not self.averaged

    @property
    def is_in_model(self) -> bool:
        """Whether the model holds averaged weights now: this average or another one of the same model."""
        return self.model in _HOLDING

    @torch.no_grad()
    def assign(self, of: WeightAverage | None = None) -> None:
        """Θ_A := Θ, or the average `of`, with the buffers that are not averaged."""
        averaged, copied = self._running()
        if self.is_empty:
            ours = {name: self._empty_for(tensor) for name, tensor in averaged.items()}
            self._replace(ours, {name: torch.empty_like(tensor) for name, tensor in copied.items()})
        self._check(averaged, copied)
        if of is not None:
            self._different = {}
            _copy_by_name(self.averaged | self.copied, of.averaged | of.copied)
            return
        tables = self._tables(averaged)
        rows = self._different_rows(averaged, tables, compare=False)
        source = master_weights(averaged) | copied
        _copy_by_name({n: t for n, t in (self.averaged | self.copied).items() if n not in rows}, source)
        for name, some in rows.items():
            for part in _some_rows(some, averaged[name]):
                self.averaged[name].index_copy_(0, part, averaged[name].index_select(0, part))
        self._different = {}
        if not self.is_in_model:
            for name, (_, table) in tables.items():
                mask = torch.zeros(len(averaged[name]), dtype=torch.bool, device=averaged[name].device)
                self._different[name] = table.follow(RowSet(mask))

    @torch.no_grad()
    def blend(self, weight: float, of: WeightAverage | None = None, *, with_buffers: bool = False) -> None:
        """Θ_A := Θ_A + weight · (Θ − Θ_A), where Θ may be another average `of` this model.

        `with_buffers` also copies the model's buffers that are not averaged.
        """
        averaged, copied = self._running()
        self._check(averaged, copied)
        if of is not None:
            self._different = {}
            _blend_all([(self, weight)], of.averaged)
        else:
            rows = self._different_rows(averaged)
            if self.is_in_model:
                self._different = {}
            source = master_weights(averaged)
            _blend_all([(self, weight)], {name: t for name, t in source.items() if name not in rows})
            for name, some in rows.items():
                for part in _some_rows(some, averaged[name]):
                    self.averaged[name].index_copy_(0, part, self._blended(name, averaged[name], part, weight))
        if with_buffers:
            _copy_by_name(self.copied, copied)

    @torch.no_grad()
    def combine(self, parts: Sequence[tuple[float, WeightAverage | None]]) -> None:
        """Θ_A := Σ c_i · Θ_i for pairs of a coefficient and an average of this model; None is the running model.

        Averaged buffers are those of the greatest coefficient: others may be negative, and so would a variance be.
        """
        (first, source), *others = parts
        self.assign(source)
        self._different = {}
        parameters, _ = _tensors(self.model)
        torch._foreach_mul_([tensor for name, tensor in self.averaged.items() if name in parameters], first)
        running = master_weights(self._running()[0])
        _, greatest = max(parts, key=lambda part: part[0])
        buffers = (running if greatest is None else greatest.averaged).items()
        _copy_by_name(
            {name: tensor for name, tensor in self.averaged.items() if name not in parameters},
            {name: tensor for name, tensor in buffers if name not in parameters},
        )
        for coefficient, part in others:
            for name, theirs in (running if part is None else part.averaged).items():
                if name not in parameters:
                    continue
                for a, t in _pieces(self.averaged[name], theirs):
                    a.add_(t.to(a.device, a.dtype), alpha=coefficient)

    @torch.no_grad()
    def copy_buffers(self, buffers: Mapping[str, Tensor] | None = None) -> None:
        """Copies the buffers that are not averaged: those given, or those now in the model."""
        averaged, copied = self._running()
        self._check(averaged, copied)
        _copy_by_name(self.copied, copied if buffers is None else buffers)

    def buffers_in_model(self) -> dict[str, Tensor]:
        """Returns a copy of the buffers now in the model that are not averaged."""
        return {name: buffer.clone() for name, buffer in self._running()[1].items()}

    def share_buffers(self) -> None:
        """Broadcasts rank 0's buffers: between two steps each rank has statistics of its own batches."""
        if world_size() > 1 and not self.is_empty:
            parameters, _ = _tensors(self.model)
            ours = {name: tensor for name, tensor in self.averaged.items() if name not in parameters} | self.copied
            broadcast_from_rank_0(ours.values())

    @contextmanager
    def lookahead(self, weight: float, of: WeightAverage | None = None) -> Iterator[None]:
        """Puts Θ̂ = Θ_A + weight · (Θ − Θ_A) into the model until the block ends; Θ_A does not change.

        Θ may be another average `of` this model.
        """
        averaged, copied = self._running()
        self._check(averaged, copied)
        shared = _in_shared_memory(averaged)
        rows = self._different_rows(averaged) if of is None else {}
        rows = {name: some for name, some in rows.items() if name not in shared}
        with self._restored(averaged | copied, rows) as running:
            with torch.no_grad():
                added = master_weights(averaged) if of is None else of.averaged
                for name, some in rows.items():
                    for part in _some_rows(some, averaged[name]):
                        averaged[name].index_copy_(0, part, self._blended(name, averaged[name], part, weight))
                for name, theirs in averaged.items():
                    if name in rows:
                        continue
                    ours, new = self.averaged[name], added[name]
                    if new is theirs and (name in shared or not _same_kind(ours, theirs)):
                        # In place moves less data, but would average weights that overlap in memory twice.
                        new = running[name]
                    if _same_kind(ours, theirs) and _same_kind(ours, new):
                        torch.lerp(ours, new, weight, out=theirs)
                    else:
                        for a, k, t in _pieces(ours, new, theirs):
                            t.copy_(torch.lerp(a, k.to(a.device, a.dtype), weight))
            release_gathered(self.model)
            yield

    @contextmanager
    def swapped(self, *, with_buffers: bool = True) -> Iterator[None]:
        """Puts Θ_A into the model until the block ends; `with_buffers=False` keeps the model's own buffers."""
        averaged, copied = self._running()
        self._check(averaged, copied)
        rows = self._different_rows(averaged)
        with self._restored(averaged | copied, rows):
            with torch.no_grad():
                whole = {name: tensor for name, tensor in averaged.items() if name not in rows}
                _copy_by_name(whole | copied if with_buffers else whole, self.averaged | self.copied)
                for name, some in rows.items():
                    for part in _some_rows(some, averaged[name]):
                        averaged[name].index_copy_(0, part, self.averaged[name].index_select(0, part))
            release_gathered(self.model)
            yield

    @torch.no_grad()
    def apply(self) -> None:
        """Θ := Θ_A, buffers included, in the model's dtype."""
        averaged, copied = self._running()
        self._check(averaged, copied)
        _copy_by_name(averaged | copied, self.averaged | self.copied)
        set_master_weights(averaged, self.averaged)
        release_gathered(self.model)

    def fingerprint(self) -> tuple[int, ...]:
        """Returns a number for the weights and buffers now in the model; equal ones have equal numbers."""
        averaged, copied = self._running()
        return fingerprint((*averaged.values(), *copied.values()))

    def whole(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Returns the averaged and the copied tensors in the model's shapes; DTensors where the model is sharded."""
        averaged, _ = self._in_model()
        return as_shards(self.averaged, averaged), self.copied

    def check(self, averaged: Mapping[str, Any], copied: Mapping[str, Any], *, finite: bool = False) -> None:
        """Raises ValueError if saved tensors differ from the model's in name, shape or kind, or are not `finite`."""
        expected_averaged, expected_copied = self._in_model()
        _check_same_tensors(averaged, expected_averaged, "averaged weight")
        _check_same_tensors(copied, expected_copied, "buffer")
        for name, tensor in expected_averaged.items():
            saved = averaged[name]
            if saved.is_floating_point() != tensor.is_floating_point() or saved.is_complex() != tensor.is_complex():
                raise ValueError(f"The averaged weight {name!r} of this state does not hold floating-point numbers.")
            if finite and not all(bool(part.isfinite().all()) for _, part in parts_for(tensor, saved)):
                raise ValueError(f"The averaged weight {name!r} of this state holds NaN or infinite values.")

    def load(self, averaged: Mapping[str, Any], copied: Mapping[str, Any]) -> None:
        """Loads saved tensors, after checking each against the model by name and shape.

        They may be complete tensors, DTensors, or any objects that have a `shape` and can be sliced by rows.
        """
        self.check(averaged, copied)
        in_model, _ = self._in_model()
        expected_averaged, expected_copied = self._running()
        new_averaged = {n: self._empty_for(tensor) for n, tensor in expected_averaged.items()}
        for n, tensor in new_averaged.items():
            for rows, part in parts_for(in_model[n], averaged[n]):
                tensor[rows if tensor.dim() else ...] = part
        new_copied = {n: torch.empty_like(t).copy_(copied[n][...]) for n, t in expected_copied.items()}
        self._replace(new_averaged, new_copied)

    def clear(self) -> None:
        self._replace({}, {})

    def _replace(self, averaged: dict[str, Tensor], copied: dict[str, Tensor]) -> None:
        self.averaged, self.copied, self._different = averaged, copied, {}
        self._layout = _layout_of(averaged)

    @property
    def is_finite(self) -> bool:
        """Whether the average, of a sharded model the rows of this process, has no NaN and no infinite values."""
        return all(bool(part.isfinite().all()) for tensor in self.averaged.values() for (part,) in _pieces(tensor))

    @property
    def nbytes(self) -> int:
        """The memory of the average in bytes."""
        return sum(tensor.nbytes for tensor in (*self.averaged.values(), *self.copied.values()))

    @contextmanager
    def _restored(
        self, running: Mapping[str, Tensor], rows: Mapping[str, Tensor] | None = None
    ) -> Iterator[dict[str, Tensor]]:
        """Yields a copy of the running weights and buffers, and restores them from it on exit, bit for bit.

        Of some tables only the `rows` that will change are kept.
        """
        rows = rows or {}
        whole = {name: tensor for name, tensor in running.items() if name not in rows}
        # With an offloaded average, the copy is offloaded too.
        kept = {name: torch.empty_like(tensor, device=self.device) for name, tensor in whole.items()}
        with torch.no_grad():
            _copy_by_name(kept, whole)
            kept_rows = {name: running[name].index_select(0, some) for name, some in rows.items()}
        current = [(p, table) for p, table in tracked_tables(self.model).values() if table.is_current(p)]
        outermost = not self.is_in_model
        _HOLDING.add(self.model)
        try:
            yield kept
        finally:
            if outermost:
                _HOLDING.discard(self.model)
            # An evaluation leaves the averaged weights gathered, and training would continue with them.
            reshard(self.model)
            with torch.no_grad(), uninterrupted() if rows else nullcontext():
                _copy_by_name(whole, kept)
                for name, some in rows.items():
                    running[name].index_copy_(0, some, kept_rows[name])
                for parameter, table in current:
                    table.accept(parameter)
            release_gathered(self.model)

    def _tables(self, averaged: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, TrackedTable]]:
        """Returns the tracked tables among the model's weights whose rows can be averaged one by one."""
        return {
            name: (parameter, table)
            for name, (parameter, table) in tracked_tables(self.model).items()
            if name in averaged
            and averaged[name].data_ptr() == parameter.data_ptr()
            and averaged[name].shape == parameter.shape
            and _same_kind(self.averaged[name], averaged[name])
        }

    def _different_rows(
        self, averaged: Mapping[str, Tensor], tables: Mapping[str, Any] | None = None, *, compare: bool = True
    ) -> dict[str, Tensor]:
        """Returns the rows of tracked tables in which Θ and Θ_A may differ, except for tables where most rows may.

        If they are unknown, all rows are compared; with `compare=False` the table is left out instead.
        """
        found: dict[str, Tensor] = {}
        if self.is_in_model:  # Θ is not in the model
            return found
        for name, (parameter, table) in (self._tables(averaged) if tables is None else tables).items():
            ours, theirs = self.averaged[name], averaged[name]
            different = self._different.get(name)
            if not table.follows(different, parameter) or not _equal_in_others(different, ours, theirs):
                self._different.pop(name, None)
                if not compare:
                    continue
                different = self._different[name] = table.follow(RowSet(_differing(ours, theirs)))
            if different is not None and 2 * len(different) <= len(ours):
                found[name] = different.indices()
        return found

    def _blended(self, name: str, theirs: Tensor, rows: Tensor, weight: float) -> Tensor:
        """Returns some rows of Θ_A + weight · (Θ − Θ_A)."""
        return self.averaged[name].index_select(0, rows).lerp_(theirs.index_select(0, rows), weight)

    def _running(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Returns the tensors that are averaged and those that are copied; for sharded ones, this process's rows."""
        averaged, copied = self._in_model()
        return local_shards(averaged), copied

    def _in_model(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Returns the model's tensors that are averaged, and those that are copied."""
        averaged, copied = _tensors(self.model)
        if self.average_buffers:
            floating = {name: buffer for name, buffer in copied.items() if buffer.is_floating_point()}
            averaged.update(floating)
            copied = {name: buffer for name, buffer in copied.items() if name not in floating}
        return averaged, copied

    def _empty_for(self, tensor: Tensor) -> Tensor:
        # Never less precise than the weights themselves.
        dtype = torch.promote_types(tensor.dtype, self.dtype)
        return torch.empty_like(tensor, dtype=dtype, device=self.device, requires_grad=False)

    def _check(
        self, averaged: Mapping[str, Tensor], copied: Mapping[str, Tensor], layout: Layout | None = None
    ) -> None:
        """Raises an error if the average does not fit the model; `layout` is that of `averaged`, if it is known."""
        if self.is_empty:
            raise RuntimeError("The average is empty: no snapshot has been taken yet.")
        kinds = [(self.copied, copied, "buffer")]
        if layout != self._layout:
            kinds.insert(0, (self.averaged, averaged, "trainable parameter"))
        for ours, theirs, kind in kinds:
            if problem := _difference(ours, theirs, "the average", "the model"):
                raise ValueError(
                    f"The model's {kind}s changed since averaging began: {problem}. Build a new strategy after "
                    "adding, removing, freezing or unfreezing parameters."
                )


@torch.no_grad()
def take_snapshots(updates: Iterable[tuple[WeightAverage, float]]) -> None:
    """Θ_A := Θ_A + weight · (Θ − Θ_A) for each pair of an average and a weight; a weight of 1 is Θ_A := Θ.

    The averages of one model are updated in one pass over its weights.
    """
    together: dict[tuple[int, bool], list[tuple[WeightAverage, float]]] = {}
    for average, weight in updates:
        if weight == 1:
            average.assign()
        elif tracked_tables(average.model):
            average.blend(weight, with_buffers=True)
        else:
            together.setdefault((id(average.model), average.average_buffers), []).append((average, weight))
    for group in together.values():
        averaged, copied = group[0][0]._running()
        layout = _layout_of(averaged)
        for average, _ in group:
            average._check(averaged, copied, layout)
        theirs = master_weights(averaged)
        _blend_all(group, theirs, layout if theirs is averaged else None)
        for average, _ in group:
            _copy_by_name(average.copied, copied)


def _blend_all(
    group: Sequence[tuple[WeightAverage, float]], theirs: Mapping[str, Tensor], layout: Layout | None = None
) -> None:
    """Moves several averages towards the same weights, chunk by chunk: these are read from memory only once.

    `layout` is that of the weights, if it is known.
    """
    if all(average._layout == layout for average, _ in group):
        matching = list(theirs)
    else:
        matching = [n for n, tensor in theirs.items() if all(_same_kind(a.averaged[n], tensor) for a, _ in group)]
    # One call for all tensors is the fastest for one average, and on an accelerator.
    chunked = len(group) > 1 and all(theirs[name].device.type == "cpu" for name in matching)
    for names in _batches({name: theirs[name] for name in matching}, _CACHED) if chunked else [matching]:
        if len(names) == 1:
            (name,) = names
            for *ours, new in _pieces(*(a.averaged[name] for a, _ in group), theirs[name], size=_CACHED):
                for tensor, (_, weight) in zip(ours, group, strict=True):
                    tensor.lerp_(new, weight)
        elif names:
            for average, weight in group:
                torch._foreach_lerp_([average.averaged[n] for n in names], [theirs[n] for n in names], weight)
    for name in theirs.keys() - set(matching):
        for *ours, new in _pieces(*(a.averaged[name] for a, _ in group), theirs[name]):
            converted: dict[tuple[torch.device, torch.dtype], Tensor] = {}
            for tensor, (_, weight) in zip(ours, group, strict=True):
                kind = tensor.device, tensor.dtype
                if kind not in converted:
                    converted[kind] = new.to(*kind)
                tensor.lerp_(converted[kind], weight)


def _batches(tensors: Mapping[str, Tensor], size: int) -> Iterator[list[str]]:
    """Yields names of tensors with at most `size` elements together; a larger tensor is alone."""
    batch: list[str] = []
    elements = 0
    for name, tensor in tensors.items():
        if batch and elements + tensor.numel() > size:
            yield batch
            batch, elements = [], 0
        batch.append(name)
        elements += tensor.numel()
    if batch:
        yield batch


def _copy_by_name(to: Mapping[str, Tensor], source: Mapping[str, Tensor]) -> None:
    # One call, so that no interrupt can come between two tensors.
    if to:
        torch._foreach_copy_(list(to.values()), [source[name] for name in to])


def _some_rows(rows: Tensor, table: Tensor) -> tuple[Tensor, ...]:
    """Splits row numbers, so that what is computed from these rows at a time is small."""
    parts: tuple[Tensor, ...] = rows.split(max(1, _CHUNK // max(1, table[:1].numel())))
    return parts


def _differing(ours: Tensor, theirs: Tensor) -> Tensor:
    """Returns a mask of the rows that are not equal, chunk by chunk."""
    parts = [
        (a != b).flatten(1).any(1)
        for size in [max(1, _CHUNK // max(1, ours[:1].numel()))]
        for a, b in zip(ours.split(size), theirs.split(size), strict=True)
    ]
    return torch.cat(parts)


def _equal_in_others(different: RowSet | None, ours: Tensor, theirs: Tensor) -> bool:
    """Whether a sample of the rows that should be equal is: a change of all rows is noticed, however it was made."""
    if different is None:
        return False
    rows = torch.arange(0, len(ours), max(1, len(ours) // _SAMPLED), device=ours.device)
    rows = rows[~different.mask[rows]]
    return torch.equal(ours.index_select(0, rows), theirs.index_select(0, rows))


def _usable(device: torch.device | str) -> torch.device:
    """Returns the device; raises ValueError if this machine has no such device, or it holds no numbers."""
    try:
        found = torch.device(device)
        torch.empty(1, device=found)
    except (AssertionError, NotImplementedError, RuntimeError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"device={str(device)!r} cannot hold an average on this machine: {reason}") from None
    if found.type == "meta":
        raise ValueError("device='meta' holds no numbers. Choose a device that does, such as 'cpu'.")
    return found


def _same_layout(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.stride() == b.stride()


def _in_shared_memory(tensors: Mapping[str, Tensor]) -> set[str]:
    """Returns the names of the tensors that may overlap with another one in memory."""
    storages = {name: tensor.untyped_storage().data_ptr() for name, tensor in tensors.items()}
    count = Counter(storages.values())
    return {name for name, storage in storages.items() if count[storage] > 1}


def _layout_of(tensors: Mapping[str, Tensor]) -> Layout:
    return {name: (tensor.shape, tensor.dtype, tensor.device) for name, tensor in tensors.items()}


def _same_kind(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.device == b.device


def _pieces(*tensors: Tensor, size: int | None = None) -> Iterator[tuple[Tensor, ...]]:
    """Yields tensors of one shape in chunks: flat views of the same elements, where the memory layout allows it."""
    # The first is ours, allocated densely: equal strides mean that the others have no gaps either.
    first, size = tensors[0], size or _CHUNK
    if first.numel() <= size or any(tensor.stride() != first.stride() for tensor in tensors):
        yield tensors
        return
    flat = (tensor.as_strided((tensor.numel(),), (1,)).split(size) for tensor in tensors)
    yield from zip(*flat, strict=True)


def _check_same_tensors(saved: Mapping[str, Any], model: Mapping[str, Tensor], kind: str) -> None:
    problem = _difference(saved, model, "the saved state", "the model")
    if problem:
        raise ValueError(f"This state belongs to another model; the first differing {kind}: {problem}.")


def _difference(ours: Mapping[str, Any], theirs: Mapping[str, Any], us: str, them: str) -> str:
    """Describes the first tensor by name in which two sets differ; an empty string if there is none."""
    for name, tensor in theirs.items():
        if name not in ours:
            return f"{name!r} {tuple(tensor.shape)} is in {them} but not in {us}"
        if not hasattr(ours[name], "shape"):
            return f"{name!r} is a {type(ours[name]).__name__} in {us}, not a tensor"
        if ours[name].shape != tensor.shape:
            return f"{name!r} is {tuple(ours[name].shape)} in {us} but {tuple(tensor.shape)} in {them}"
    for name, tensor in ours.items():
        if name not in theirs:
            return f"{name!r} {tuple(tensor.shape)} is in {us} but not in {them}"
    return ""
