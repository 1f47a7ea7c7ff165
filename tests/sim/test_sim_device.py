"""The simulated device: what its virtual time says about overlap, order, the link and memory."""

from __future__ import annotations

import resource
from collections.abc import Callable
from functools import partial

import pytest

from noria.api import (
    BufferUsage,
    DeviceBuffer,
    ExpertRows,
    ExpertTable,
    Glu,
    KVView,
    Op,
    OpQuery,
    Queue,
    QueueKind,
    RowWindow,
    Span,
    Support,
    Tensor,
    tensor_nbytes,
)
from noria.api.errors import (
    BackendUnavailable,
    ConfigError,
    DeviceError,
    DeviceTimeout,
    KernelLaunchError,
    OutOfDeviceMemory,
)
from noria.builtin.sim import OPTIONS, Lane, SimBackend, SimDevice, VirtualClock, load_profiles, open_sim

MIB = 1024 * 1024
DEFAULTS = {name: spec.default for name, spec in OPTIONS.items()}


def device_buffer(device: SimDevice, nbytes: int) -> DeviceBuffer:
    return device.alloc(nbytes, usage=BufferUsage.COMPUTE, label="test")


def tensor(device: SimDevice, type_: str, *shape: int) -> Tensor:
    return Tensor(device_buffer(device, tensor_nbytes(type_, shape)).span(), type_, shape)


class Bench:
    """A copy and a kernel that take about as long as each other, on different memory: 10 ms on the default profile."""

    def __init__(self, **options: bool | int | float | str) -> None:
        self.device = open_sim(**{"tflops": 10.0, "link_gbps": 20.0, **options})
        self.compute = self.device.queue(QueueKind.COMPUTE)
        self.copy = self.device.queue(QueueKind.COPY)
        self.src = self.device.alloc_host(200_000_000, label="experts")
        self.dst = device_buffer(self.device, 200_000_000)
        self.w = tensor(self.device, "F16", 5_000, 5_000)
        self.x, self.out = tensor(self.device, "F16", 2_000, 5_000), tensor(self.device, "F32", 2_000, 5_000)

    def do_copy(self, queue: Queue | None = None) -> None:
        (queue or self.copy).copy_h2d(self.dst.span(), self.src.span())

    def do_kernel(self) -> None:
        self.device.kernels.matmul(self.compute, self.out, self.w, self.x)

    def finish_ms(self) -> float:
        for queue in (self.copy, self.compute):
            queue.synchronize()
        return self.device.clock.now_ns / 1e6


# --- what overlaps ----------------------------------------------------------------------------------------------------


def test_copy_and_compute_overlap_on_two_queues() -> None:
    bench = Bench()
    bench.do_copy()
    bench.do_kernel()
    assert bench.device.clock.now_ns < 100_000  # neither call waited
    assert bench.finish_ms() == pytest.approx(10, rel=0.01)
    assert bench.device.busy_ns(bench.copy) == pytest.approx(10e6, rel=0.01)
    assert bench.device.busy_ns(bench.compute) == pytest.approx(10e6, rel=0.01)


def test_without_copy_queues_copies_run_in_line() -> None:
    bench = Bench(copy_queues=0)
    assert bench.copy is bench.compute
    bench.do_copy()
    bench.do_kernel()
    assert bench.finish_ms() == pytest.approx(20, rel=0.01)
    assert [work.label for work in bench.device.log(bench.compute)] == ["h2d", "matmul"]
    assert bench.device.compute.busy_ns == pytest.approx(10e6, rel=0.01)


def test_a_device_wait_holds_the_queue_and_not_the_host() -> None:
    bench = Bench()
    bench.do_copy()
    bench.compute.wait(bench.copy.record("ready"))
    bench.do_kernel()
    assert bench.device.clock.now_ns < 100_000
    copied, computed = bench.device.log(bench.copy)[0], bench.device.log(bench.compute)[0]
    assert computed.start_ns == copied.end_ns


def test_a_host_wait_holds_the_host() -> None:
    bench = Bench(device_wait="no")
    bench.do_copy()
    bench.compute.wait(bench.copy.record("ready"))
    assert bench.device.clock.now_ns == bench.device.log(bench.copy)[0].end_ns
    bench.do_copy()  # what the host submits now begins after its wait
    assert bench.device.log(bench.copy)[1].start_ns > bench.device.log(bench.copy)[0].end_ns


