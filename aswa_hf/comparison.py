"""Several strategies in one training run, and the score that they take from a metrics dictionary."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from aswa_hf import policy
from aswa_hf._utils.checks import check_whole_number
from aswa_hf._utils.distributed import on_every_rank
from aswa_hf._utils.names import did_you_mean, parse_strategy, split_strategies
from aswa_hf._utils.sharding import computing_device
from aswa_hf._utils.warnings import warn_caller
from aswa_hf.averaging import unwrap
from aswa_hf.batchnorm import Recalibration, default_train_batches
from aswa_hf.strategies import ASWA, BATCHNORM_POLICIES, EMA, STRATEGIES, SWA, BestEMA, DenseASWA, Strategy
from aswa_hf.strategies.base import keyword_options
from aswa_hf.strategies.exponential import StepAverage
from aswa_hf.trajectory import Decision

Metric = str | Mapping[str, float] | Callable[[Mapping[str, float]], float]

# What an evaluation reports about itself, not about the model.
TIMINGS = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time")


class Score:
    """A metric given by name (with or without `eval_`), as weights over several metrics, or as a function of all."""

    def __init__(self, metric: Metric):
        if isinstance(metric, Mapping):
            if not metric or not all(isinstance(weight, (int, float)) for weight in metric.values()):
                raise ValueError(f"metric as a dict maps metric names to weights, got {metric!r}.")
        elif not isinstance(metric, str) and not callable(metric):
            raise TypeError(
                "metric must be a metric's name, a dict of weights over metrics, or a function of the metrics "
                f"dictionary, got {type(metric).__name__}."
            )
        self.metric = metric

    @property
    def label(self) -> str:
        """The name the score is reported under, without `eval_`."""
        if isinstance(self.metric, str):
            return self.metric.removeprefix("eval_")
        name = getattr(self.metric, "__name__", "")
        return name if name.isidentifier() else "score"

    @property
    def description(self) -> Any:
        """What the score consists of; saved with a run and compared when it is resumed."""
        return dict(self.metric) if isinstance(self.metric, Mapping) else self.label

    @property
    def keys(self) -> list[str]:
        """The keys of the metrics dictionary that the score uses; empty for a function, where they are unknown."""
        names = [self.metric] if isinstance(self.metric, str) else getattr(self.metric, "keys", list)()
        return ["eval_" + name.removeprefix("eval_") for name in names]

    def __call__(self, metrics: Mapping[str, float]) -> float:
        """Returns the score in `metrics`."""
        for key in self.keys:
            if key not in metrics:
                nearest = [name.removeprefix("eval_") for name in difflib.get_close_matches(key, metrics, n=3)]
                raise ValueError(
                    f"The metric {key!r} is not among those of the evaluation: {', '.join(sorted(metrics))}. "
                    + (f"Did you mean {' or '.join(map(repr, nearest))}? " if nearest else "")
                    + "Pass the name of one of these as metric=, or return this one from the evaluation."
                )
        if isinstance(self.metric, str):
            return _number(metrics[self.keys[0]], self.keys[0])
        if isinstance(self.metric, Mapping):
            weights = self.metric.values()
            return sum(w * _number(metrics[key], key) for key, w in zip(self.keys, weights, strict=True))
        try:
            return _number(self.metric(metrics), self.label)
        except KeyError as error:
            raise ValueError(
                f"The metric function uses {error}, which is not among the metrics of the evaluation: "
                f"{', '.join(sorted(metrics))}."
            ) from None

    def report(self, metrics: Mapping[str, Any], name: str) -> dict[str, Any]:
        """Returns the metrics of strategy `name`'s weights under their own keys: `eval_loss` → `eval_aswa_loss`."""
        renamed = {
            f"eval_{name}_{key.removeprefix('eval_')}": value
            for key, value in metrics.items()
            if key.startswith("eval_") and not key.endswith(TIMINGS)
        }
        return renamed | {f"eval_{name}_{self.label}": self(metrics)}


def _number(value: Any, name: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"The metric {name!r} must be one number, got {type(value).__name__}: {value!r}.") from None


Factory = Callable[[nn.Module], Strategy]
Strategies = str | Sequence[str] | Mapping[str, Factory | Mapping[str, Any]]
Metrics = dict[str, float]


class WholeRunSWA(SWA):
    """SWA from the first epoch on, which is what the ASWA paper compares with."""

    name = "swa-all"


