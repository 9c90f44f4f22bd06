"""Advantages from the rewards of a group: GRPO, Dr.GRPO and RLOO. Pure, float64.

Sources: GRPO, arXiv 2402.03300 section 4.1, with the unbiased standard deviation and
eps 1e-6 (the paper leaves both open); Dr.GRPO, arXiv 2503.20783 section 3; RLOO,
arXiv 2402.14740.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

Kind = Literal["grpo", "dr_grpo", "rloo"]
_EPS = 1e-6


def group_advantages(
    rewards: npt.ArrayLike, kind: Kind = "grpo", negative_scale: float = 1.0
) -> npt.NDArray[np.float64] | None:
    """Turns the rewards of one group's valid members into advantages.

    Args:
      rewards: [G] rewards; members without a valid reward must have been left out.
      kind: `grpo` (R - mean) / (std + eps); `dr_grpo` R - mean; `rloo` R minus the mean of
        the others.
      negative_scale: multiplies negative advantages.

    Returns:
      float64[G], or None when the group says nothing: fewer than two members, or all rewards
      equal. Such a group is dropped, never trained with residues of rounding.

    Raises:
      ValueError: a reward is not finite.
    """
    r = np.asarray(rewards, dtype=np.float64)
    if not np.isfinite(r).all():
        raise ValueError(f"rewards must be finite, got {r.tolist()}; leave unscored members out")
    if r.size < 2 or r.max() == r.min():
        return None
    advantages: npt.NDArray[np.float64] = r - r.mean()
    if kind == "grpo":
        advantages = advantages / (r.std(ddof=1) + _EPS)
    elif kind == "rloo":
        advantages = advantages * (r.size / (r.size - 1))
    return np.where(advantages < 0, advantages * negative_scale, advantages)
