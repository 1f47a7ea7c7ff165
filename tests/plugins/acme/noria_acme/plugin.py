"""What noria imports at every start. The backend itself, and any driver library, only when somebody asks for it."""

from collections.abc import Iterable

from noria.api import Backend, DeviceKind, OptionSpec
from noria.plugins import BackendSpec, hookimpl


def make_backend() -> Backend:
    from noria_acme.backend import AcmeBackend

    return AcmeBackend()


@hookimpl
def noria_backends() -> Iterable[BackendSpec]:
    yield BackendSpec(
        name="acme",
        factory=make_backend,
        summary="Acme 1000, a device made of NumPy",
        kind=DeviceKind.CPU,
        priority=-10,  # `auto` prefers the reference, which has all ops
        options={"memory_mib": OptionSpec(default=1024, help="device memory in MiB")},
    )
