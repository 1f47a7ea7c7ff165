"""Weights as f32 on the reference: its own dequantizers, and what it keeps of what they made."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from noria.api import BufferUsage, DeviceBuffer, Op, Span, Tensor
from noria.builtin.reference import OPTIONS, ReferenceBackend
from noria.builtin.reference.kernels import ReferenceKernels
from noria.builtin.reference.weights import Weights, to_shape
from noria.gguf import SUPPORTED_TYPES, dequantize
from noria.testing.accuracy import assert_same_bits
from noria.testing.bench import Bench
from noria.testing.blocks import random_weights, wild_weights

SHAPE = (6, 512)


@pytest.fixture
def bench() -> Iterator[Bench]:
    with ReferenceBackend().open(0, {name: spec.default for name, spec in OPTIONS.items()}) as device:
        bench = Bench(device)
        yield bench
        bench.close()


@pytest.mark.parametrize("type", SUPPORTED_TYPES)
def test_bits_are_those_of_gguf(type: str) -> None:
    weights = wild_weights(np.random.default_rng(5), type, SHAPE)
    assert_same_bits(to_shape(weights.data, type, SHAPE), dequantize(type, weights.data, SHAPE))


class Stored:
    """Q8_0 weights in a device buffer of some usage, and a count of how often they were dequantized."""

    def __init__(self, bench: Bench, usage: BufferUsage, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rng = np.random.default_rng(7)
        self.bench = bench
        self.content = random_weights(self.rng, "Q8_0", SHAPE)
        self.buffer: DeviceBuffer = bench.alloc(self.content.data.size, usage)
        bench.write(self.buffer, self.content.data)
        self.n_dequantized = 0

        def counted(data: NDArray[np.uint8], type: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
            self.n_dequantized += 1
            return to_shape(data, type, shape)

        monkeypatch.setattr("noria.builtin.reference.weights.to_shape", counted)

    def product(self) -> NDArray[np.float32]:
        bench, x = self.bench, np.eye(1, SHAPE[1], 3, dtype=np.float32)
        out = bench.out(1, SHAPE[0])
        bench.op(Op.MATMUL, out, Tensor(self.buffer.span(), "Q8_0", SHAPE), bench.act(x))
        return np.asarray(bench.read(out)[0])

    def assert_current(self) -> None:
        assert_same_bits(self.product(), self.content.values[:, 3])


@pytest.mark.parametrize(
    ("usage", "n"), [(BufferUsage.WEIGHTS, 1), (BufferUsage.EXPERTS, 1), (BufferUsage.SLOT, 3), (BufferUsage.CACHE, 3)]
)
def test_kept_where_it_lasts(bench: Bench, monkeypatch: pytest.MonkeyPatch, usage: BufferUsage, n: int) -> None:
    stored = Stored(bench, usage, monkeypatch)
    for _ in range(3):
        stored.assert_current()
    assert stored.n_dequantized == n


@pytest.mark.parametrize("writer", ["h2d", "d2d", "op"])
def test_out_of_date_after_a_write(bench: Bench, monkeypatch: pytest.MonkeyPatch, writer: str) -> None:
    """By whatever writes to the buffer, and on whichever queue."""
    stored = Stored(bench, BufferUsage.WEIGHTS, monkeypatch)
    stored.assert_current()
    stored.content = random_weights(stored.rng, "Q8_0", SHAPE)
    new: NDArray[np.uint8] = stored.content.data
    whole: Span = stored.buffer.span()
    if writer == "h2d":
        bench.copy_queue.copy_h2d(whole, bench.host(new).span())
    elif writer == "d2d":
        bench.copy_queue.copy_d2d(whole, bench.put(new))
    else:  # the bytes as one row of numbers
        shape = (1, new.size // 4)
        out, x = Tensor(whole, "F32", shape), Tensor(bench.put(new), "F32", shape)
        bench.device.kernels.get_rows(bench.queue, out, x, bench.tensor(np.zeros(1), "I32"))
    bench.copy_queue.synchronize()
    stored.assert_current()
    assert stored.n_dequantized == 2


def test_forgotten_when_freed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = Stored(bench, BufferUsage.WEIGHTS, monkeypatch)
    kernels = bench.device.kernels
    assert isinstance(kernels, ReferenceKernels)
    stored.product()
    assert kernels.weights.kept_nbytes == SHAPE[0] * SHAPE[1] * 4
    stored.buffer.free()
    assert kernels.weights.kept_nbytes == 0


def test_first_come_stays(bench: Bench) -> None:
    """A full budget changes nothing for what is kept, and results are right without it."""
    rng = np.random.default_rng(3)
    contents = [random_weights(rng, "Q4_K", SHAPE) for _ in range(3)]
    spans = [bench.put(content.data, BufferUsage.WEIGHTS) for content in contents]
    weights = Weights(budget_nbytes=2 * SHAPE[0] * SHAPE[1] * 4 + 100)
    first, second, third = ([weights.get(span, "Q4_K", SHAPE) for span in spans] for _ in range(3))
    for content, values in zip(contents, first, strict=True):
        assert_same_bits(values, content.values)
    assert [a is b is c for a, b, c in zip(first, second, third, strict=True)] == [True, True, False]
    assert weights.kept_nbytes == 2 * SHAPE[0] * SHAPE[1] * 4