# As `apply`: the strategy that did best on validation.
AUTO = "auto"
NAMED: dict[str, type[Strategy]] = {**STRATEGIES, WholeRunSWA.name: WholeRunSWA}


# What a run sets for all of its strategies.
_SET_BY_THE_RUN = {"greater_is_better", "train_batches", "bn_forward", "total", "total_steps"}
_TYPES: dict[str, Any] = {"bool": bool, "int": int, "float": (int, float), "str": str, "None": type(None)}


@dataclass
class Named:
    """A strategy by its name, with the options given for it; checked before training begins."""

    kind: type[Strategy]
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.options:
            return
        dtype = self.options.get("dtype")
        if isinstance(dtype, str):  # float64, or as a torch.dtype is written
            self.options["dtype"] = getattr(torch, dtype.removeprefix("torch."), dtype)
        known = {name: one for name, one in keyword_options(self.kind).items() if name not in _SET_BY_THE_RUN}
        for option, value in self.options.items():
            if option not in known:
                hint = did_you_mean(option, known)
                raise ValueError(
                    f"The strategy {self.kind.name!r} has no option {option!r}. {hint}Its options: {', '.join(known)}."
                )
            names = [name.strip() for name in str(known[option].annotation).split("|")]
            types = [_TYPES.get(name, object) for name in names]
            # Only a bool is a bool, not a number too.
            fits = any(isinstance(value, kind) and (kind is bool or not isinstance(value, bool)) for kind in types)
            if not fits and object not in types:
                raise TypeError(
                    f"The option {option!r} of {self.kind.name!r} must be {' or '.join(names)}, got {value!r}."
                )
        # The class checks its ranges itself. Unlike most layers, this one draws no random numbers when it is built.
        self.kind(nn.LayerNorm(1), **self.options)

    def __call__(self, model: nn.Module, **options: Any) -> Strategy:
        return self.kind(model, **{**options, **self.options})


def named_factories(strategies: Strategies) -> dict[str, Factory]:
    """Returns what builds each strategy, by name: a `Named`, or the user's own function."""
    factories: dict[str, Factory] = {}
    if isinstance(strategies, Mapping):
        for name, given in strategies.items():
            # Names are part of metrics and of keys in checkpoints.
            if not isinstance(name, str) or not re.fullmatch(r"\w[\w.+-]*", name) or name == AUTO:
                raise ValueError(
                    f"{name!r} cannot be the name of a strategy. A name consists of letters, digits and _ . + -, "
                    f"begins with a letter, a digit or _, and is not {AUTO!r}."
                )
            if not callable(given) and not isinstance(given, Mapping):
                raise TypeError(
                    f"strategies[{name!r}] must be a dict of options or a function that builds a strategy for a model."
                )
            factories[name] = given if callable(given) else _named(name, given)
    else:
        texts: list[Any] = [None]
        if isinstance(strategies, Iterable):
            texts = split_strategies(strategies) if isinstance(strategies, str) else list(strategies)
        if not all(isinstance(text, str) for text in texts):
            raise TypeError(f"strategies must be names, or a dict with options by name, got {strategies!r}.")
        for name, options in map(parse_strategy, texts):
            if name in factories:
                raise ValueError(
                    f"strategies contains {name!r} twice. Two of a kind need names of their own and a function each, "
                    f"as in {{{name!r}: {{…}}, '{name}-2': lambda model: {NAMED[name].__name__}(model, …)}}."
                )
            factories[name] = _named(name, options)
        if not factories:
            raise ValueError(f"Pass at least one strategy of {', '.join(NAMED)}.")
    return factories


def _named(name: str, options: Mapping[str, Any]) -> Named:
    if name not in NAMED:
        hint = did_you_mean(name, NAMED)
        raise ValueError(f"Unknown strategy {name!r}. {hint}Expected one of {', '.join(NAMED)}.")
    return Named(NAMED[name], dict(options))


def check_options(
    apply: str | None, factories: Iterable[str], batchnorm: Any, bn_batches: Any, flags: Mapping[str, Any]
) -> None:
    """Raises ValueError or TypeError for invalid options, before training begins."""
    if apply not in (None, AUTO, *(names := list(factories))):
        raise ValueError(
            f"apply={apply!r} is not among the strategies ({', '.join(names) or 'none'}). Pass one of them, {AUTO!r} "
            "for the one that does best on validation, or None to end with the running weights."
        )
    if apply == AUTO and not names:
        raise ValueError(f"apply={AUTO!r} needs strategies to choose from.")
    if batchnorm not in BATCHNORM_POLICIES:
        raise ValueError(f"batchnorm must be one of {', '.join(BATCHNORM_POLICIES)}, got {batchnorm!r}.")
    check_whole_number("bn_batches", bn_batches, optional=True)
    for name, value in flags.items():
        if value not in (True, False, None):
            raise TypeError(f"{name} must be True or False, got {value!r}.")


