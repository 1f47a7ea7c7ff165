"""The backends that need nothing but NumPy, offered through the same hook as anyone else's."""

from __future__ import annotations

from collections.abc import Iterable

from noria.api import DeviceKind
from noria.builtin import reference, sim
from noria.plugins import BackendSpec, hookimpl


@hookimpl
def noria_backends() -> Iterable[BackendSpec]:
    yield BackendSpec(
        name="reference",
        factory=reference.ReferenceBackend,
        summary="NumPy on the CPU: the truth for every op, always available",
        kind=DeviceKind.CPU,
        aliases=("cpu",),
        options=reference.OPTIONS,
    )
    yield BackendSpec(
        name="sim",
        factory=sim.SimBackend,
        summary="devices on a virtual clock: when things would happen, no numbers",
        kind=DeviceKind.SIMULATED,
        options=sim.OPTIONS,
    )
