"""Student's t distribution compared with SciPy."""

import math

import pytest
import scipy.stats

from overt.metrics.student_t import quantile, two_sided_p

DEGREES = (0.34, 0.5, 1.0, 1.7, 2.0, 3.3, 9.0, 50.0, 999.0, 12345.6)


@pytest.mark.parametrize("df", DEGREES)
def test_tails_agree_with_scipy(df: float) -> None:
    for t in (0.0, 1e-6, 0.01, 0.3, 1.0, 2.0, -2.0, 5.0, 30.0, 300.0):
        wanted = 2 * scipy.stats.t.sf(abs(t), df)
        assert two_sided_p(t, df) == pytest.approx(wanted, rel=1e-9, abs=1e-300)


@pytest.mark.parametrize("df", DEGREES)
def test_quantiles_agree_with_scipy(df: float) -> None:
    for confidence in (0.0, 0.5, 0.9, 0.95, 0.999):
        wanted = scipy.stats.t.ppf((1 + confidence) / 2, df)
        assert quantile(confidence, df) == pytest.approx(wanted, rel=1e-8, abs=1e-12)


def test_many_degrees_of_freedom_approach_the_normal_distribution() -> None:
    assert quantile(0.95, 1e9) == pytest.approx(1.959964, abs=1e-6)
    assert two_sided_p(1.959964, math.inf) == pytest.approx(0.05, abs=1e-6)


def test_limits_and_nan() -> None:
    assert quantile(1.0, 5.0) == math.inf and two_sided_p(math.inf, 5.0) == 0
    assert math.isnan(quantile(0.95, math.nan)) and math.isnan(two_sided_p(1.0, 0.0))
    assert math.isnan(two_sided_p(math.nan, 4.0))
