"""From a paired ratio to what may be said of it: an interval, and who is faster."""

from __future__ import annotations

from math import exp, log
from statistics import NormalDist
from typing import Literal

LEVEL = 0.95
Verdict = Literal["faster", "slower", "even"]


def interval(ratio: float, error: float, level: float = LEVEL) -> tuple[float, float]:
    """The confidence interval of a ratio.

    Args:
        ratio: the median of paired ratios.
        error: standard error of its logarithm, which :meth:`Race.compare` widens where samples are few.
        level: how often such an interval holds the true ratio.

    Raises:
        ValueError: the ratio is not positive, the error is negative, or the level is not between 0 and 1.
    """
    if not ratio > 0.0 or not error >= 0.0 or not 0.0 < level < 1.0:
        raise ValueError(
            f"an interval needs a positive ratio, an error of at least 0 and a level between 0 and 1, "
            f"got {ratio}, {error} and {level}"
        )
    reach = NormalDist().inv_cdf((1.0 + level) / 2.0) * error
    return exp(log(ratio) - reach), exp(log(ratio) + reach)


def verdict(low: float, high: float) -> Verdict:
    """What an interval of our speed over another's says of ours."""
    if low > 1.0:
        return "faster"
    return "slower" if high < 1.0 else "even"


def half_width(ratio: float, low: float, high: float) -> str:
    """Half of an interval in percent of its ratio, e.g. ``±0.4%``."""
    return f"±{(high - low) / 2.0 / ratio:.1%}"


def ratio_text(ratio: float) -> str:
    """A ratio with two decimals, or three where two would hide which side of 1 it is on."""
    return f"{ratio:.3f}" if abs(ratio - 1.0) < 0.005 else f"{ratio:.2f}"
