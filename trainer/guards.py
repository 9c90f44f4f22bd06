"""Guards: bands that the numbers of a healthy RL stage do not leave. Pure.

    step's scalars --observe--> bands left, for how many steps in a row --> Verdict: trip, or not

A band is left by a value beyond its limit, or one that is not finite; a step without the value (no
token was trained) says nothing of it. A guard trips when one band was left in `patience_steps`
steps in a row, and then counts from zero again. A loss or gradient that is not finite is no band:
Learner.update refuses it before the weights change, and `rl` stops at it at once.

What a trip means is RlStage's to do. Fed with the records of a stage's earlier steps, a new
process counts on where the last one was.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from trainer.config import GuardsConfig


@dataclasses.dataclass(frozen=True)
class Band:
    """One limit on one metric."""

    setting: str  # field of GuardsConfig
    metric: str  # name of the step's scalar
    is_upper: bool


BANDS = (
    Band("max_gap_mean_nats", "gap_total_mean_nats", True),
    Band("max_gap_p99_nats", "gap_total_p99_nats", True),
    Band("min_ess_token", "ess_token_raw_rollout_to_trainer", False),
    Band("min_entropy_nats", "entropy_mean_nats", False),
    Band("max_entropy_nats", "entropy_mean_nats", True),
    Band("max_grad_norm", "grad_norm", True),
)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What a step's numbers say."""

    left: tuple[Band, ...] = ()
    """Bands that this step left."""
    reason: str = ""
    """Set when a guard trips: value, band, setting and steps, in one line."""

    @property
    def scalars(self) -> dict[str, float]:
        """For the step's metrics; empty in a healthy step."""
        out = {f"guard_left_{band.setting}": 1.0 for band in self.left}
        return out | ({"guard_tripped": 1.0} if self.reason else {})


class Guards:
    """Counts, for each band, the steps in a row that left it."""

    def __init__(self, config: GuardsConfig) -> None:
        self._config = config
        self._counts = dict.fromkeys(BANDS, 0)

    def observe(self, step: int, scalars: Mapping[str, float]) -> Verdict:
        """Takes in the scalars of `step`; call it once a step, in order."""
        left: list[Band] = []
        for band in BANDS:
            limit, value = getattr(self._config, band.setting), scalars.get(band.metric)
            if limit is None or value is None:
                continue
            inside = value <= limit if band.is_upper else value >= limit
            if inside and math.isfinite(value):
                self._counts[band] = 0
                continue
            left.append(band)
            self._counts[band] += 1
        patience = self._config.patience_steps
        tripped = [band for band in left if self._counts[band] >= patience]
        if not tripped:
            return Verdict(tuple(left))
        reasons = [self._told(band, scalars[band.metric]) for band in tripped]
        self._counts = dict.fromkeys(BANDS, 0)
        lasted = f", for {patience} steps in a row" if patience > 1 else ""
        return Verdict(tuple(left), f"{'; '.join(reasons)} (step {step}{lasted})")

    def _told(self, band: Band, value: float) -> str:
        limit = getattr(self._config, band.setting)
        beyond = "above" if band.is_upper else "below"
        if not math.isfinite(value):
            beyond = "not within"
        return (
            f"{band.metric} is {value:.4g}, {beyond} trainer.rl.guards.{band.setting} = {limit:g}"
        )
