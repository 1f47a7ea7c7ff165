"""Measuring a link: simulated links whose rates are known, short memory, and a device without timed events."""

from __future__ import annotations

from dataclasses import replace

import pytest

from noria.api import BufferUsage, HostBuffer
from noria.api.errors import MIB, OutOfDeviceMemory, PinnedMemoryError
from noria.builtin.sim import SimDevice, VirtualClock, load_profiles, open_sim
from noria.runtime.link import LinkRates, measure_link
from noria.testing.fixtures import find_backend

EXPERT_NBYTES = 3 * MIB // 2


@pytest.mark.parametrize("profile", load_profiles(), ids=lambda profile: profile.name)
def test_the_rates_of_a_simulated_link_come_out(profile):
    with open_sim(profile.name) as device:
        rates = measure_link(device, expert_nbytes=EXPERT_NBYTES)
    assert rates.h2d_gbps == pytest.approx(profile.link_gbps, rel=0.03)
    assert rates.h2d_small_gbps == pytest.approx(EXPERT_NBYTES / profile.h2d_ns(EXPERT_NBYTES), rel=0.03)
    assert rates.d2h_gbps == pytest.approx(profile.d2h_gbps, rel=0.03)
    assert rates.pageable_gbps == pytest.approx(profile.pageable_gbps, rel=0.03)
    assert profile.copy_latency_us < rates.latency_us < 2 * profile.copy_latency_us


def test_a_measurement_is_short_and_leaves_nothing_behind():
    with open_sim() as device:
        measure_link(device)
        assert device.clock.now_ns < 0.2e9
        assert device.allocated_peak <= 64 * MIB
        assert sum(device.allocated.values()) == 0


def test_a_simulated_device_gives_the_same_rates_every_time():
    with open_sim() as one, open_sim() as other:
        assert measure_link(one) == measure_link(other)


def test_rates_follow_the_measured_sizes():
    rates = LinkRates(
        h2d_gbps=20.0,
        d2h_gbps=20.0,
        h2d_small_gbps=10.0,
        pageable_gbps=5.0,
        latency_us=1.0,
        samples=((1000, 200.0), (10_000, 1000.0), (100_000, 5000.0)),
    )
    assert rates.rate_gbps(1000) == pytest.approx(5.0)
    assert rates.rate_gbps(10_000) == pytest.approx(10.0)
    assert rates.rate_gbps(55_000) == pytest.approx(55_000 / 3000)
    assert rates.rate_gbps(100) == pytest.approx(0.5), "a smaller copy takes no less time than the smallest measured"
    assert rates.rate_gbps(10**9) == pytest.approx(20.0)


def test_times_never_fall_with_the_size():
    with open_sim(jitter=1.0, seed=3) as device:
        samples = measure_link(device).samples
    assert list(samples) == sorted(samples, key=lambda sample: sample[1])
    assert len({nbytes for nbytes, _ in samples}) == len(samples)


def test_a_slow_link_is_measured_with_smaller_copies():
    with open_sim(link_gbps=0.5) as device:
        rates = measure_link(device)
        assert device.clock.now_ns < 0.2e9
        assert rates.samples[-1][0] == EXPERT_NBYTES
        assert rates.h2d_gbps == pytest.approx(EXPERT_NBYTES / device.profile.h2d_ns(EXPERT_NBYTES), rel=0.03)


def test_a_nearly_full_device_is_measured_with_smaller_copies():
    with open_sim() as device:
        full = device.alloc(device.memory_free() - MIB, usage=BufferUsage.WEIGHTS, label="weights")
        rates = measure_link(device)
        assert device.allocated_peak <= full.nbytes + MIB
    assert [nbytes for nbytes, _ in rates.samples] == [4096, 256 * 1024]


def test_a_full_device_says_so():
    with open_sim() as device:
        device.alloc(device.memory_free(), usage=BufferUsage.WEIGHTS, label="weights")
        with pytest.raises(OutOfDeviceMemory, match="link measurement"):
            measure_link(device)


def test_refused_page_locking_ends_the_sizes(monkeypatch):
    with open_sim() as device:
        alloc_host = device._alloc_host

        def refuse_much(nbytes: int, label: str) -> HostBuffer:
            if nbytes > MIB:
                raise PinnedMemoryError(device.info.id, nbytes, "not today")
            return alloc_host(nbytes, label)

        monkeypatch.setattr(device, "_alloc_host", refuse_much)
        rates = measure_link(device)
        assert sum(device.allocated.values()) == 0
    assert [nbytes for nbytes, _ in rates.samples] == [4096]
    assert rates.rate_gbps(EXPERT_NBYTES) == rates.h2d_gbps


def test_without_event_timing_the_hosts_clock_is_read():
    profile = load_profiles()[0]
    with open_sim(profile.name) as timed:
        untimed = SimDevice(timed.info, replace(profile, event_timing=False), VirtualClock(), 0.0, 0)
        with untimed:
            assert measure_link(untimed).h2d_gbps == pytest.approx(measure_link(timed).h2d_gbps, rel=0.02)


def test_a_device_that_copies_whole_buffers_only():
    with open_sim() as device:
        device.caps = replace(device.caps, region_copy=False)  # parts of buffers are a TransferError now
        rates = measure_link(device)
    assert rates.h2d_gbps == pytest.approx(load_profiles()[0].link_gbps, rel=0.03)


def test_the_reference_device_is_measured_too():
    backend, options = find_backend("reference")
    with backend.open(0, options) as device:
        rates = measure_link(device, expert_nbytes=100_000)
        assert sum(device.allocated.values()) == 0
    assert min(rates.h2d_gbps, rates.h2d_small_gbps, rates.d2h_gbps, rates.pageable_gbps, rates.latency_us) > 0
    assert 100_000 in [nbytes for nbytes, _ in rates.samples]
