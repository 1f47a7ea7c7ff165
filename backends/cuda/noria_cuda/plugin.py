"""Offers the CUDA backend. Imports no GPU library."""

from __future__ import annotations

from collections.abc import Iterable

from noria.api import Backend, DeviceKind, OptionSpec
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
        options={
            "dependent_launch": OptionSpec(
                default=True, help="launch a token's kernels before the one before them is done, on sm_90 and newer"
            ),
        },
    )
