"""How near a result must be, and the comparison."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

# Normalized mean squared error allowed by the type of the activations: of sums over many terms, and of the rest.
SUM_NMSE = {"F32": 1e-8, "F16": 1e-3, "BF16": 1e-3}
ELEMENT_NMSE = {"F32": 1e-10, "F16": 1e-3, "BF16": 1e-3}
OUTLIER = 10.0  # no element may be further off than this many times the root mean square error allowed


def nmse(got: NDArray[Any], want: NDArray[Any]) -> float:
    """Mean squared error divided by the mean square of `want`."""
    error, power = np.square(got - want).sum(), np.square(want).sum()
    return float(error / power) if power else float(error)


def assert_close(got: NDArray[Any], want: NDArray[Any], tolerance: float, what: str = "result") -> None:
    """Raise an AssertionError unless `got` is finite, near `want` as a whole, and nowhere far from it.

    The mean alone would let one wrong element in a large tensor pass.
    """
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, f"{what} has shape {got.shape}, expected {want.shape}"
    if not want.size:
        return
    n_bad = int(np.count_nonzero(~np.isfinite(got)))
    assert not n_bad, f"{what}: {n_bad} of {got.size} numbers are not finite, the first at {_first(~np.isfinite(got))}"
    error = nmse(got, want)
    assert error <= tolerance, f"{what}: NMSE {error:.2e} is above {tolerance:.0e}"
    limit = OUTLIER * np.sqrt(tolerance * np.mean(np.square(want)))
    off = np.abs(got - want)
    if off.max() > limit:
        at = _first(off == off.max())
        raise AssertionError(f"{what}: {got[at]:.6g} at {at}, expected {want[at]:.6g} within {limit:.1e}")


def assert_same_bits(got: NDArray[Any], want: NDArray[Any], what: str = "result") -> None:
    """Raise an AssertionError unless the two arrays have the same bytes."""
    assert (got.shape, got.dtype) == (want.shape, want.dtype), (
        f"{what} is {got.dtype}{got.shape}, expected {want.dtype}{want.shape}"
    )
    if got.tobytes() == want.tobytes():
        return
    raw = np.dtype(f"u{got.dtype.itemsize}")
    differ = np.ascontiguousarray(got).view(raw) != np.ascontiguousarray(want).view(raw)
    at = _first(differ)
    raise AssertionError(
        f"{what}: {int(differ.sum())} of {got.size} numbers differ in bits, the first at {at}: {got[at]} and {want[at]}"
    )


def _first(where: NDArray[Any]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.argwhere(where)[0])
