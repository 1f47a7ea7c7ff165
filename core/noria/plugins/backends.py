"""Which backends can be used here, and which devices a user's words mean."""

from __future__ import annotations

import dataclasses
import logging
import re
import threading
from dataclasses import dataclass
from enum import StrEnum

from noria.api import Backend, Device, DeviceInfo, DeviceKind, ProbeResult
from noria.api.errors import (
    BackendNotFound,
    BackendUnavailable,
    ConfigError,
    PluginApiMismatch,
    PluginError,
    PluginLoadError,
)
from noria.api.version import API_VERSION, compatible
from noria.plugins.config import OptionValue, backend_options, did_you_mean
from noria.plugins.manager import PluginManager, PluginStatus
from noria.plugins.types import BackendSpec

logger = logging.getLogger(__name__)

AUTO = "auto"
PROBE_TIMEOUT_S = 30.0  # the first import of a GPU library from a cold disk takes several seconds
DEVICE_ID = re.compile(r"(.+?)([0-9]+)")


class BackendStatus(StrEnum):
    USABLE = "usable"
    UNUSABLE = "unusable"  # its probe found nothing
    DISABLED = "disabled"  # by plugins.toml
    FAILED = "failed"  # the plugin is at fault


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendReport:
    """What is known of one backend here.

    Attributes:
        dist: name and version of the distribution that offers it.
        probe: its devices, or the reason why there are none and what to do about it, whatever the status.
    """

    name: str
    spec: BackendSpec
    dist: str
    status: BackendStatus
    probe: ProbeResult


