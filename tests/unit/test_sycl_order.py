"""A wait that is left out between a copy and its reader shows: the tests of the ring are worth something here."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from noria.api import Event, QueueKind
from noria.testing.bench import Bench
from noria.testing.hazards import HazardChecker
from noria.testing.suite import RingSuite
from noria_sycl.backend import SyclBackend
from noria_sycl.queue import SyclQueue


@pytest.fixture(params=["off", "on"], ids=["no thread", "copy thread"])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    """PoCL, whose queues do run side by side on any number of cores."""
    options: dict[str, Any] = {"copy_thread": request.param, "runtime": "opencl"}
    backend = SyclBackend()
    probe = backend.probe(options)
    pocl = [info.index for info in probe.devices if info.driver.startswith("Portable")]
    if not pocl:
        pytest.skip(f"PoCL is not here: {probe.reason or probe.devices}")
    with backend.open(pocl[0], options) as device:
        bench = Bench(device)
        yield bench
        bench.close()


class Late:
    """Random numbers by which the ring of the kit delays one of its queues, 0 copy and 1 compute, at every step."""

    def __init__(self, queue: int) -> None:
        self._queue = queue
        self._rng = np.random.default_rng(1)

    def random(self) -> float:
        return 0.0

    def uniform(self, low: float, high: float) -> float:
        return high

    def integers(self, *args: Any, **kwargs: Any) -> Any:
        return self._queue if args == (2,) else self._rng.integers(*args, **kwargs)


@pytest.mark.parametrize(
    ("careless", "late"), [(QueueKind.COMPUTE, 0), (QueueKind.COPY, 1)], ids=["without ready", "without free"]
)
def test_a_ring_without_a_wait_gives_other_bytes(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, careless: QueueKind, late: int
) -> None:
    """Compute that does not wait for a late copy, and a copy that does not wait for late compute."""

    def wait_now(queue: SyclQueue, event: Event) -> None:
        if queue.kind is not careless:
            real(queue, event)

    real = SyclQueue._wait_now
    monkeypatch.setattr(SyclQueue, "_wait_now", wait_now)
    with pytest.raises(AssertionError, match="was not what its reader found"):
        RingSuite().test_streamed_bytes(bench, Late(late), 2)  # type: ignore[arg-type]


def test_the_ring_as_it_is_has_no_hazard(bench: Bench) -> None:
    bench.device.observer = checker = HazardChecker()
    RingSuite().test_streamed_bytes(bench, np.random.default_rng(1), 2)
    checker.check()
