"""Damaged states of every strategy: refused in one line with nothing changed, or without any effect."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from aswa_hf.strategies import STRATEGIES, Strategy

OPTIONS: dict[str, dict[str, Any]] = {
    "bema": {"every": 2},
    "lawa": {"k": 3},
    "power-ema": {"snapshots": 4},
    "swad": {"n_converge": 2, "n_tolerance": 2},
}
SCORES = [0.1, 0.4, 0.5, 0.3, 0.6, 0.2, 0.1]
ODD = ["x", -1, 10**30, 0.5, math.nan, math.inf, None, True, [], {}, [[]], {"a": 1}]
# What a state may also have: nothing else in it says how many steps there were, or decision points without an effect.
POSSIBLE = {("segment_steps", repr(10**30)), ("stale", "True"), ("records", "[]")}
WHOLE_NUMBERS = ("index", "step", "members")


def build(kind: type[Strategy]) -> Strategy:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    return kind(model, batchnorm="copy", **OPTIONS.get(kind.name, {}))


def run(strategy: Strategy, points: range, steps_left: int = 0) -> None:
    """Moves the weights as training would: three steps before each decision point, and some after the last."""
    generator = torch.Generator().manual_seed(points.start)

    def step() -> None:
        with torch.no_grad():
            for parameter in strategy.model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator))
        strategy.step()

    for point in points:
        for _ in range(3):
            step()
        strategy.update(lambda point=point: SCORES[point], SCORES[point], step=3 * (point + 1))
    for _ in range(steps_left):
        step()


def damaged(state: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Copies of a state with one damage each: every value and every tensor, missing, changed or of another kind."""
    for key, value in state.items():
        yield f"no {key}", {name: item for name, item in state.items() if name != key}
        odd = [item for item in ODD if item != value and (key, repr(item)) not in POSSIBLE]
        yield from ((f"{key} is {item!r}", state | {key: item}) for item in odd)
        for name, tensor in value.items() if isinstance(value, dict) else ():
            others = {other: item for other, item in value.items() if other != name}
            yield f"no {name} in {key}", state | {key: others}
            yield f"{name} in {key} under another name", state | {key: others | {"other": tensor}}
            wrong = [tensor[..., None], torch.zeros(7), "x", None]
            wrong += [tensor.int(), tensor * math.nan, tensor - math.inf] if key == "averaged" else []
            yield from ((f"{item} as {name} in {key}", state | {key: others | {name: item}}) for item in wrong)
    tensors = {kind: state[kind] for kind in ("averaged", "buffers")}
    for name in state["parts"]:
        others = {key: value for key, value in state.items() if not key.startswith(f"{name}.")}
        yield f"no {name} at all", others | {"parts": [part for part in state["parts"] if part != name]}
    yield "one more average", state | {f"other.{kind}": tensors[kind] for kind in tensors}
    *records, last = state["records"] or [{}]
    for field in last:
        impossible = ["x", [], {}, True, *([-1, 0.5, 10**6] if field in WHOLE_NUMBERS and field != "step" else [])]
        for item in impossible:
            yield f"{field} of a record is {item!r}", state | {"records": [*records, last | {field: item}]}
    yield "a record twice", state | {"records": [*state["records"], *state["records"][-1:]]}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else repr(a) == repr(b)


@pytest.mark.parametrize("kind", STRATEGIES.values(), ids=STRATEGIES)
@pytest.mark.parametrize("points", [3, *(pytest.param(count, marks=pytest.mark.slow) for count in (0, 1, 5))])
@pytest.mark.filterwarnings("ignore", "error:The .* weights of this state hold NaN")
def test_a_damaged_state_is_refused_with_nothing_changed_or_has_no_effect(kind, points):
    saved = build(kind)
    run(saved, range(points), 1)
    weights = copy.deepcopy(saved.model.state_dict())
    state = saved.state_dict()
    run(saved, range(points, points + 2))
    other = build(kind)
    run(other, range(2), 1)

    def resumed(changed: dict[str, Any]) -> str | None:
        """What is wrong with the run that loads this state, if anything; it may be refused."""
        strategy = copy.deepcopy(other)
        try:
            strategy.load_state_dict(changed)
        except UserWarning:
            return None  # of a run that diverged before its weights had a score
        except ValueError as error:
            if not same(strategy.state_dict(), other.state_dict()):
                return "refused, but changed"
            return f"several lines: {error}" if "\n" in str(error) else None
        strategy.model.load_state_dict(weights)
        run(strategy, range(points, points + 2))
        equal = same(strategy.state_dict(), saved.state_dict()) and strategy.alphas == saved.alphas
        return None if equal else "another result"

    found = copy.deepcopy(other)
    found.load_state_dict(state)
    assert same(found.state_dict(), state)
    assert resumed(state) is None
    wrong = []
    for what, changed in damaged(state):
        try:
            problem = resumed(changed)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        wrong += [f"{what}: {problem}"[:200]] if problem else []
    assert wrong == [], "\n".join(wrong)