def build_strategies(
    factories: Mapping[str, Factory],
    model: nn.Module,
    options: Mapping[str, Any],
    *,
    total: int | None = None,
    total_steps: int | None = None,
) -> dict[str, Strategy]:
    """Builds the strategies of a run: those given by name with `options`, the others by calling their function.

    A strategy that needs `train_batches`, and that its function builds without any, uses those of `options`. The run
    has `total` decision points or `total_steps` optimizer steps.

    Raises ValueError if a strategy does not belong to the run.
    """
    options = dict(options)
    hard_updates, direction = options.pop("hard_updates"), options["greater_is_better"]
    by_kind: dict[Any, dict[str, Any]] = {
        ASWA: {"hard_updates": hard_updates},
        DenseASWA: {"hard_updates": hard_updates},
        # The last quarter of the run, as the SWA paper does.
        SWA: {"start": 0.75},
        # A short run must not be dominated by its first weights.
        EMA: {"warmup": True},
        BestEMA: {"warmup": True},
    }
    strategies: dict[str, Strategy] = {}
    for name, factory in factories.items():
        named = Named(factory) if isinstance(factory, type) and issubclass(factory, Strategy) else factory
        if isinstance(named, Named):
            strategy = named(model, **options, **by_kind.get(named.kind, {}))
        else:
            with default_train_batches(model, options.get("train_batches"), options.get("bn_forward")):
                strategy = factory(model)
            if not isinstance(strategy, Strategy):
                raise TypeError(
                    f"strategies[{name!r}] must build a strategy for a model, got {type(strategy).__name__}."
                )
            if not any(strategy.model is module for module in unwrap(model).modules()):
                raise ValueError(
                    f"strategies[{name!r}] has built a strategy for another model. It must use the model it is given, "
                    "or a part of it."
                )
            if strategy.greater_is_better != direction:
                raise ValueError(
                    f"strategies[{name!r}] has greater_is_better={strategy.greater_is_better}, the run has "
                    f"greater_is_better={direction}. Pass greater_is_better={direction} to the strategy that this "
                    "function builds."
                )
        if isinstance(strategy, SWA) and strategy.total is None:
            strategy.total, strategy.total_steps = total, total_steps
        # Equal averages of different strategies need the same statistics.
        for other in strategies.values():
            ours, theirs = strategy.recalibrate, other.recalibrate
            if isinstance(ours, Recalibration) and isinstance(theirs, Recalibration) and ours.shared_by(theirs):
                strategy.recalibrate, theirs.remembers = theirs, True
        strategies[name] = strategy
    return strategies


def check_due(
    strategies: Mapping[str, Strategy], apply: str | None, *, points: int | None, steps: int | None
) -> list[str]:
    """Returns a line about each strategy that a run of so many decision points and steps ends too early for.

    Raises ValueError if none is left that the run could end with.
    """
    lines = {}
    for name, strategy in strategies.items():
        if strategy.members:  # of a resumed run
            continue
        start = strategy.start if isinstance(strategy, SWA) else 0
        if isinstance(strategy, StepAverage) and steps is not None and strategy.every > steps:
            lines[name] = f"{name} averages every {strategy.every} steps, and the run has {steps}"
        elif start and isinstance(start, int) and points is not None and start >= points:
            lines[name] = f"{name} starts at decision point {start + 1}, and the run has {points}"
    if lines and all(name in lines for name in (strategies if apply == AUTO else [apply])):
        whose = "any of its strategies" if apply == AUTO else apply
        raise ValueError(
            f"The run cannot end with {whose}: {'; '.join(lines.values())}. Train longer, or choose other options."
        )
    return [f"{line}: it will have no weights." for line in lines.values()]