def test_blocking_copies_overlap_only_with_compute_submitted_before() -> None:
    bench = Bench(blocking_submit="copy")
    assert bench.device.caps.blocking_submit
    assert not bench.device.caps.async_copy
    bench.do_copy()
    bench.do_kernel()
    assert bench.finish_ms() == pytest.approx(20, rel=0.01)
    bench = Bench(blocking_submit="copy")
    bench.do_kernel()
    bench.do_copy()
    assert bench.finish_ms() == pytest.approx(10, rel=0.01)


def test_blocking_compute_overlaps_only_with_copies_submitted_before() -> None:
    bench = Bench(blocking_submit="compute")
    assert bench.device.caps.blocking_submit
    bench.do_kernel()
    bench.do_copy()
    assert bench.finish_ms() == pytest.approx(20, rel=0.01)
    bench = Bench(blocking_submit="compute")
    bench.do_copy()
    bench.do_kernel()
    assert bench.finish_ms() == pytest.approx(10, rel=0.01)


# --- the link ---------------------------------------------------------------------------------------------------------


def test_two_copy_queues_share_the_link() -> None:
    bench = Bench(copy_queues=2)
    bench.do_copy()
    bench.do_copy(bench.device.queue(QueueKind.COPY, 1))
    assert bench.finish_ms() < 11
    bench.device.queue(QueueKind.COPY, 1).synchronize()
    assert bench.finish_ms() == pytest.approx(20, rel=0.01)
    with pytest.raises(DeviceError, match="2 copy queues"):
        bench.device.queue(QueueKind.COPY, 2)


def test_a_waiting_copy_leaves_the_link_to_the_other_queue() -> None:
    bench = Bench(copy_queues=2)
    bench.do_kernel()
    bench.copy.wait(bench.compute.record("free"))
    bench.do_copy()  # cannot begin before 10 ms
    other = bench.device.queue(QueueKind.COPY, 1)
    other.copy_h2d(bench.dst.span(0, 100_000_000), bench.src.span(0, 100_000_000))
    other.synchronize()
    assert bench.device.clock.now_ns / 1e6 == pytest.approx(5, rel=0.02)
    assert bench.finish_ms() == pytest.approx(20, rel=0.01)


def test_the_two_directions_of_the_link_are_independent() -> None:
    bench = Bench(copy_queues=2)
    back = bench.device.alloc_host(200_000_000, label="back")
    bench.do_copy()
    up = bench.device.queue(QueueKind.COPY, 1)
    up.copy_d2h(back.span(), device_buffer(bench.device, 200_000_000).span())
    up.synchronize()
    assert bench.finish_ms() == pytest.approx(10, rel=0.01)
    assert not back.array()[:4096].any()  # a copy to the host leaves host memory as it is


def test_a_lane_fills_gaps_and_never_does_two_things_at_once() -> None:
    lane = Lane(VirtualClock())
    assert lane.reserve(100, 50) == (100, 150)
    assert lane.reserve(200, 50) == (200, 250)
    assert lane.reserve(0, 120) == (0, 170)  # 0-100 and 150-170
    assert lane.reserve(0, 40) == (170, 260)  # 170-200 and 250-260
    assert lane.reserve(300, 0) == (300, 300)
    assert lane.reserve(0, 10) == (260, 270)
    assert lane.busy_ns == 270


