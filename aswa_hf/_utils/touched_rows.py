"""Which rows of a table an optimizer has changed, so that averages can skip all others.

An optimizer that writes only the rows of a sparse gradient declares them with `writing(parameter, rows)`. From then on
the table is tracked: a `RowSet` that follows it holds the rows that were written since. Every other change in place
(loading, another optimizer, a dense step) is noticed by the parameter's version, and makes the sets that follow it
invalid. Changes through `parameter.data` or a numpy array have no version: code that makes them must call
`forget(parameter)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary


class RowSet:
    """Rows of a table, one byte for each row of the table."""

    def __init__(self, mask: Tensor):
        self.mask = mask

    def __len__(self) -> int:
        return int(self.mask.count_nonzero())

    def indices(self) -> Tensor:
        return self.mask.nonzero().flatten()


class TrackedTable:
    """The sets that follow one parameter, and its version after the last change that they include."""

    def __init__(self, parameter: Tensor):
        self.sets: WeakSet[RowSet] = WeakSet()
        self.accept(parameter)

    def accept(self, parameter: Tensor) -> None:
        """The parameter as it is now has no change that the sets do not include."""
        self.state = _state(parameter)

    def is_current(self, parameter: Tensor) -> bool:
        return self.state == _state(parameter)

    def follow(self, rows: RowSet) -> RowSet:
        """Adds the rows that are written from now on to a set, as long as the set exists."""
        self.sets.add(rows)
        return rows

    def follows(self, rows: RowSet | None, parameter: Tensor) -> bool:
        """Whether a set holds all rows that have changed since it was made."""
        if not self.is_current(parameter):
            self.sets.clear()
            self.accept(parameter)
        return rows in self.sets


_TABLES: WeakIdKeyDictionary = WeakIdKeyDictionary()


@contextmanager
def writing(parameter: Tensor, rows: Tensor) -> Iterator[None]:
    """For an optimizer: the block changes these rows of a parameter and no others."""
    table = _TABLES.get(parameter)
    if table is None:
        table = _TABLES[parameter] = TrackedTable(parameter)
    table.follows(None, parameter)
    for followed in table.sets:
        followed.mask[rows] = True
    yield
    table.accept(parameter)


def forget(parameter: Tensor) -> None:
    """The parameter was changed in a way that is not noticed: averages compare all of its rows again."""
    if parameter in _TABLES:
        _TABLES[parameter].sets.clear()


def tracked_tables(model: nn.Module) -> dict[str, tuple[Tensor, TrackedTable]]:
    """The parameters of a model that are tracked, by name."""
    if not _TABLES:
        return {}
    return {
        name.replace("_orig_mod.", ""): (parameter, _TABLES[parameter])
        for name, parameter in model.named_parameters()
        if parameter in _TABLES
    }


def _state(parameter: Tensor) -> tuple[int, int, torch.Size]:
    return parameter._version, parameter.data_ptr(), parameter.shape
