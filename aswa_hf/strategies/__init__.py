"""The strategies: ways to compute the final weights of a run from the weights it visits.

All share one interface, so that several can follow the same run without influencing it or each other:

    strategy.step()              after every optimizer step (only EMA needs it)
    strategy.update(evaluate)    at every decision point, usually the end of an epoch
    with strategy.swapped(): …   the strategy's weights in the model
    strategy.apply()             the strategy's weights in the model, permanently
"""

from aswa_hf.strategies.adaptive import ASWA
from aswa_hf.strategies.base import BATCHNORM_POLICIES, Evaluate, Outcome, Strategy
from aswa_hf.strategies.exponential import EMA
from aswa_hf.strategies.snapshots import SWA, BestCheckpoint, LastCheckpoint

__all__ = [
    "ASWA",
    "BATCHNORM_POLICIES",
    "EMA",
    "STRATEGIES",
    "SWA",
    "BestCheckpoint",
    "Evaluate",
    "LastCheckpoint",
    "Outcome",
    "Strategy",
]

STRATEGIES: dict[str, type[Strategy]] = {
    strategy.name: strategy for strategy in (ASWA, SWA, EMA, BestCheckpoint, LastCheckpoint)
}
