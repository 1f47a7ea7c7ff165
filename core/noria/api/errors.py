"""Every error noria raises on purpose, as one tree.

Fields come first and the text is made from them: what failed, where, with which values, and what to do about it.
A traceback that ends in anything outside this tree is a bug in noria.
"""

from __future__ import annotations

from math import ceil

MIB = 1024 * 1024


class NoriaError(Exception):
    """Base of all of them: the command line prints its text and exits with `exit_code`."""

    exit_code = 1


class ConfigError(NoriaError, ValueError):
    """A flag, an option or a configuration file is wrong."""

    exit_code = 2


# --- plugins ---------------------------------------------------------------------------------------------------------


class PluginError(NoriaError):
    """A plugin cannot be used."""


class PluginLoadError(PluginError):
    """Importing or registering a plugin failed; `cause` is what it raised."""

    def __init__(self, name: str, dist: str, cause: BaseException) -> None:
        self.name, self.dist, self.cause = name, dist, cause
        super().__init__(
            f"plugin '{name}' of {dist} failed to load: {type(cause).__name__}: {cause}. "
            f"Fix or uninstall {dist}, or add '{name}' to plugins.disabled in plugins.toml."
        )


class PluginConflict(PluginError):
    """Two plugins offer the same name."""

    def __init__(self, kind: str, name: str, first: str, second: str) -> None:
        self.kind, self.name, self.first, self.second = kind, name, first, second
        super().__init__(
            f"{kind} '{name}' is offered by both {first} and {second}. "
            f"Disable one of the two plugins in plugins.toml ([plugins] disabled = [...])."
        )


class PluginApiMismatch(PluginError):
    """A plugin was written for an API version this noria does not speak."""

    def __init__(self, name: str, wanted: tuple[int, int], have: tuple[int, int]) -> None:
        self.name, self.wanted, self.have = name, wanted, have
        super().__init__(
            f"backend '{name}' was written for noria API {wanted[0]}.{wanted[1]}, this noria has {have[0]}.{have[1]}. "
            f"Install matching versions of the two."
        )


# --- backends and devices ---------------------------------------------------------------------------------------------


class BackendError(NoriaError):
    """A backend as a whole cannot do what was asked."""


class BackendNotFound(BackendError):
    """No plugin offers a backend or device of this name."""

    exit_code = 2

    def __init__(self, name: str, known: list[str], hint: str = "") -> None:
        self.name, self.known = name, known
        text = f"no backend or device '{name}'; there are: {', '.join(known) or 'none'}."
        super().__init__(f"{text} {hint}".strip())


class BackendUnavailable(BackendError):
    """The backend exists but cannot run here; `reason` and `hint` come from its probe."""

    def __init__(self, name: str, reason: str, hint: str = "") -> None:
        self.name, self.reason, self.hint = name, reason, hint
        super().__init__(f"backend '{name}' cannot be used here: {reason}." + (f" {hint}" if hint else ""))


class DeviceError(NoriaError):
    """Something failed on one device, named by its id (`cuda0`)."""

    def __init__(self, device: str, text: str) -> None:
        self.device = device
        super().__init__(f"{device}: {text}")


class OutOfDeviceMemory(DeviceError, MemoryError):
    """A device allocation was refused."""

    def __init__(self, device: str, label: str, needed: int, free: int, total: int, hint: str = "") -> None:
        self.label, self.needed, self.free, self.total = label, needed, free, total
        super().__init__(
            device,
            f"cannot allocate {label} ({needed / MIB:.1f} MiB; {free / MIB:.1f} of {total / MIB:.1f} MiB free). "
            + (hint or "Lower -c, -ub or --prefetch-slots, or raise -ncmoe."),
        )


class PinnedMemoryError(DeviceError, MemoryError):
    """The system refused to page-lock host memory; never answered by a silent pageable buffer."""

    def __init__(self, device: str, nbytes: int, why: str, hint: str = "") -> None:
        self.nbytes, self.why, self.hint = nbytes, why, hint
        text = f"cannot page-lock {nbytes / MIB:.1f} MiB of host memory: {why}."
        super().__init__(device, f"{text} {hint}".strip())


class TransferError(DeviceError):
    """A copy is malformed or failed."""


class KernelBuildError(DeviceError):
    """A kernel did not compile; `log` is the compiler's."""

    def __init__(self, device: str, kernel: str, log: str) -> None:
        self.kernel, self.log = kernel, log
        super().__init__(device, f"kernel '{kernel}' did not compile:\n{log}")


class KernelLaunchError(DeviceError):
    """A kernel failed to launch or while running."""


class DeviceLost(DeviceError):
    """The device stopped answering; nothing on it survives."""


class DeviceTimeout(DeviceError):
    """A wait took longer than its limit."""


class FeatureUnsupported(NoriaError):
    """The device cannot do this at all."""


class OpUnsupported(FeatureUnsupported):
    """The backend has no kernel for these types and shapes (`query` is an `OpQuery`)."""

    def __init__(self, backend: str, query: object, hint: str = "") -> None:
        self.backend, self.query = backend, query
        super().__init__(f"backend '{backend}' has no kernel for {query}." + (f" {hint}" if hint else ""))


# --- models -----------------------------------------------------------------------------------------------------------


class ModelError(NoriaError):
    """A model cannot be used."""


class GGUFError(ModelError):
    """A model file is damaged, cut or malformed; `field` names the part that is wrong."""

    def __init__(self, path: str, field: str, text: str) -> None:
        self.path, self.field = path, field
        super().__init__(f"{path}: {field}: {text}")


class ChatTemplateError(ModelError):
    """A chat template is wrong, refuses the messages or passes a limit; `line` is where, if known."""

    def __init__(self, name: str, line: int | None, what: str) -> None:
        self.name, self.line, self.what = name, line, what
        super().__init__(f"{name}{f', line {line}' if line is not None else ''}: {what.rstrip('.')}.")


class UnsupportedArchitecture(ModelError):
    """No plugin builds models of this `general.architecture`."""

    def __init__(self, path: str, architecture: str, known: list[str]) -> None:
        self.path, self.architecture, self.known = path, architecture, known
        super().__init__(
            f"{path}: architecture '{architecture}' is not known; known are: {', '.join(sorted(known))}. "
            f"A plugin can add it (see docs/write-a-backend.md, 'architectures')."
        )


class UnsupportedQuantType(ModelError):
    """A tensor has a type that noria has no dequantizer for."""

    def __init__(self, path: str, tensor: str, type_name: str, known: list[str]) -> None:
        self.path, self.tensor, self.type_name = path, tensor, type_name
        super().__init__(f"{path}: tensor '{tensor}' has type {type_name}; known are: {', '.join(known)}.")


class DoesNotFit(ModelError):
    """The memory plan is larger than the device; `shortfall` bytes are missing and `remedy` is the smallest change."""

    def __init__(self, device: str, shortfall: int, remedy: str, table: str) -> None:
        self.device, self.shortfall, self.remedy, self.table = device, shortfall, remedy, table
        super().__init__(f"{table}\n{device}: the plan is {ceil(shortfall / MIB * 10) / 10:.1f} MiB over. {remedy}")
