"""The strategies: ways to compute the final weights of a run from the weights it visits.

All share one interface, so that several can follow the same run without influencing it or each other:

    strategy.step()              after every optimizer step (DenseASWA, SWAD and the EMAs need it)
    strategy.update(evaluate)    at every decision point, usually the end of an epoch
    with strategy.swapped(): …   the strategy's weights in the model
    strategy.apply()             the strategy's weights in the model, permanently
"""

from aswa_hf.strategies.adaptive import ASWA, DenseASWA
from aswa_hf.strategies.base import BATCHNORM_POLICIES, Evaluate, Outcome, Strategy, take_step
from aswa_hf.strategies.exponential import BEMA, EMA, BestEMA
from aswa_hf.strategies.power import PowerEMA
from aswa_hf.strategies.snapshots import LAWA, SWA, BestCheckpoint, LastCheckpoint
from aswa_hf.strategies.swad import SWAD, SWADMax

__all__ = [
    "ASWA",
    "BATCHNORM_POLICIES",
    "BEMA",
    "BestCheckpoint",
    "BestEMA",
    "DenseASWA",
    "EMA",
    "Evaluate",
    "LAWA",
    "LastCheckpoint",
    "Outcome",
    "PowerEMA",
    "STRATEGIES",
    "SWA",
    "SWAD",
    "SWADMax",
    "Strategy",
    "take_step",
]

STRATEGIES: dict[str, type[Strategy]] = {
    strategy.name: strategy
    for strategy in (
        ASWA,
        DenseASWA,
        SWA,
        EMA,
        BestCheckpoint,
        LastCheckpoint,
        LAWA,
        BestEMA,
        BEMA,
        SWAD,
        SWADMax,
        PowerEMA,
    )
}
