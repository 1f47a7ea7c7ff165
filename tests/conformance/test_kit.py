"""The kit finds what is wrong: devices that are broken on purpose fail the cases that they should."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from noria.api import BufferUsage, OpQuery, QueueKind, Support
from noria.api.errors import DeviceError
from noria.gguf import SUPPORTED_TYPES
from noria.testing import cases
from noria.testing.accuracy import assert_close, assert_same_bits
from noria.testing.bench import Bench
from noria.testing.blocks import random_weights, wild_weights
from noria.testing.fixtures import OpenDevice, find_backend
from noria.testing.hazards import HazardChecker
from noria.testing.suite import BasicSuite, OpsSuite, RingSuite

RNG_SEED = 1


@pytest.fixture
def bench() -> Iterator[Bench]:
    backend, options = find_backend("reference")
    with backend.open(0, options) as device:
        bench = Bench(device)
        yield bench
        bench.close()


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(RNG_SEED)


# --- queues ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(QueueKind))
def test_ring_without_a_wait_is_found(
    bench: Bench, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, kind: QueueKind
) -> None:
    """Compute that does not wait for *ready*, or copies that do not wait for *free*."""
    monkeypatch.setattr(bench.device.queue(kind), "_wait", lambda event: None)
    with pytest.raises(AssertionError, match="was not what its reader found"):
        RingSuite().test_streamed_bytes(bench, rng, 2)
    with pytest.raises(AssertionError, match="layer"):
        RingSuite().test_streamed_experts(bench, rng, 2, "packed", "F32")


@pytest.mark.parametrize("seed", range(3))
def test_queues_that_do_not_wait_are_found(bench: Bench, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    for queue in bench.queues:
        monkeypatch.setattr(queue, "_wait", lambda event: None)
    with pytest.raises(AssertionError, match="too early or too late"):
        BasicSuite().test_random_graphs_of_copies(bench, seed)


@pytest.mark.parametrize("n_slots", [2, 3, 4])
def test_ring_and_graphs_of_the_kit_have_no_hazards(bench: Bench, rng: np.random.Generator, n_slots: int) -> None:
    """What the kit enqueues has every wait that it needs, so a backend that fails on it is at fault."""
    checker = bench.device.observer = HazardChecker()
    RingSuite().test_streamed_bytes(bench, rng, n_slots)
    BasicSuite().test_random_graphs_of_copies(bench, n_slots)
    checker.check()


def test_copies_that_are_too_long_are_found(
    bench: Bench, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = bench.queue._copy_d2d
    unit = bench.caps.copy_alignment

    def too_long(dst: Any, src: Any) -> None:
        room = min(dst.buffer.nbytes - dst.end, src.buffer.nbytes - src.end, unit)
        copy(dst.buffer.span(dst.offset, dst.nbytes + room), src.buffer.span(src.offset, src.nbytes + room))

    monkeypatch.setattr(bench.queue, "_copy_d2d", too_long)
    with pytest.raises(AssertionError, match="from offset"):
        BasicSuite().test_a_part_of_a_buffer(bench, rng, "d2d")


# --- ops -------------------------------------------------------------------------------------------------------------


def test_op_that_is_only_claimed_fails(bench: Bench, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that raises is no skip."""

    def dispatch(*args: Any) -> None:
        raise NotImplementedError("not written yet")

    monkeypatch.setattr(bench.device.kernels, "dispatch", dispatch)
    with pytest.raises(NotImplementedError):
        OpsSuite().test_matmul(bench, rng, cases.MATMUL[0])


@pytest.mark.parametrize("support", [Support.MISSING, Support.IMPOSSIBLE])
def test_missing_op_is_skipped(
    bench: Bench, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, support: Support
) -> None:
    def supports(query: OpQuery) -> Support:
        return support

    monkeypatch.setattr(bench.device.kernels, "supports", supports)
    with pytest.raises(pytest.skip.Exception, match=rf"{support.upper()}: matmul\[F32/F32\] rows=1 dims=72x512"):
        OpsSuite().test_matmul(bench, rng, cases.MATMUL[0])


def test_op_that_ignores_an_argument_fails(
    bench: Bench, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention without its window."""
    real = bench.device.kernels.dispatch

    def dispatch(queue: Any, query: Any, reads: Any, writes: Any, args: dict[str, Any]) -> None:
        real(queue, query, reads, writes, args | {"window": None})

    monkeypatch.setattr(bench.device.kernels, "dispatch", dispatch)
    with pytest.raises(AssertionError, match="NMSE"):
        OpsSuite().test_attention(bench, rng, next(case for case in cases.ATTENTION if case.window == 5))


def test_writing_outside_is_found(bench: Bench, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel whose result is right, and a few bytes longer than its output."""
    real = bench.device.kernels.dispatch

    def dispatch(queue: Any, query: Any, reads: Any, writes: Any, args: dict[str, Any]) -> None:
        real(queue, query, reads, writes, args)
        out = args["out"].span
        queue.copy_d2d(out.buffer.span(out.end, 16), out.sub(0, 16))

    monkeypatch.setattr(bench.device.kernels, "dispatch", dispatch)
    with pytest.raises(AssertionError, match="bytes outside of a tensor have been overwritten"):
        OpsSuite().test_scale(bench, rng, in_place=False)


def test_broken_device_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work that failed in one case does not fail the cases after it."""
    backend, options = find_backend("reference")
    opened = OpenDevice(lambda: backend.open(0, options))
    first = opened.device()
    opened.close_if_broken()
    assert opened.device() is first

    def synchronize() -> None:
        raise DeviceError(first.info.id, "an op failed")

    monkeypatch.setattr(first.queue(QueueKind.COMPUTE), "synchronize", synchronize)
    opened.close_if_broken()
    assert opened.device() is not first
    opened.device().alloc(4096, usage=BufferUsage.COMPUTE, label="works")
    opened.close()


# --- tools -----------------------------------------------------------------------------------------------------------


def test_comparison_finds_one_wrong_element(rng: np.random.Generator) -> None:
    """The mean alone would let it pass."""
    want = rng.normal(0, 1, (100, 100))
    assert_close(want + rng.normal(0, 1e-2, want.shape), want, 1e-3)
    got = want.copy()
    got[37, 5] += 1
    with pytest.raises(AssertionError, match=r"at \(37, 5\)"):
        assert_close(got, want, 1e-3)
    got[37, 5] = np.nan
    with pytest.raises(AssertionError, match="not finite"):
        assert_close(got, want, 1e-3)
    with pytest.raises(AssertionError, match="NMSE"):
        assert_close(want * 1.1, want, 1e-3)


def test_comparison_of_bits() -> None:
    assert_same_bits(np.array([np.nan, 1], np.float32), np.array([np.nan, 1], np.float32))
    with pytest.raises(AssertionError, match=r"1 of 2 numbers differ in bits, the first at \(1,\)"):
        assert_same_bits(np.array([1.0, -0.0]), np.array([1.0, 0.0]))


@pytest.mark.parametrize("type", SUPPORTED_TYPES)
def test_random_weights_are_sane(type: str, rng: np.random.Generator) -> None:
    """Random bytes decode to finite numbers of the size asked for, and no bit of a block is always the same."""
    weights = random_weights(rng, type, (64, 512), std=0.1)
    assert np.isfinite(weights.values).all()
    assert 0.05 < weights.values.std() < 0.2
    assert_same_bits(weights[3].values, weights.values[3])
    wild = wild_weights(rng, type, (64, 512))
    assert np.isfinite(wild.values).all()
    assert np.abs(wild.values).max() > 1e3 * np.median(np.abs(wild.values))
