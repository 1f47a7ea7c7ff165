"""Offers the SYCL backend. Imports no GPU library."""

from __future__ import annotations

from collections.abc import Iterable

from noria.api import Backend, DeviceKind
from noria.plugins import BackendSpec, hookimpl


def make_backend() -> Backend:
    from noria_sycl.backend import SyclBackend

    return SyclBackend()


@hookimpl
def noria_backends() -> Iterable[BackendSpec]:
    yield BackendSpec(
        name="sycl",
        factory=make_backend,
        summary="GPUs of any vendor through OpenCL (the name is SYCL's, the language is OpenCL C)",
        kind=DeviceKind.GPU,
        priority=80,
        aliases=("opencl",),
        extra="noria[sycl]",
    )
