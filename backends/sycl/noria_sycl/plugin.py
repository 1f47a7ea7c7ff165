"""Offers the SYCL backend. Imports no GPU library."""

from __future__ import annotations

from collections.abc import Iterable

from noria.api import Backend, DeviceKind, OptionSpec
from noria.plugins import BackendSpec, hookimpl


def make_backend() -> Backend:
    from noria_sycl.backend import SyclBackend

    return SyclBackend()


@hookimpl
def noria_backends() -> Iterable[BackendSpec]:
    yield BackendSpec(
        name="sycl",
        factory=make_backend,
        summary="GPUs of any vendor, and CPUs, through OpenCL or SYCL",
        kind=DeviceKind.GPU,
        cpu_from_nbytes=32 << 20,  # the reference generates a page by a model of this size while kernels compile
        priority=80,
        aliases=("opencl",),
        extra="noria[sycl]",
        options={
            "runtime": OptionSpec(
                default="auto",
                help="opencl (PyOpenCL), sycl (dpctl), or auto: the first of the two that finds a device",
                choices=("auto", "opencl", "sycl"),
            ),
            "copy_thread": OptionSpec(
                default="auto",
                help="copies by a thread of their own, with opencl: on, off, or auto: where a driver's copies block",
                choices=("auto", "on", "off"),
            ),
            "in_place": OptionSpec(
                default=True,
                help="a device that can reads experts in RAM where they are; false: they come through the ring",
            ),
        },
    )
