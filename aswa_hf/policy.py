"""The ASWA rule: which of the running model, the look-ahead and the ensemble becomes the next ensemble.

Uses plain floats and imports nothing. With the running model's score s, the look-ahead's ŝ and the ensemble's score_A:

    no ensemble yet             INIT     the running weights start the ensemble
    s > ŝ and s > score_A       HARD     the ensemble restarts from the running weights
    else ŝ > score_A            SOFT     the look-ahead, which averages in the running weights, becomes the ensemble
    else                        REJECT   nothing changes

Comparisons are strict, so a tie is a REJECT. A score that is not a finite number is worse than every number.
"""

INIT = "init"
HARD = "hard"
SOFT = "soft"
REJECT = "reject"


def is_usable(score: float | None) -> bool:
    """Returns whether a score can be compared: it is not None, NaN or infinite."""
    return score is not None and score - score == 0.0


def is_better(score: float | None, other: float | None, greater_is_better: bool = True) -> bool:
    """Returns whether `score` is strictly better than `other`; an unusable score is worse than every number."""
    if score is None or not is_usable(score):
        return False
    if other is None or not is_usable(other):
        return True
    return score > other if greater_is_better else score < other


def decide(
    members: int,
    score: float | None,
    running_score: float | None,
    lookahead_score: float | None,
    *,
    hard_updates: bool = True,
    greater_is_better: bool = True,
) -> str:
    """Returns the decision for an ensemble of `members` snapshots with `score`: INIT, HARD, SOFT or REJECT.

    `hard_updates=False` is Algorithm 1 of the paper as printed: the running score only matters for INIT.
    """

    def better(a: float | None, b: float | None) -> bool:
        return is_better(a, b, greater_is_better)

    if members == 0:
        return INIT if is_usable(running_score) else REJECT
    if hard_updates and better(running_score, lookahead_score) and better(running_score, score):
        return HARD
    return SOFT if better(lookahead_score, score) else REJECT


def decide_dense(
    members: int,
    score: float | None,
    running_score: float | None,
    snapshot_score: float | None,
    lookahead_score: float | None,
    *,
    hard_updates: bool = True,
    greater_is_better: bool = True,
) -> tuple[str, bool]:
    """Returns the decision of Dense ASWA, and whether INIT and HARD take the snapshot or the running weights.

    The snapshot is the mean of the weights since the last decision point, which the look-ahead averages in. The better
    of it and the running model, the snapshot on a tie, takes the role of the running model in `decide`.
    `snapshot_score=None` means that the snapshot was not evaluated.
    """
    from_snapshot = snapshot_score is not None and not is_better(running_score, snapshot_score, greater_is_better)
    restart_score = snapshot_score if from_snapshot else running_score
    rule = {"hard_updates": hard_updates, "greater_is_better": greater_is_better}
    return decide(members, score, restart_score, lookahead_score, **rule), from_snapshot


def next_members(members: int, decision: str) -> int:
    """Returns how many snapshots the ensemble holds after `decision`; INIT and HARD count their own snapshot."""
    if decision in (INIT, HARD):
        return 1
    return members + 1 if decision == SOFT else members


def ensemble_weights(decisions: list[str]) -> list[float]:
    """Returns α, the weight of each decision point's snapshot in the ensemble: Θ_A = Σ α_i Θ_i.

    1/n for the members since the last INIT or HARD, 0 for every other point.
    """
    included: list[int] = []
    for index, decision in enumerate(decisions):
        if decision in (INIT, HARD):
            included = [index]
        elif decision == SOFT:
            included.append(index)
    weights = [0.0] * len(decisions)
    for index in included:
        weights[index] = 1.0 / len(included)
    return weights


def loss_valley(
    scores: list[float | None],
    n_converge: int,
    n_tolerance: int,
    tolerance_ratio: float,
    *,
    greater_is_better: bool,
) -> tuple[int | None, int | None]:
    """Returns the first and the last decision point of SWAD's valley; None for one that is not reached yet.

    It begins at the first of `n_converge` points that none of the others beats, and ends before the first of
    `n_tolerance` points that are all worse than the mean of those by more than `tolerance_ratio`.
    """
    start, limit = None, 0.0
    for index in range(len(scores)):
        if start is None:
            window = scores[max(0, index - n_converge + 1) : index + 1]
            beaten = any(is_better(other, window[0], greater_is_better) for other in window)
            if len(window) == n_converge and is_usable(window[0]) and not beaten:
                usable = [score for score in window if score is not None and is_usable(score)]
                mean = sum(usable) / len(usable)
                if is_better(mean, window[0], greater_is_better):
                    mean = usable[0]  # the best of them; only rounding can make their mean better
                start = index - n_converge + 1
                limit = mean - tolerance_ratio * abs(mean) * (1 if greater_is_better else -1)
        elif index + 1 >= n_tolerance:
            window = scores[index - n_tolerance + 1 : index + 1]
            if all(is_better(limit, score, greater_is_better) for score in window):
                return start, index - n_tolerance
    return start, None
