"""A test of counts that is exact however few counts a cell is expected to have."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def multinomial_p_value(
    counts: npt.NDArray[np.int64], probs: npt.NDArray[np.float64], *, num_tables: int = 99_999
) -> float:
    """Return the p-value of the likelihood-ratio test that counts `[K]` were drawn with probabilities `[K]`.

    The ratio is compared with those of simulated tables (Davison and Hinkley, 1997, section 4.2), so a true hypothesis
    has a p-value of at most a with probability at most a. With the chi-square distribution in their place, cells that
    expect less than five counts raise that probability, here by more than a factor of ten.
    """
    probs = probs / probs.sum()
    expected = counts.sum() * probs
    tables = np.vstack([counts, np.random.default_rng(0).multinomial(counts.sum(), probs, size=num_tables)])
    # x log x is 0 at 0.
    ratios = (tables * np.log(np.maximum(tables, 1) / expected)).sum(1)
    # Tables with the same cells may have sums that differ by rounding.
    return float((ratios >= ratios[0] - 1e-9).mean())
