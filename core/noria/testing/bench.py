"""Memory and ops of one device for the length of one test.

Every tensor lies in a buffer of its own between two margins of known bytes, and reading it back checks them: an op that
writes outside of its output is found whatever it computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from noria.api import (
    Buffer,
    BufferUsage,
    Device,
    DeviceBuffer,
    ExpertRows,
    ExpertTable,
    HostBuffer,
    Kernels,
    Op,
    OpQuery,
    Queue,
    QueueKind,
    Span,
    Support,
    Tensor,
    align_up,
    where_entry,
)
from noria.api.errors import FeatureUnsupported
from noria.testing import expected
from noria.testing.blocks import Weights, decode, encode, rounded

MARGIN = 0xA5  # byte around every tensor
POISON = 0xFF  # byte of memory that nothing has been written to: NaN in every type with a float in it


class _Asked(Kernels):
    """Kernels that run nothing and keep what would have been asked of them."""

    def __init__(self, device: Device, answers: Kernels | None = None) -> None:
        super().__init__(device)
        self.answers = answers
        self.queries: list[OpQuery] = []
        self.takes_scratch = False

    def supports(self, query: OpQuery) -> Support:
        return Support.NATIVE if self.answers is None else self.answers.supports(query)

    def dispatch(
        self, queue: Queue, query: OpQuery, reads: Sequence[Span], writes: Sequence[Span], args: dict[str, Any]
    ) -> None:
        self.queries.append(query)
        self.takes_scratch = "scratch" in args


def delay(queue: Queue, milliseconds: float) -> None:
    """Keep a queue busy, where the backend can."""
    with suppress(FeatureUnsupported):
        queue.delay(int(milliseconds * 1e6))


def busy(queue: Queue, milliseconds: float) -> None:
    """Keep a queue busy, or skip the test."""
    try:
        queue.delay(int(milliseconds * 1e6))
    except FeatureUnsupported as error:
        pytest.skip(str(error))


def all_queues(device: Device) -> list[Queue]:
    """The compute queue and every copy queue."""
    return [device.queue(QueueKind.COMPUTE), *(device.queue(QueueKind.COPY, i) for i in range(device.caps.copy_queues))]


class Bench:
    """What a test needs of a device.

    Attributes:
        queue: its compute queue, on which ops run.
        copy_queue: its first copy queue; without one, the compute queue.
        queues: all its queues, the compute queue first.
        activation: `caps.activation_type`.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.caps = device.caps
        self.queue = device.queue(QueueKind.COMPUTE)
        self.copy_queue = device.queue(QueueKind.COPY)
        self.queues = all_queues(device)
        self.activation = self.caps.activation_type
        self._buffers: list[Buffer] = []

    def close(self) -> None:
        """Wait for everything and give all memory back.

        Raises:
            DeviceError: work failed that no test has waited for.
        """
        with ExitStack() as stack:  # last in, first out, whatever raises
            for buffer in self._buffers:
                stack.callback(buffer.free)
            for queue in self.queues:
                stack.callback(queue.synchronize)

    # --- memory --------------------------------------------------------------------------------------------------

    def alloc(self, nbytes: int, usage: BufferUsage = BufferUsage.COMPUTE) -> DeviceBuffer:
        """Device memory of at least this size, freed with the bench."""
        buffer = self.device.alloc(align_up(nbytes, self.caps.copy_alignment), usage=usage, label="conformance")
        self._buffers.append(buffer)
        return buffer

    def host(self, content: NDArray[np.uint8]) -> HostBuffer:
        """Host memory with this content, freed with the bench."""
        buffer = self.device.alloc_host(content.size, label="conformance")
        buffer.array()[:] = content
        self._buffers.append(buffer)
        return buffer

    def write(self, buffer: DeviceBuffer, content: NDArray[np.uint8]) -> None:
        """Fill a whole buffer and wait."""
        self.queue.copy_h2d(buffer.span(), self.host(content).span())
        self.queue.synchronize()

    def content(self, buffer: DeviceBuffer) -> NDArray[np.uint8]:
        """The bytes of a whole buffer, after everything on the compute queue."""
        host = self.host(np.zeros(buffer.nbytes, np.uint8))
        self.queue.copy_d2h(host.span(), buffer.span())
        self.queue.synchronize()
        return host.array().copy()

    def put(self, data: NDArray[np.uint8], usage: BufferUsage = BufferUsage.COMPUTE) -> Span:
        """`data` on the device, between margins."""
        margin = self.caps.buffer_alignment
        image = np.full(align_up(margin + data.size, margin) + margin, MARGIN, np.uint8)
        image[margin : margin + data.size] = data
        buffer = self.alloc(image.size, usage)
        self.write(buffer, image)
        return buffer.span(margin, data.size)

    def get(self, span: Span) -> NDArray[np.uint8]:
        """The bytes of a span that came from `put`, after everything on the compute queue."""
        assert isinstance(span.buffer, DeviceBuffer)
        image = self.content(span.buffer)
        outside = np.concatenate((image[: span.offset], image[span.end :]))
        n_bad = int(np.count_nonzero(outside != MARGIN))
        assert not n_bad, f"{n_bad} bytes outside of a tensor have been overwritten"
        return image[span.offset : span.end]

    # --- tensors -------------------------------------------------------------------------------------------------

    def tensor(self, values: NDArray[Any], type: str = "F32") -> Tensor:
        """`values` as a tensor of a type that gguf can write."""
        return Tensor(self.put(encode(values, type)), type, values.shape)

    def weights(self, weights: Weights) -> Tensor:
        return Tensor(self.put(weights.data, BufferUsage.WEIGHTS), weights.type, weights.shape)

    def empty(self, shape: tuple[int, ...], type: str = "F32") -> Tensor:
        """A tensor full of poison."""
        n = encode(np.zeros(shape), type).size
        return Tensor(self.put(np.full(n, POISON, np.uint8)), type, shape)

    def read(self, tensor: Tensor) -> NDArray[Any]:
        """The numbers of a tensor as I32 or F32."""
        return decode(self.get(tensor.span), tensor.type, tensor.shape)

    def normal(self, rng: np.random.Generator, *shape: int, std: float = 1.0) -> NDArray[np.float32]:
        """Random activations: numbers that `activation` can hold, so that they are the same on every device."""
        return rounded(rng.normal(0, std, shape), self.activation)

    def act(self, values: NDArray[Any]) -> Tensor:
        """`values` as a tensor of activations."""
        return self.tensor(values, self.activation)

    def out(self, *shape: int) -> Tensor:
        """A tensor for activations."""
        return self.empty(shape, self.activation)

    # --- experts -------------------------------------------------------------------------------------------------

    def rows(self, ids: NDArray[Any], weights: NDArray[Any], n_expert: int) -> ExpertRows:
        """Routed rows, sorted on the host. ids, weights: [n_tokens, n_expert_used]."""
        pairs, offsets, positions = expected.sort_rows(ids, n_expert)
        return ExpertRows(
            ids=self.tensor(ids, "I32"),
            weights=self.tensor(weights),
            pairs=self.tensor(pairs, "I32"),
            offsets=self.tensor(offsets, "I32"),
            positions=self.tensor(positions, "I32"),
        )

    def table(self, weights: Weights, experts: Iterable[int] | None = None, n_spans: int = 1) -> ExpertTable:
        """Some experts (all by default) of weights [n_expert, n_out, n_in], in reverse order and with gaps of poison.

        With several spans they are dealt out in turn; the last one is host memory where `caps.host_gather`.
        """
        n_expert, n_out, n_in = weights.shape
        slab_nbytes = weights.data.size // n_expert
        step = align_up(slab_nbytes, self.caps.table_unit)
        present = sorted(range(n_expert) if experts is None else experts)
        where = np.full(n_expert, -1, np.int32)
        spans: list[Span] = []
        for i in range(n_spans):
            mine = present[i::n_spans][::-1]
            image = np.full((2 * len(mine) + 1) * step, POISON, np.uint8)
            for place, e in enumerate(mine):
                at = (2 * place + 1) * step
                image[at : at + slab_nbytes] = weights[e].data
                where[e] = where_entry(i, at, self.caps.table_unit)
            on_host = self.caps.host_gather and n_spans > 1 and i == n_spans - 1
            spans.append(self.host(image).span() if on_host else self.put(image, BufferUsage.EXPERTS))
        return ExpertTable(
            spans=tuple(spans),
            where=self.tensor(where, "I32"),
            type=weights.type,
            n_out=n_out,
            n_in=n_in,
            slab_nbytes=slab_nbytes,
        )

    # --- ops -----------------------------------------------------------------------------------------------------

    def op(self, op: Op, *args: Any, **kwargs: Any) -> None:
        """Enqueue an op, with scratch; skip the test if there is no kernel for it."""
        scratch = self.scratch(op, *args, **kwargs)
        if scratch is not None:
            kwargs["scratch"] = scratch
        getattr(self.device.kernels, op)(self.queue, *args, **kwargs)

    def scratch(self, op: Op, *args: Any, **kwargs: Any) -> Span | None:
        """Poisoned scratch of the size an op asks for; skip the test if there is no kernel for it."""
        asked = _Asked(self.device)
        getattr(asked, op)(self.queue, *args, **kwargs)
        kernels = self.device.kernels
        nbytes = kernels.scratch_nbytes(asked.queries[0])
        scratch = self.put(np.full(nbytes, POISON, np.uint8)) if asked.takes_scratch and nbytes else None
        parts = _Asked(self.device, kernels)
        getattr(parts, op)(self.queue, *args, **(kwargs if scratch is None else kwargs | {"scratch": scratch}))
        for query in parts.queries:
            support = kernels.supports(query)
            if not support.usable:
                pytest.skip(f"{support.upper()}: {query}")
        return scratch
