"""The simulated backend: each profile is one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from random import Random
from typing import Any

from noria.api.backend import Backend, Device, DeviceInfo, DeviceKind, OptionSpec, ProbeResult
from noria.api.caps import DeviceCaps
from noria.api.errors import BackendUnavailable, ConfigError, DeviceError, OutOfDeviceMemory
from noria.api.memory import BufferUsage, CopyRegion
from noria.api.queue import Queue, QueueKind
from noria.api.version import API_VERSION
from noria.builtin.sim.clock import Lane, VirtualClock
from noria.builtin.sim.kernels import SimKernels
from noria.builtin.sim.memory import SimDeviceBuffer, SimHostBuffer, lazy_memory
from noria.builtin.sim.profiles import BLOCKING, Profile, load_profiles
from noria.builtin.sim.queue import SimEvent, SimQueue, Work

_AS_PROFILE = ("auto", "yes", "no")

OPTIONS: dict[str, OptionSpec] = {
    "link_gbps": OptionSpec(
        default=0.0, help="GB/s of large page-locked copies; smaller ones scale with it (0 = as the profile)"
    ),
    "pageable_gbps": OptionSpec(default=0.0, help="GB/s of copies from pageable memory (0 = as the profile)"),
    "tflops": OptionSpec(default=0.0, help="effective TFLOPS of a prefill's matrices (0 = as the profile)"),
    "memory_nbytes": OptionSpec(default=0, help="bytes of device memory (0 = as the profile)"),
    "copy_queues": OptionSpec(default=-1, help="copy queues beside the compute queue (-1 = as the profile)"),
    "device_wait": OptionSpec(default="auto", choices=_AS_PROFILE, help="a queue waits without the host"),
    "host_register": OptionSpec(default="auto", choices=_AS_PROFILE, help="a mapped file can be page-locked in place"),
    "host_gather": OptionSpec(default="auto", choices=_AS_PROFILE, help="kernels can read page-locked host memory"),
    "blocking_submit": OptionSpec(
        default="auto", choices=("auto", *BLOCKING), help="submitting this blocks the host until it is done"
    ),
    "jitter": OptionSpec(default=0.0, help="random timing: sigma of the logarithm of each duration's factor"),
    "seed": OptionSpec(default=0, help="of the random timing and routing"),
}


def check_options(options: Mapping[str, Any]) -> None:
    """Check the values of options.

    Raises:
        ConfigError: one makes no sense; the text begins with its name.
    """
    least = {"link_gbps": 0, "pageable_gbps": 0, "tflops": 0, "memory_nbytes": 0, "copy_queues": -1, "jitter": 0}
    for name, value in least.items():
        if not value <= options[name] < inf:
            raise ConfigError(f"{name}: must be {value} or more, not {options[name]}.")


class SimBackend(Backend):
    """Devices on a virtual clock, one for each profile. All devices of one backend object share the host's clock."""

    name = "sim"
    api_version = API_VERSION

    def __init__(self) -> None:
        self.clock = VirtualClock()

    def probe(self, options: Mapping[str, Any]) -> ProbeResult:
        try:
            check_options(options)
        except ConfigError as error:
            return ProbeResult(reason=str(error), hint="Correct it in the table of backend sim in plugins.toml.")
        profiles = (profile.changed(options) for profile in load_profiles())
        return ProbeResult(devices=tuple(_info(i, profile) for i, profile in enumerate(profiles)))

    def open(self, index: int, options: Mapping[str, Any]) -> SimDevice:
        profiles = load_profiles()
        if not 0 <= index < len(profiles):
            names = ", ".join(f"{self.name}{i} ({profile.name})" for i, profile in enumerate(profiles))
            raise BackendUnavailable(self.name, f"there is no device {self.name}{index}", f"There are: {names}.")
        check_options(options)
        profile = profiles[index].changed(options)
        return SimDevice(_info(index, profile), profile, self.clock, options["jitter"], options["seed"])


