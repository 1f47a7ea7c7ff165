"""What a simulated device says when the host asks which experts were used: what its kernels' costs assume."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from noria.api import BufferUsage, ExpertRows, QueueKind, Tensor, tensor_nbytes
from noria.api.errors import FeatureUnsupported
from noria.builtin.sim import SimDevice, open_sim


def tensor(device: SimDevice, type: str, *shape: int) -> Tensor:
    buffer = device.alloc(tensor_nbytes(type, shape), usage=BufferUsage.COMPUTE, label="tensor")
    return Tensor(buffer.span(), type, shape)


def rows_of(device: SimDevice, n_tokens: int, n_expert: int, n_expert_used: int) -> ExpertRows:
    return ExpertRows(
        ids=tensor(device, "I32", n_tokens, n_expert_used),
        weights=tensor(device, "F32", n_tokens, n_expert_used),
        pairs=tensor(device, "I32", n_tokens * n_expert_used),
        offsets=tensor(device, "I32", n_expert + 1),
        positions=tensor(device, "I32", n_tokens, n_expert_used),
    )


def sorted_offsets(device: SimDevice, rows: ExpertRows) -> npt.NDArray[np.int32]:
    """`rows.offsets` as the host reads them after a sort."""
    queue = device.queue(QueueKind.COMPUTE)
    host = device.alloc_host(rows.offsets.span.nbytes, label="offsets")
    device.kernels.sort_rows(queue, rows)
    queue.copy_d2h(host.span(), rows.offsets.span)
    queue.synchronize()
    offsets: npt.NDArray[np.int32] = host.span().host_view(np.int32).copy()
    return offsets


@pytest.mark.parametrize(("n_expert", "n_expert_used"), [(256, 8), (128, 8), (8, 2), (60, 4), (16, 16), (1, 1)])
@pytest.mark.parametrize("n_tokens", [1, 2, 7, 40, 2048])
def test_rows_fall_evenly_on_as_many_experts_as_random_routing_uses(
    n_tokens: int, n_expert: int, n_expert_used: int
) -> None:
    device = open_sim()
    offsets = sorted_offsets(device, rows_of(device, n_tokens, n_expert, n_expert_used))
    assert offsets[0] == 0
    assert offsets[-1] == n_tokens * n_expert_used
    n_rows = np.diff(offsets)
    n_used = np.count_nonzero(n_rows)
    assert n_used == round(n_expert * (1 - (1 - n_expert_used / n_expert) ** n_tokens))
    assert n_rows.max() - n_rows[n_rows > 0].min() <= 1
    assert n_rows.max() <= n_tokens, "a token chooses an expert once"
    if 2 * n_used <= n_expert:
        assert np.diff(np.flatnonzero(n_rows)).min() >= n_expert // n_used, "experts are at equal distances"


def test_other_experts_each_time_and_the_same_for_a_seed() -> None:
    def offsets(seed: int) -> list[list[int]]:
        device = open_sim(seed=seed)
        rows = rows_of(device, 1, 256, 8)
        return [sorted_offsets(device, rows).tolist() for _ in range(4)]

    assert offsets(1) == offsets(1)
    assert offsets(1) != offsets(2)
    assert len({str(o) for o in offsets(1)}) > 1


def test_nothing_is_known_before_a_sort_and_elsewhere() -> None:
    device = open_sim()
    queue, rows = device.queue(QueueKind.COMPUTE), rows_of(device, 4, 15, 4)
    host = device.alloc_host(64, label="host")
    host.array()[:] = 7
    with queue.program("sort") as program:
        device.kernels.sort_rows(queue, rows)
    queue.copy_d2h(host.span(), rows.offsets.span)
    queue.run(program)
    queue.copy_d2h(host.span(), rows.ids.span)
    assert (host.array() == 7).all()


def test_a_device_that_cannot_page_lock_a_mapping() -> None:
    device = open_sim(host_register="no")
    assert not device.caps.host_register
    with pytest.raises(FeatureUnsupported, match="cannot page-lock existing memory"):
        device.register_host(memoryview(bytearray(64)), label="mapped")
    assert device.alloc_host(64, label="pinned").pinned