# GB/s of page-locked copies on one H200, PCIe 5.0 x16: alone, and 128 of them in a row.
@pytest.mark.parametrize(
    ("nbytes", "n_copies", "gbps"),
    [
        (MIB // 4, 1, 13.5),
        (3 * MIB // 2, 1, 35),
        (4 * MIB, 1, 42),
        (16 * MIB, 1, 52),
        (128 * MIB, 1, 54.8),
        (3 * MIB // 2, 128, 49.5),
    ],
)
def test_h200_link_as_measured(nbytes: int, n_copies: int, gbps: float) -> None:
    device = open_sim("h200-gen5")
    queue = device.queue(QueueKind.COPY)
    src, dst = device.alloc_host(nbytes, label="src"), device_buffer(device, nbytes)
    begin_ns = device.clock.now_ns + device.host_call_ns
    for _ in range(n_copies):
        queue.copy_h2d(dst.span(), src.span())
    queue.synchronize()
    assert n_copies * nbytes / (device.clock.now_ns - begin_ns) == pytest.approx(gbps, rel=0.1)


def test_pageable_copies_are_slow_and_hold_the_host() -> None:
    bench = Bench(pageable_gbps=10.0)
    pageable = bench.device.wrap_host(memoryview(bytearray(1_000_000)), label="mapped")
    assert not pageable.pinned
    bench.do_kernel()
    before_ns = bench.device.clock.now_ns
    bench.copy.copy_h2d(bench.dst.span(0, 1_000_000), pageable.span())
    assert bench.device.clock.now_ns - before_ns == pytest.approx(100_000, rel=0.2)
    registered = bench.device.register_host(memoryview(bytearray(1_000_000)), label="mapped")
    assert registered.pinned
    before_ns = bench.device.clock.now_ns
    bench.copy.copy_h2d(bench.dst.span(0, 1_000_000), registered.span())
    assert bench.device.clock.now_ns - before_ns < 10_000


# --- time -------------------------------------------------------------------------------------------------------------


def test_events_are_seen_when_the_host_gets_there() -> None:
    bench = Bench()
    bench.do_kernel()
    event = bench.compute.record("computed")
    assert not event.done()
    assert event.timestamp_ns() is None
    with pytest.raises(DeviceTimeout, match="computed"):
        event.wait(timeout_s=0.001)
    n_polls = 0
    while not event.done():  # a host that polls gets there
        n_polls += 1
    assert n_polls > 100
    event.wait(timeout_s=0.0)
    end_ns = event.timestamp_ns()
    assert end_ns == bench.device.log(bench.compute)[0].end_ns
    host_ns, device_ns = bench.device.clock_sync()
    assert host_ns == device_ns == bench.device.clock.now_ns


def test_jitter_is_random_and_repeatable() -> None:
    def durations(**options: bool | int | float | str) -> list[int]:
        bench = Bench(**options)
        for _ in range(50):
            bench.do_copy()
        return [work.end_ns - work.start_ns for work in bench.device.log(bench.copy)]

    assert len(set(durations())) == 1
    first = durations(jitter=0.3, seed=1)
    assert first == durations(jitter=0.3, seed=1)
    assert first != durations(jitter=0.3, seed=2)
    assert len(set(first)) == 50
    assert all(0.2 < d / durations()[0] < 5 for d in first)


def test_delay_keeps_a_queue_busy() -> None:
    bench = Bench()
    bench.compute.delay(5_000_000)
    bench.do_kernel()
    assert bench.finish_ms() == pytest.approx(15, rel=0.01)
    assert bench.device.compute.busy_ns == pytest.approx(10e6, rel=0.01)


def test_a_program_takes_time_at_each_run_and_none_while_recorded() -> None:
    bench = Bench()
    with bench.compute.program("step") as program:
        bench.do_kernel()
    assert bench.finish_ms() < 1
    bench.compute.run(program)
    bench.compute.run(program)
    assert bench.finish_ms() == pytest.approx(20, rel=0.01)


# --- kernels ----------------------------------------------------------------------------------------------------------


class Experts:
    """Calls on 64 experts, 4 used by a token, of 1 MiB a tensor: [512, 2048] and, for down, [2048, 512]."""

    def __init__(self, device: SimDevice, spans: tuple[Span, ...], n_tokens: int) -> None:
        self.device = device
        self.queue = device.queue(QueueKind.COMPUTE)
        where = tensor(device, "I32", 64)
        self.gate = ExpertTable(spans=spans, where=where, type="Q4_K", n_out=512, n_in=2048, slab_nbytes=MIB)
        self.down = ExpertTable(spans=spans, where=where, type="Q4_K", n_out=2048, n_in=512, slab_nbytes=MIB)
        self.rows = ExpertRows(
            ids=tensor(device, "I32", n_tokens, 4),
            weights=tensor(device, "F32", n_tokens, 4),
            pairs=tensor(device, "I32", n_tokens * 4),
            offsets=tensor(device, "I32", 65),
            positions=tensor(device, "I32", n_tokens, 4),
        )
        self.x, self.acc = tensor(device, "F16", n_tokens, 2048), tensor(device, "F32", n_tokens, 2048)
        self.y = tensor(device, "F16", n_tokens * 4, 512)

    def ffn(self, first: int = 0, end: int = 64) -> None:
        self.device.kernels.expert_ffn(
            self.queue, self.acc, self.x, self.gate, self.gate, self.down, self.rows, (first, end), 512, Glu.SWIGLU
        )

    def gate_rows(self, first: int, end: int, first_row: int, n_rows: int) -> None:
        window = RowWindow(first_expert=first, end_expert=end, first_row=first_row, n_rows=n_rows)
        out = self.y.rows(0, n_rows)
        self.device.kernels.mul_mat_id(self.queue, out, self.gate, self.x, self.rows, window, by_token=True)


def kernel_us(device: SimDevice, call: Callable[[], None]) -> float:
    """Device time of the one kernel that `call` enqueues, without its launch."""
    before = device.compute.busy_ns
    call()
    return (device.compute.busy_ns - before) / 1e3 - device.profile.launch_us


def test_rows_are_shared_out_however_they_are_cut() -> None:
    device = open_sim(tflops=1.0)
    experts = Experts(device, (device_buffer(device, 64 * MIB).span(),), n_tokens=512)
    flops = 2048 * 2 * 512 * 2048  # of one matrix for all rows
    assert kernel_us(device, experts.ffn) == pytest.approx(3 * flops / 1e6, rel=1e-3)
    units = sum(kernel_us(device, partial(experts.ffn, first, first + 16)) for first in (0, 16, 32, 48))
    assert units == pytest.approx(3 * flops / 1e6, rel=1e-3)
    chunks = [
        kernel_us(device, partial(experts.gate_rows, first, first + 16, first_row, 300))
        for first in (0, 16, 32, 48)
        for first_row in (0, 300, 600)  # of 512 rows
    ]
    assert sum(chunks) == pytest.approx(flops / 1e6, rel=1e-3)
    assert chunks[2] == 0


def test_decode_reads_the_used_experts_from_device_memory_or_over_the_link() -> None:
    device = open_sim()
    profile = device.profile
    used_nbytes = 3 * 4 * MIB
    in_vram = Experts(device, (device_buffer(device, 64 * MIB).span(),), n_tokens=1)
    assert kernel_us(device, in_vram.ffn) == pytest.approx(used_nbytes / profile.memory_gbps / 1e3, rel=0.01)
    host = device.alloc_host(64 * MIB, label="experts")
    in_ram = Experts(device, (host.span(),), n_tokens=1)
    in_ram.queue.synchronize()
    assert kernel_us(device, in_ram.ffn) == pytest.approx(used_nbytes / profile.gather_gbps / 1e3, rel=0.01)
    cache = device_buffer(device, 48 * MIB)  # room for three quarters of them
    cached = Experts(device, (cache.span(), host.span()), n_tokens=1)
    cached.queue.synchronize()
    assert kernel_us(device, cached.ffn) == pytest.approx(used_nbytes / 4 / profile.gather_gbps / 1e3, rel=0.02)

    device = open_sim(link_gbps=1e6)  # so fast that only the part in device memory counts
    cache, host = device_buffer(device, 48 * MIB), device.alloc_host(64 * MIB, label="experts")
    cached = Experts(device, (cache.span(), host.span()), n_tokens=1)
    assert kernel_us(device, cached.ffn) == pytest.approx(used_nbytes * 0.75 / profile.memory_gbps / 1e3, rel=0.01)


def test_a_gathering_kernel_and_a_copy_share_the_link() -> None:
    bench = Bench()
    experts = Experts(bench.device, (bench.device.alloc_host(64 * MIB, label="experts").span(),), n_tokens=1)
    bench.do_copy()
    experts.ffn()
    assert bench.device.log(experts.queue)[0].end_ns > bench.device.log(bench.copy)[0].end_ns


def test_kernels_do_not_read_host_memory_that_a_device_could_not() -> None:
    device = open_sim()
    pageable = device.wrap_host(memoryview(bytearray(64)), label="pageable")
    with pytest.raises(KernelLaunchError, match=r"cannot read.*pageable"):
        Experts(device, (pageable.span(),), n_tokens=1).ffn()
    device = open_sim(host_gather="no")
    pinned = device.alloc_host(64, label="pinned")
    with pytest.raises(KernelLaunchError, match=r"cannot read.*pinned"):
        Experts(device, (pinned.span(),), n_tokens=1).ffn()


def test_attention_costs_what_its_rows_see() -> None:
    device = open_sim(tflops=1.0)
    queue = device.queue(QueueKind.COMPUTE)
    n, n_cell = 128, 4096
    kv = KVView(
        span=device_buffer(device, n_cell * 4096).span(),
        k_type="F16",
        v_type="F16",
        n_cell=n_cell,
        n_head_kv=8,
        d_k=128,
        d_v=128,
        row_nbytes=4096,
        v_offset=2048,
    )
    q, out = tensor(device, "F16", n, 32, 128), tensor(device, "F16", n, 32, 128)
    positions = tensor(device, "I32", n)

    def us(n_kv: int, window: int | None = None) -> float:
        return kernel_us(
            device,
            lambda: device.kernels.attention(queue, out, q, kv, positions, n_kv=n_kv, scale=0.1, window=window),
        )

    n_seen = sum(range(4096 - 127, 4096 + 1))
    assert us(4096) == pytest.approx(n_seen * 32 * 2 * (128 + 128) / 1e6, rel=1e-3)
    assert us(4096, window=256) == pytest.approx(n * 256 * 32 * 2 * (128 + 128) / 1e6, rel=1e-3)


def test_every_op_is_native() -> None:
    kernels = open_sim().kernels
    assert {kernels.supports(OpQuery(op=op, type="IQ3_XXS")) for op in Op} == {Support.NATIVE}


def test_queues_of_other_devices_are_refused() -> None:
    bench, other = Bench(), Bench()
    with pytest.raises(KernelLaunchError, match="not a queue of this device"):
        bench.device.kernels.matmul(other.compute, bench.out, bench.w, bench.x)
    with pytest.raises(DeviceError, match="not a queue of this device"):
        bench.device.busy_ns(other.compute)


# --- memory -----------------------------------------------------------------------------------------------------------


def test_device_memory_is_limited() -> None:
    device = open_sim()
    buffer = device_buffer(device, 12 * 1024 * MIB)
    assert device.memory_free() == 0
    with pytest.raises(OutOfDeviceMemory) as refused:
        device_buffer(device, 1)
    assert (refused.value.needed, refused.value.free, refused.value.total) == (1, 0, 12 * 1024 * MIB)
    buffer.free()
    assert device.memory_free() == 12 * 1024 * MIB
    with pytest.raises(OutOfDeviceMemory):
        device_buffer(open_sim(memory_nbytes=MIB), MIB + 1)


def test_host_memory_takes_ram_only_when_written() -> None:
    device = open_sim()
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    buffer = device.alloc_host(64 * 1024**3, label="experts")
    assert buffer.pinned
    buffer.array()[-1] = 7
    assert buffer.span(buffer.nbytes - 2).host_view().tolist() == [0, 7]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 16 * 1024
    buffer.free()
    with pytest.raises(ValueError, match="freed"):
        buffer.array()


# --- the backend ------------------------------------------------------------------------------------------------------


def test_each_profile_is_a_device() -> None:
    backend = SimBackend()
    devices = backend.probe(DEFAULTS).devices
    assert [(info.id, info.arch) for info in devices] == [("sim0", "rtx3060-gen4"), ("sim1", "h200-gen5")]
    for info in devices:
        with backend.open(info.index, DEFAULTS) as device:
            assert device.info == info
            assert device.caps.activation_type == load_profiles()[info.index].activation_type
    with pytest.raises(BackendUnavailable, match=r"no device sim2.*sim1 \(h200-gen5\)"):
        backend.open(2, DEFAULTS)


def test_devices_of_one_backend_share_the_host() -> None:
    backend = SimBackend()
    first, second = backend.open(0, DEFAULTS), backend.open(1, DEFAULTS)
    first.queue(QueueKind.COMPUTE).delay(1_000_000)
    event = first.queue(QueueKind.COMPUTE).record()
    queue = second.queue(QueueKind.COMPUTE)
    queue.wait(event)
    queue.delay(1_000_000)
    assert second.log(queue)[0].start_ns == first.log(first.queue(QueueKind.COMPUTE))[0].end_ns
    assert second.clock.now_ns < 1_000_000


@pytest.mark.parametrize("option", ["link_gbps", "pageable_gbps", "tflops", "memory_nbytes"])
def test_senseless_options_are_a_reason_and_an_error(option: str) -> None:
    result = SimBackend().probe(DEFAULTS | {option: -1})
    assert not result.available
    assert option in result.reason
    with pytest.raises(ConfigError, match=option):
        open_sim(**{option: -1})
