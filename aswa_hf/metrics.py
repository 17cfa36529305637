"""Which number of a metrics dictionary the strategies follow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Metric = str | Mapping[str, float] | Callable[[Mapping[str, float]], float]

# What an evaluation reports about itself, not about the model.
_TIMINGS = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time")


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
        """What a saved score was made of, to be compared with what it is made of later."""
        return dict(self.metric) if isinstance(self.metric, Mapping) else self.label

    @property
    def keys(self) -> list[str]:
        """The keys it reads of the metrics dictionary; empty if only the function knows."""
        names = [self.metric] if isinstance(self.metric, str) else getattr(self.metric, "keys", list)()
        return ["eval_" + name.removeprefix("eval_") for name in names]

    def __call__(self, metrics: Mapping[str, float]) -> float:
        """The score in `metrics`."""
        for key in self.keys:
            if key not in metrics:
                raise ValueError(
                    f"The metric {key!r} is not among those of the evaluation: {', '.join(sorted(metrics))}. Give the "
                    "name of one of these as metric=, or let the evaluation return it."
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
                f"The metric function asked for {error}, which is not among the metrics of the evaluation: "
                f"{', '.join(sorted(metrics))}."
            ) from None

    def report(self, metrics: Mapping[str, Any], name: str) -> dict[str, Any]:
        """`metrics` of the weights of strategy `name`, under keys of their own: `eval_loss` → `eval_aswa_loss`."""
        renamed = {
            f"eval_{name}_{key.removeprefix('eval_')}": value
            for key, value in metrics.items()
            if key.startswith("eval_") and not key.endswith(_TIMINGS)
        }
        return renamed | {f"eval_{name}_{self.label}": self(metrics)}


def _number(value: Any, name: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"The metric {name!r} must be one number, got {type(value).__name__}: {value!r}.") from None