class SimDevice(Device):
    """A device that knows when things happen and nothing else.

    Its buffers have no content, and a copy to the host leaves host memory as it is; but how rows are sorted by expert
    is made up (see `SimKernels`) and can be copied to the host. All times are virtual. The host's,
    `clock.now_ns`, advances by a little at each call and by waiting; the device's, `Event.timestamp_ns`, has the same
    zero. Nothing sleeps, and the same calls with the same options give the same times.

    Attributes:
        clock: the host's virtual time.
        compute, h2d, d2h: the engines; `busy_ns` of each is what idle and busy shares are made from.
        host: that which copies inside host memory, as fast as copies from pageable memory are.
    """

    def __init__(self, info: DeviceInfo, profile: Profile, clock: VirtualClock, jitter: float, seed: int) -> None:
        super().__init__(info, _caps(profile))
        self.profile = profile
        self.clock = clock
        self.kernels = SimKernels(self, seed)
        self.compute, self.h2d, self.d2h, self.host = Lane(clock), Lane(clock), Lane(clock), Lane(clock)
        self.host_call_ns = round(profile.host_call_us * 1e3)
        self.copy_latency_ns = round(profile.copy_latency_us * 1e3)
        self._jitter = jitter
        self._random = Random(seed)

    def memory_free(self) -> int:
        return self.info.memory_nbytes - sum(self.allocated.values())

    def clock_sync(self) -> tuple[int, int]:
        """The virtual time twice: host and device share it."""
        return self.clock.now_ns, self.clock.now_ns

    def log(self, queue: Queue) -> list[Work]:
        """Everything enqueued on `queue`, one of this device, in order."""
        if not isinstance(queue, SimQueue) or queue.device is not self:
            raise DeviceError(self.info.id, f"{queue.name} is not a queue of this device")
        return queue.log

    def busy_ns(self, queue: Queue) -> int:
        """How long the copies and kernels of `queue` take together, those still to come included."""
        return sum(work.end_ns - work.start_ns for work in self.log(queue))

    def host_call(self) -> None:
        """Account for the host's time in a call that reaches the driver."""
        self.clock.advance(self.host_call_ns)

    def jittered(self, duration_ns: float) -> int:
        """The duration as a whole number, times a random factor if the device has `jitter`."""
        factor = self._random.lognormvariate(0, self._jitter) if self._jitter else 1.0
        return round(duration_ns * factor)

    def _alloc(self, nbytes: int, usage: BufferUsage, label: str) -> SimDeviceBuffer:
        self.host_call()
        free = self.memory_free()
        if nbytes > free:
            raise OutOfDeviceMemory(self.info.id, label, nbytes, free, self.info.memory_nbytes)
        return SimDeviceBuffer(self, nbytes, label, usage)

    def _alloc_host(self, nbytes: int, label: str) -> SimHostBuffer:
        self.host_call()
        return SimHostBuffer(self, lazy_memory(nbytes), label, pinned=True)

    def _register_host(self, memory: memoryview, label: str) -> SimHostBuffer:
        self.host_call()
        return SimHostBuffer(self, memory, label, pinned=True)

    def _wrap_host(self, memory: memoryview, label: str) -> SimHostBuffer:
        return SimHostBuffer(self, memory, label, pinned=False)

    def _copy_host(self, regions: Sequence[CopyRegion], label: str) -> SimEvent:
        nbytes = sum(region.src.nbytes for region in regions)
        _, end_ns = self.host.reserve(self.clock.now_ns, self.jittered(nbytes / self.profile.pageable_gbps))
        return SimEvent(self, label, end_ns)

    def _make_queue(self, kind: QueueKind, index: int) -> SimQueue:
        return SimQueue(self, kind, index)

    def _close(self) -> None:
        return None


def open_sim(profile: str = "rtx3060-gen4", /, **options: bool | int | float | str) -> SimDevice:
    """Open the simulated device of this profile on a clock of its own; `options` replace defaults of `OPTIONS`."""
    index = [p.name for p in load_profiles()].index(profile)
    return SimBackend().open(index, {name: spec.default for name, spec in OPTIONS.items()} | options)


def _info(index: int, profile: Profile) -> DeviceInfo:
    return DeviceInfo(
        backend=SimBackend.name,
        index=index,
        name=profile.device,
        kind=DeviceKind.SIMULATED,
        arch=profile.name,
        memory_nbytes=profile.memory_nbytes,
    )


def _caps(profile: Profile) -> DeviceCaps:
    return DeviceCaps(
        async_copy=profile.blocking_submit != "copy",
        copy_queues=profile.copy_queues,
        device_wait=profile.device_wait,
        blocking_submit=profile.blocking_submit != "none",
        event_timing=profile.event_timing,
        pinned_host=True,
        host_register=profile.host_register,
        host_gather=profile.host_gather,
        activation_type=profile.activation_type,
        kv_types=("F32", "F16", "Q8_0", "Q4_0"),
    )