def decide(
    strategies: Mapping[str, Strategy],
    evaluate: Callable[[], Metrics],
    running: Metrics,
    score: Score,
    known: MutableMapping[str, Metrics],
    *,
    step: int,
    epoch: float | None,
) -> dict[str, Any]:
    """Makes one decision per strategy, on the running model's metrics and evaluations of averaged weights.

    Weights that several strategies have in common are evaluated once. Stores the metrics of each strategy's weights in
    `known`, and returns what to log.
    """
    logs: dict[str, Any] = {}
    measured: dict[Any, Metrics] = {}
    # Alone, few of the others have equal weights to evaluate: with one step per decision, DenseASWA's snapshot is the
    # running model.
    if len(strategies) > 1 or any(isinstance(strategy, DenseASWA) for strategy in strategies.values()):
        measured = {_in_model(strategy): running for strategy in _first_of_each_model(strategies.values())}

    def measure(strategy: Strategy) -> Metrics:
        if not measured:
            return evaluate()
        weights = _in_model(strategy)
        if not on_every_rank(weights in measured, computing_device(strategy.model)):
            measured[weights] = evaluate()
        return measured[weights]

    for name, strategy in strategies.items():
        evaluated: list[Metrics] = []

        def score_now(found: list[Metrics] = evaluated, strategy: Strategy = strategy) -> float:
            found.append(measure(strategy))
            return score(found[-1])

        before = strategy.members, strategy.score
        decision = strategy.update(score_now, score(running), step=step, epoch=epoch)
        # Where SWAD finds that its valley has ended, it rejects the point and returns to earlier weights.
        if decision is not Decision.REJECT or (strategy.members, strategy.score) != before:
            known[name] = _metrics_of(strategy, [running, *evaluated], score)
        if isinstance(strategy, ASWA):
            logs |= {f"{name}/decision": decision.code, f"{name}/members": strategy.members}
            logs |= {f"{name}/{kind}": found for kind, found in strategy.trajectory[-1].scores.items()}
    return reported(known, score) | logs


def _in_model(strategy: Strategy) -> Any:
    """Returns what identifies the weights now in the strategy's model."""
    return id(strategy.model), strategy.average.fingerprint()


def _first_of_each_model(strategies: Iterable[Strategy]) -> Iterable[Strategy]:
    return {id(strategy.model): strategy for strategy in strategies}.values()


def _metrics_of(strategy: Strategy, evaluated: Sequence[Metrics], score: Score) -> Metrics:
    """Returns the metrics of the strategy's new weights: on a tie, a later evaluation is of those that it prefers."""
    matching = (found for found in reversed(evaluated) if score(found) == strategy.score)
    return dict(next(matching, evaluated[-1]))


def reported(known: Mapping[str, Metrics], score: Score) -> dict[str, Any]:
    """Returns the metrics of each strategy's weights as `eval_<strategy>_<metric>`."""
    found: dict[str, Any] = {}
    for name, metrics in known.items():
        found |= score.report(metrics, name)
    return found


def summary(name: str, strategy: Strategy, metric: str) -> str:
    """Returns one line about a strategy at the end of a run: its snapshots and score, and the best epoch's score."""
    records = strategy.trajectory
    line = f"{name.upper()}: "
    if isinstance(strategy, ASWA):
        line += f"{strategy.members} of {len(records)} snapshots, "
    line += f"{metric} " + ("unknown" if strategy.score is None else f"{strategy.score:.4g}")
    scores = [r.running_score for r in records if r.running_score is not None and math.isfinite(r.running_score)]
    if scores:
        line += f"; best epoch {(max if strategy.greater_is_better else min)(scores):.4g}"
    return line


def chosen_strategy(apply: str | None, strategies: Mapping[str, Strategy]) -> str | None:
    """Returns the strategy that a run ends with: `apply`, or for "auto" the first with the best validation score."""
    if apply != AUTO:
        return apply
    changed = {name: strategy for name, strategy in strategies.items() if strategy.members and strategy.trajectory}
    if unknown := [name for name, strategy in changed.items() if strategy.score is None]:
        warn_caller(
            f"The weights of {', '.join(unknown)} have changed since the last decision point, so they have no score "
            "and cannot be chosen. Let the run end at a decision point, as every='100 steps' does."
        )
    best: str | None = None
    for name, strategy in strategies.items():
        score = strategies[best].score if best else None
        if strategy.members and policy.is_better(strategy.score, score, strategy.greater_is_better):
            best = name
    return best


def why_empty(strategy: Strategy, metric: str, otherwise: str) -> str:
    """Returns why a strategy has no weights at the end of a run; `otherwise` if it had no decision point."""
    return strategy.why_empty(metric) if strategy.trajectory else otherwise
