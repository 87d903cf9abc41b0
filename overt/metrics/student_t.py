"""Student's t distribution: two-sided tail probability and quantile, without SciPy."""

import math
from functools import lru_cache
from statistics import NormalDist

_NORMAL_FROM = 1e7  # degrees of freedom from which t and the normal distribution agree to 1e-7
_LEAST, _STEPS = 1e-300, 10_000  # Lentz's smallest divisor; more steps than any df needs


def two_sided_p(t: float, df: float) -> float:
    """Compute P(|T| >= |t|) for `df` degrees of freedom, which need not be an integer.

    >>> round(two_sided_p(2.776, 4.0), 3)
    0.05
    """
    if math.isnan(t) or math.isnan(df) or df <= 0:
        return math.nan
    if math.isinf(t):
        return 0.0
    if df > _NORMAL_FROM:
        return math.erfc(abs(t) / math.sqrt(2))
    square = t * t
    return _incomplete_beta(df / 2, 0.5, df / (df + square), square / (df + square))


@lru_cache(maxsize=4096)
def quantile(confidence: float, df: float) -> float:
    """Compute the t below which |T| stays with this probability: 0.95 and 4 give 2.776."""
    if math.isnan(df) or df <= 0:
        return math.nan
    if confidence >= 1:
        return math.inf
    if df > _NORMAL_FROM:
        return NormalDist().inv_cdf((1 + confidence) / 2)
    tail = 1 - confidence
    if tail >= 1:
        return 0.0
    t = NormalDist().inv_cdf((1 + confidence) / 2)
    for _ in range(_STEPS):  # Newton's method on log p over log t, which is concave: it converges
        p = two_sided_p(t, df)
        step = math.log(p / tail) * p / (2 * _density(t, df) * t)
        t *= math.exp(step)
        if abs(step) < 1e-13:
            break
    return t


def _density(t: float, df: float) -> float:
    logs = math.lgamma((df + 1) / 2) - math.lgamma(df / 2) - math.log(df * math.pi) / 2
    return math.exp(logs - (df + 1) / 2 * math.log1p(t * t / df))


def _incomplete_beta(a: float, b: float, x: float, rest: float) -> float:
    """Compute the regularized incomplete beta function at x; `rest` is 1 - x without rounding."""
    if x <= 0 or rest <= 0:
        return 0.0 if x <= 0 else 1.0
    logs = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    front = math.exp(logs + a * math.log(x) + b * math.log(rest))
    if x < (a + 1) / (a + b + 2):  # the side where the continued fraction converges fast
        return front * _fraction(a, b, x) / a
    return 1 - front * _fraction(b, a, rest) / b


def _fraction(a: float, b: float, x: float) -> float:
    """Evaluate the continued fraction of the incomplete beta function (Lentz's method)."""
    c, d = 1.0, 1 / _nonzero(1 - (a + b) * x / (a + 1))
    found = d
    for m in range(1, _STEPS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1 / _nonzero(1 + term * d)
            c = _nonzero(1 + term / c)
            found *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return found


def _nonzero(value: float) -> float:
    return value if abs(value) > _LEAST else _LEAST
