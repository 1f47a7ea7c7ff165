"""The backends that need nothing but NumPy, and the policies, offered through the same hooks as anyone else's."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from noria.api import DeviceKind
from noria.builtin import reference, sim
from noria.experts import POLICIES
from noria.plugins import BackendSpec, PolicySpec, hookimpl


@hookimpl
def noria_backends() -> Iterable[BackendSpec]:
    yield BackendSpec(
        name="reference",
        factory=reference.ReferenceBackend,
        summary="NumPy on the CPU: the truth for every op, always available",
        kind=DeviceKind.CPU,
        aliases=("cpu",),
        options=reference.OPTIONS,
        check_options=reference.check_options,
    )
    yield BackendSpec(
        name="sim",
        factory=sim.SimBackend,
        summary="devices on a virtual clock: when things would happen, no numbers",
        kind=DeviceKind.SIMULATED,
        options=sim.OPTIONS,
        check_options=sim.check_options,
    )


@hookimpl
def noria_policies() -> Iterable[PolicySpec]:
    for name, summary in (
        ("off", "no copies beside the compute: all of them in line with it"),
        ("whole", "all experts of a layer, ahead of the compute"),
        ("selective", "only the experts that are used, once the routing is known"),
        ("auto", "whichever moves them in the least time, layer by layer"),
    ):
        yield PolicySpec(name=name, factory=partial(POLICIES.get, name), summary=summary)
