"""Is a difference between two arms more than the noise of the seed? Paired over seeds, with Student's interval."""

from __future__ import annotations

import math
import statistics
from typing import NamedTuple

# Two-sided 95 % quantiles of Student's t for 2, 3, ... degrees of freedom; beyond: the normal distribution's
T_95 = {2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 14: 2.145, 19: 2.093, 29: 2.045}
FEWEST = 3  # seeds; below it an interval says nothing


class Paired(NamedTuple):
    mean: float  # of arm - baseline, over the seeds
    low: float
    high: float  # 95 % interval of that mean
    spread: float  # standard deviation of the baseline over the seeds
    seeds: int

    @property
    def stands_out(self) -> bool:
        return not self.low <= 0 <= self.high

    def __str__(self) -> str:
        said = "stands out of" if self.stands_out else "does not stand out of"
        interval = f"95 % interval {self.low:+.2e} to {self.high:+.2e}"
        return (
            f"{self.mean:+.2e} ({interval}, {self.seeds} seeds) {said} the noise; seed-to-seed spread {self.spread:.2e}"
        )


def paired(arm: list[float], baseline: list[float]) -> Paired:
    """Raises ValueError for fewer than three pairs: no verdict from one noisy pair."""
    if len(arm) != len(baseline) or len(arm) < FEWEST:
        raise ValueError(f"{FEWEST} or more pairs are needed, there are {min(len(arm), len(baseline))}")
    gaps = [one - other for one, other in zip(arm, baseline, strict=True)]
    mean, freedom = statistics.fmean(gaps), len(gaps) - 1
    quantile = T_95[max(known for known in T_95 if known <= freedom)]  # the next smaller one: a wider interval
    half = quantile * statistics.stdev(gaps) / math.sqrt(len(gaps))
    return Paired(mean, mean - half, mean + half, statistics.stdev(baseline), len(gaps))
