"""Finds plugins, loads them one at a time, and keeps what they offer.

A plugin works as a whole or is left out: whatever goes wrong while it is imported, registered or asked becomes a
`PluginRecord` and one warning, and the others load as if it were not installed. Only two plugins that offer the same
name stop the program, because either choice would be a guess.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import EntryPoint, entry_points, version
from typing import Any, TypeVar

import pluggy

from noria.api.backend import DeviceKind
from noria.api.errors import ConfigError, PluginConflict, PluginError, PluginLoadError
from noria.plugins import hookspecs
from noria.plugins.config import Config, backend_options, did_you_mean, trace_plugins
from noria.plugins.types import ArchitectureSpec, BackendSpec, ConfigDefault, PolicySpec, WriterSpec

logger = logging.getLogger(__name__)
trace_logger = logging.getLogger("noria.plugins.trace")

GROUP = "noria.plugins"
BUILTIN = {"builtin": "noria.builtin.plugin", "models": "noria.models.plugin"}
YIELDS: dict[str, type] = {
    "noria_backends": BackendSpec,
    "noria_architectures": ArchitectureSpec,
    "noria_policies": PolicySpec,
    "noria_timeline_writers": WriterSpec,
    "noria_configure": ConfigDefault,
}


class PluginStatus(StrEnum):
    LOADED = "loaded"
    DISABLED = "disabled"  # never imported
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginRecord:
    """What became of one plugin.

    Attributes:
        name: of its entry point; the name that `plugins.disabled` takes.
        dist: name and version of the distribution it came with.
        hooks: the hooks it has, if it is loaded.
        reason: why it is not loaded.
    """

    name: str
    dist: str
    status: PluginStatus
    hooks: tuple[str, ...] = ()
    reason: str = ""


SpecT = TypeVar("SpecT")


class Catalog(Mapping[str, SpecT]):
    """What plugins offer of one kind, by name. Looking up an alias works too; iterating gives names only."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._specs: dict[str, SpecT] = {}
        self._names: dict[str, str] = {}  # by name and alias
        self._dists: dict[str, str] = {}

    def add(self, spec: SpecT, name: str, dist: str, aliases: tuple[str, ...] = ()) -> None:
        """Add what `dist` offers.

        Raises:
            PluginConflict: the name or an alias is taken.
        """
        for each in (name, *aliases):
            if each in self._names:
                raise PluginConflict(self.kind, each, self.dist(each), dist)
        self._specs[name] = spec
        self._dists[name] = dist
        self._names |= dict.fromkeys((name, *aliases), name)

    def name(self, alias: str) -> str:
        """The name that this name or alias stands for."""
        return self._names[alias]

    def dist(self, name: str) -> str:
        """The distribution that offers it."""
        return self._dists[self._names[name]]

    def __getitem__(self, name: str) -> SpecT:
        return self._specs[self._names[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)


class PluginManager:
    """All plugins and what they offer, loaded when it is made.

    Args:
        config: what plugins.toml says.
        external: look for installed plugins; without, only those that come with the core load.

    Attributes:
        config: as given, with the defaults that plugins proposed.
        records: all plugins, loaded or not, in the order in which they were looked at.

    Raises:
        PluginConflict: two plugins offer the same name.
        ConfigError: plugins.toml has a table for a backend that does not exist, options it does not take, a policy that
            nobody offers, or disables what comes with the core.
    """

    def __init__(self, config: Config | None = None, *, external: bool = True) -> None:
        self.config = config or Config()
        self.records: list[PluginRecord] = []
        self.backends: Catalog[BackendSpec] = Catalog("backend")
        self.architectures: Catalog[ArchitectureSpec] = Catalog("architecture")
        self.policies: Catalog[PolicySpec] = Catalog("policy")
        self.timeline_writers: Catalog[WriterSpec] = Catalog("timeline writer")
        self._trace = trace_plugins()
        if self._trace:
            trace_logger.setLevel(logging.INFO)
        self._pluggy = pluggy.PluginManager(hookspecs.PROJECT)
        self._pluggy.add_hookspecs(hookspecs)

        core = f"noria {version('noria')}"
        for name, module in BUILTIN.items():
            self._load(EntryPoint(name, module, GROUP), core)
        self._check_disabled()
        off = "" if external else "--no-external-plugins was given"
        if external and not self.config.plugins.autoload:
            off = f"plugins.autoload is false in {self.config.where}"
        for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
            dist = f"{entry.dist.name} {entry.dist.version}" if entry.dist else "an unknown distribution"
            self._load(entry, dist, off)
        self._check_names()
        self._configure()

    # --- loading -------------------------------------------------------------------------------------------------

    def _load(self, entry: EntryPoint, dist: str, off: str = "") -> None:
        """Import a plugin and take what it offers, unless it is disabled or `off` says why not."""
        name = entry.name
        if name in self.config.plugins.disabled and name not in BUILTIN:
            off = f"named in plugins.disabled of {self.config.where}"
        if off:
            self.records.append(PluginRecord(name=name, dist=dist, status=PluginStatus.DISABLED, reason=off))
            return
        for record in self.records:
            if record.name == name:
                raise PluginConflict("plugin", name, record.dist, dist)
        plugin = None
        try:
            plugin = entry.load()
            self._pluggy.register(plugin, name)
            self._pluggy.check_pending()  # at once, so that a misspelled hook is the fault of this plugin alone
            offers = {hook: self._call(hook, name) for hook in YIELDS if hook != "noria_configure"}
        except (Exception, SystemExit) as error:
            if self._pluggy.get_plugin(name) is not None:
                self._pluggy.unregister(name=name)
            reason = f"{type(error).__name__}: {error}"
            self.records.append(PluginRecord(name=name, dist=dist, status=PluginStatus.FAILED, reason=reason))
            verbose = logger.isEnabledFor(logging.DEBUG)
            logger.warning("%s", PluginLoadError(name, dist, error), exc_info=error if verbose else None)
            return
        for backend in offers["noria_backends"]:
            self.backends.add(backend, backend.name, dist, backend.aliases)
        for architecture in offers["noria_architectures"]:
            self.architectures.add(architecture, architecture.name, dist)
        for policy in offers["noria_policies"]:
            self.policies.add(policy, policy.name, dist)
        for writer in offers["noria_timeline_writers"]:
            self.timeline_writers.add(writer, writer.suffix, dist)
        hooks = tuple(sorted(caller.name for caller in self._pluggy.get_hookcallers(plugin) or ()))
        self.records.append(PluginRecord(name=name, dist=dist, status=PluginStatus.LOADED, hooks=hooks))

    def _call(self, hook: str, name: str, **arguments: object) -> list[Any]:
        """What one plugin yields from one hook. A call to all of them would end at the first that raises."""
        others = [plugin for other, plugin in self._pluggy.list_name_plugin() if other != name]
        start_ns = time.perf_counter_ns()
        results = self._pluggy.subset_hook_caller(hook, others)(**arguments)
        items = [item for result in results for item in result]
        for item in items:
            if not isinstance(item, YIELDS[hook]):
                raise PluginError(f"{hook} yielded {item!r}, which is no {YIELDS[hook].__name__}")
        if self._trace and results:
            trace_logger.info("%s: %s() -> %s in %.2f ms", name, hook, items, (time.perf_counter_ns() - start_ns) / 1e6)
        return items

    # --- configuration -------------------------------------------------------------------------------------------

    def _check_disabled(self) -> None:
        """What comes with the core cannot be disabled: commands count on it. Only that is loaded yet."""
        for name in self.config.plugins.disabled:
            begin = f"{self.config.where}: plugins.disabled: '{name}' comes with noria and cannot be disabled"
            if name in self.backends:
                backend = self.backends.name(name)
                raise ConfigError(f"{begin} as a plugin. Set enabled = false in [backends.{backend}] to leave it out.")
            if name in BUILTIN or name in self.architectures:
                raise ConfigError(f"{begin}. Remove it from the list.")

    def _check_names(self) -> None:
        """Names in plugins.toml that nothing answers to: an error in a table, a warning in a list.

        The backends of a plugin that is not loaded are unknown, so then a table may be meant for one of them.
        """
        where, plugins = self.config.where, [record.name for record in self.records]
        missing = {record.name for record in self.records if record.status is not PluginStatus.LOADED}
        for name in self.config.backends:
            if name in self.backends:
                if self.backends.name(name) != name:
                    raise ConfigError(f"{where}: backends.{name}: an alias; write backends.{self.backends.name(name)}.")
            elif name not in missing:
                hint = did_you_mean(name, list(self.backends)) or f"There are: {', '.join(self.backends)}."
                text = f"{where}: backends.{name}: no installed plugin offers this backend. {hint}"
                if not missing:
                    raise ConfigError(text)
                logger.warning("%s", text)
        for name in self.config.plugins.disabled:
            if name not in plugins:
                hint = did_you_mean(name, plugins) or f"There are: {', '.join(set(plugins) - set(BUILTIN)) or 'none'}."
                logger.warning("%s: plugins.disabled: no plugin is named '%s'. %s", where, name, hint)
        for name in self.config.plugins.order:
            if name not in self.backends and name not in missing:
                known = [*self.backends, *sorted(missing)]
                hint = did_you_mean(name, known) or f"There are: {', '.join(known)}."
                logger.warning("%s: plugins.order: no backend is named '%s'. %s", where, name, hint)
            elif name in self.backends and self.backends[name].kind is DeviceKind.SIMULATED:
                logger.warning("%s: plugins.order: auto never takes '%s', which is simulated; name it.", where, name)
        self._check_values(self.config, where)

    def _check_values(self, config: Config, where: str) -> None:
        for name, spec in self.backends.items():
            backend_options(config.backend(name), spec, where)
        policies = list(self.policies)
        if config.policy.prefetch not in policies:
            text = f"{where}: policy.prefetch: there is no policy '{config.policy.prefetch}'."
            hint = did_you_mean(config.policy.prefetch, policies) or f"There are: {', '.join(policies)}."
            raise ConfigError(f"{text} {hint}")

    def _configure(self) -> None:
        """Ask plugins for other defaults and take those that are possible; the first to propose a key decides it."""
        asked = self.config
        for record in [r for r in self.records if "noria_configure" in r.hooks]:
            source = f"noria_configure of plugin '{record.name}' ({record.dist})"
            try:
                for default in self._call("noria_configure", record.name, config=asked):
                    config = self.config.with_default(default.key, default.value, source)
                    self._check_values(config, source)
                    taken = "is set already" if config is self.config else "taken"
                    logger.info("%s: %s = %r (%s): %s", source, default.key, default.value, default.why, taken)
                    self.config = config
            except ConfigError as error:
                logger.warning("%s", error)
            except (Exception, SystemExit) as error:
                logger.warning("%s raised %s: %s", source, type(error).__name__, error)
