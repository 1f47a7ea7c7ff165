"""Offers the CUDA backend. Imports no GPU library."""

from __future__ import annotations

from collections.abc import Iterable

from noria.api import Backend, DeviceKind
from noria.plugins import BackendSpec, hookimpl


def make_backend() -> Backend:
    from noria_cuda.backend import CudaBackend

    return CudaBackend()


@hookimpl
def noria_backends() -> Iterable[BackendSpec]:
    yield BackendSpec(
        name="cuda",
        factory=make_backend,
        summary="NVIDIA GPUs through CUDA",
        kind=DeviceKind.GPU,
        priority=100,
        extra="noria[cuda]",
    )
