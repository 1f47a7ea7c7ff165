"""Offers the Vulkan backend. Imports no GPU library."""

from __future__ import annotations

from collections.abc import Iterable

from noria.api import Backend, DeviceKind
from noria.plugins import BackendSpec, hookimpl


def make_backend() -> Backend:
    from noria_vulkan.backend import VulkanBackend

    return VulkanBackend()


@hookimpl
def noria_backends() -> Iterable[BackendSpec]:
    yield BackendSpec(
        name="vulkan",
        factory=make_backend,
        summary="any GPU with a Vulkan 1.3 driver",
        kind=DeviceKind.GPU,
        priority=90,
        extra="noria[vulkan]",
    )