class BackendRegistry:
    """The backends of all plugins. Each is made and probed at most once, when it is first asked for.

    Args:
        plugins: where they come from; its configuration orders, disables and sets options.
        probe_timeout_s: how long a probe may take before its backend counts as failed.
    """

    def __init__(self, plugins: PluginManager, *, probe_timeout_s: float = PROBE_TIMEOUT_S) -> None:
        self.plugins = plugins
        self.probe_timeout_s = probe_timeout_s
        self._backends: dict[str, Backend] = {}
        self._reports: dict[str, BackendReport] = {}

    def names(self) -> list[str]:
        """All backends: first those of `plugins.order`, then by priority, then by name."""
        catalog = self.plugins.backends
        first = list(dict.fromkeys(catalog.name(n) for n in self.plugins.config.plugins.order if n in catalog))
        rest = sorted(set(catalog) - set(first), key=lambda name: (-catalog[name].priority, name))
        return first + rest

    def backend(self, name: str) -> Backend:
        """The backend of this name or alias; always the same object.

        Raises:
            BackendNotFound: there is none.
            PluginLoadError: making it failed.
            PluginApiMismatch: it was written for another version of `noria.api`.
        """
        name, _ = self._find(name)
        if name not in self._backends:
            spec = self.plugins.backends[name]
            try:
                backend = spec.factory()
                wanted = backend.api_version
            except Exception as error:
                raise PluginLoadError(name, self.plugins.backends.dist(name), error) from error
            if not compatible(wanted):
                raise PluginApiMismatch(name, wanted, API_VERSION)
            self._backends[name] = backend
        return self._backends[name]

    def options(self, name: str) -> dict[str, OptionValue]:
        """The options of the backend of this name or alias, complete with defaults.

        Raises:
            BackendNotFound: there is none.
        """
        name, _ = self._find(name)
        config, spec = self.plugins.config, self.plugins.backends[name]
        return backend_options(config.backend(name), spec, config.where)

    # --- probing -------------------------------------------------------------------------------------------------

    def report(self, name: str) -> BackendReport:
        """What is known of the backend of this name or alias; probes it unless it is disabled.

        Raises:
            BackendNotFound: there is none.
        """
        name, _ = self._find(name)
        if name not in self._reports:
            spec = self.plugins.backends[name]
            status, probe = self._probe(spec)
            if not probe.available and not probe.hint and spec.extra and status is BackendStatus.UNUSABLE:
                probe = dataclasses.replace(probe, hint=f"Try: pip install '{spec.extra}'")
            dist = self.plugins.backends.dist(name)
            self._reports[name] = BackendReport(name=name, spec=spec, dist=dist, status=status, probe=probe)
        return self._reports[name]

    def probe_all(self) -> list[BackendReport]:
        """A report for every backend, in the order of `names`."""
        return [self.report(name) for name in self.names()]

    def _probe(self, spec: BackendSpec) -> tuple[BackendStatus, ProbeResult]:
        config = self.plugins.config
        if not config.backend(spec.name).enabled:
            reason = f"backends.{spec.name}.enabled is false in {config.where}"
            return BackendStatus.DISABLED, ProbeResult(reason=reason, hint="Set it to true.")
        answer = self._ask(spec)
        if isinstance(answer, ProbeResult):
            return BackendStatus.USABLE if answer.available else BackendStatus.UNUSABLE, answer
        if isinstance(answer, PluginError):
            return BackendStatus.FAILED, ProbeResult(reason=str(answer).rstrip("."))
        blame = f"This is a fault of {self.plugins.backends.dist(spec.name)}; tell its authors."
        return BackendStatus.FAILED, ProbeResult(reason=answer, hint=blame)

    def _ask(self, spec: BackendSpec) -> ProbeResult | PluginError | str:
        """The answer of the backend's probe, or what is wrong with it.

        The probe runs in a thread of its own: a call into a broken driver cannot be interrupted, only left behind. A
        process could be killed instead, but would import the GPU library twice in every run.
        """
        answer: list[ProbeResult | PluginError | str] = []
        options = self.options(spec.name)

        def ask() -> None:
            try:
                result = self.backend(spec.name).probe(options)
                ok = isinstance(result, ProbeResult)
                answer.append(result if ok else f"its probe returned {result!r}, which is no ProbeResult")
            except PluginError as error:
                answer.append(error)
            except BaseException as error:  # a probe must not raise; nothing it raises may end the program
                logger.debug("the probe of backend '%s' raised", spec.name, exc_info=error)
                answer.append(f"its probe raised {type(error).__name__}: {error}")

        thread = threading.Thread(target=ask, name=f"probe-{spec.name}", daemon=True)
        thread.start()
        thread.join(self.probe_timeout_s)
        return answer[0] if answer else f"its probe did not return within {self.probe_timeout_s:g} s"

    # --- selection -----------------------------------------------------------------------------------------------

    def resolve(self, selection: str = AUTO, model_nbytes: int | None = None) -> tuple[DeviceInfo, ...]:
        """The devices that a user's words mean.

        Args:
            selection: `auto` (one device: a GPU of the first GPU backend that has one, else the CPU by the first
                backend that is made for it and for a model of this size), or backends and device ids, separated by
                commas (`cuda`, `cuda0,vulkan1`). Aliases count as names.
            model_nbytes: size of the model; None for a large one.

        Raises:
            BackendNotFound: there is no such backend or device.
            BackendUnavailable: it exists but cannot be used here.
            ConfigError: a device is named twice, an entry is empty, or plugins.toml names a device that is not there.
        """
        words = [word.strip() for word in selection.split(",")]
        if words == [AUTO]:
            return (self._auto(model_nbytes),)
        devices: list[DeviceInfo] = []
        for word in words:
            if not word:
                raise ConfigError(f"'{selection}' has an empty entry; name devices like 'cuda0,vulkan1'.")
            device = self._device(word)
            if device in devices:
                raise ConfigError(f"'{selection}' names {device.id} twice.")
            devices.append(device)
        return tuple(devices)

    def open(self, device_id: str) -> Device:
        """Open one device (`cuda0`, or `cuda` for the backend's configured one); the caller closes it.

        Raises:
            BackendNotFound: there is no such device.
            BackendUnavailable: it cannot be used here.
        """
        info = self._device(device_id)
        name, _ = self._find(device_id)
        return self.backend(name).open(info.index, self.options(name))

    def _auto(self, model_nbytes: int | None) -> DeviceInfo:
        for wanted in (DeviceKind.GPU, DeviceKind.INTEGRATED, DeviceKind.CPU):
            for name in self.names():
                if _may_have(self.plugins.backends[name], wanted, model_nbytes):
                    devices = [info for info in self.report(name).probe.devices if info.kind is wanted]
                    if devices:
                        configured = self._configured(name)
                        return min(devices, key=lambda info: (info.index != configured, info.index))
        reasons = [f"{report.name}: {report.probe.reason}" for report in self._reports.values()]
        raise BackendUnavailable(AUTO, "; ".join(reasons) or "no plugin offers a backend", "See `noria devices`.")

    def _device(self, word: str) -> DeviceInfo:
        name, index = self._find(word)
        report = self.report(name)
        if report.status is not BackendStatus.USABLE:
            raise BackendUnavailable(name, report.probe.reason, report.probe.hint)
        if index is None:
            index = self._configured(name)
        for info in report.probe.devices:
            if info.index == index:
                return info
        raise BackendNotFound(f"{name}{index}", [info.id for info in report.probe.devices])

    def _configured(self, name: str) -> int:
        """The number of the device that the backend's name alone means; the backend has devices."""
        config, devices = self.plugins.config, self.report(name).probe.devices
        index = config.backend(name).device
        if index and index not in {info.index for info in devices}:  # 0 may be the default, and is no mistake
            ids = ", ".join(info.id for info in devices)
            raise ConfigError(f"{config.where}: backends.{name}.device: there is no device {index}. There are: {ids}.")
        return index

    def _find(self, word: str) -> tuple[str, int | None]:
        """The backend and the device number in `cuda0`, or in `cuda`, where the number is None."""
        catalog = self.plugins.backends
        if word in catalog:
            return catalog.name(word), None
        stem, number = word, None
        if match := DEVICE_ID.fullmatch(word):
            stem, number = match[1], int(match[2])
        if stem in catalog:
            return catalog.name(stem), number
        for record in self.plugins.records:
            if record.name == stem and record.status is not PluginStatus.LOADED:
                raise BackendUnavailable(stem, f"its plugin is not loaded ({record.reason})")
        raise BackendNotFound(word, self.names(), did_you_mean(stem, list(catalog)))


def _may_have(spec: BackendSpec, wanted: DeviceKind, model_nbytes: int | None) -> bool:
    """Whether `auto` looks for this kind of device among those of a backend."""
    if wanted is not DeviceKind.CPU:
        return spec.kind is DeviceKind.GPU
    least = spec.cpu_from_nbytes
    return spec.kind is DeviceKind.CPU or (least is not None and (model_nbytes is None or model_nbytes >= least))
