"""Profiles: what a simulated device is like. They come from `profiles.toml`; options change single fields."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from math import log2
from typing import Any

import numpy as np

BLOCKING = ("none", "copy", "compute")  # what submitting may block the host


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One simulated device.

    Attributes:
        name: its table in `profiles.toml`.
        device: what it stands for.
        memory_gbps: rate at which kernels read and write device memory.
        tflops: effective rate of the matrices of a prefill.
        activation_type: as in `DeviceCaps`; so are `copy_queues`, `device_wait`, `host_register`, `host_gather` and
            `event_timing`.
        launch_us: device time of an empty kernel.
        host_call_us: host time of any call that reaches the driver.
        copy_latency_us: from the call to the beginning of a copy; the link is free meanwhile.
        h2d_gbps: (nbytes, GB/s) of page-locked copies of that size one after another, by ascending size.
        d2h_gbps: the other direction, any size.
        pageable_gbps: copies from and to memory that is not page-locked, both directions.
        gather_gbps: a kernel that reads page-locked host memory.
        blocking_submit: "copy" or "compute" if submitting that blocks the host until it is done, else "none".
    """

    name: str
    device: str
    memory_nbytes: int
    memory_gbps: float
    tflops: float
    activation_type: str
    launch_us: float
    host_call_us: float
    copy_latency_us: float
    h2d_gbps: tuple[tuple[int, float], ...]
    d2h_gbps: float
    pageable_gbps: float
    gather_gbps: float
    copy_queues: int
    device_wait: bool
    blocking_submit: str
    host_register: bool
    host_gather: bool
    event_timing: bool

    @property
    def link_gbps(self) -> float:
        """Rate of the largest page-locked copies to the device."""
        return self.h2d_gbps[-1][1]

    def h2d_ns(self, nbytes: int) -> float:
        """Time on the link of one page-locked copy to the device; rates between two sizes follow log2 of the size."""
        if nbytes == 0:
            return 0.0
        sizes = [log2(size) for size, _ in self.h2d_gbps]
        return nbytes / float(np.interp(log2(nbytes), sizes, [rate for _, rate in self.h2d_gbps]))

    def kernel_ns(self, flops: float, nbytes: float) -> float:
        """Time of a kernel that does `flops` and moves `nbytes` in device memory, whichever takes longer."""
        return self.launch_us * 1e3 + max(flops / (self.tflops * 1e3), nbytes / self.memory_gbps)

    def changed(self, options: Mapping[str, Any]) -> Profile:
        """This profile with the fields that `options` (of the backend) set."""
        changes: dict[str, Any] = {
            key: options[key] for key in ("pageable_gbps", "tflops", "memory_nbytes") if options[key]
        }
        if options["copy_queues"] >= 0:
            changes["copy_queues"] = options["copy_queues"]
        for key in ("device_wait", "host_register", "host_gather"):
            if options[key] != "auto":
                changes[key] = options[key] == "yes"
        if options["blocking_submit"] != "auto":
            changes["blocking_submit"] = options["blocking_submit"]
        if options["link_gbps"]:
            factor = options["link_gbps"] / self.link_gbps
            changes["h2d_gbps"] = tuple((size, rate * factor) for size, rate in self.h2d_gbps)
            changes["d2h_gbps"] = self.d2h_gbps * factor
            changes["gather_gbps"] = self.gather_gbps * factor
        return replace(self, **changes)


@cache
def load_profiles() -> tuple[Profile, ...]:
    """All profiles that noria ships, by device index."""
    tables = tomllib.loads(files("noria.builtin.sim").joinpath("profiles.toml").read_text(encoding="utf-8"))
    return tuple(
        Profile(name=name, **table | {"h2d_gbps": tuple((size, rate) for size, rate in table["h2d_gbps"])})
        for name, table in tables.items()
    )
