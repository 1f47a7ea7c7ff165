"""What plugins yield: small named records. A hook says what exists; it opens, loads and decides nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from noria.api import Backend, DeviceKind, OptionSpec
from noria.api.errors import PluginError

BACKEND_NAME = re.compile(r"[a-z]([a-z0-9_]*[a-z_])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendSpec:
    """A backend, yielded by `noria_backends`.

    Attributes:
        name: what users write (`--backend cuda`) and what device ids begin with (`cuda0`): lower-case letters, digits
            and underscores, the last not a digit.
        factory: makes the backend; import its modules in here, not in the plugin module.
        summary: one line.
        kind: what its devices are; `--backend auto` asks GPU backends first, then CPU backends, never simulated ones.
        cpu_from_nbytes: of a GPU backend that also drives CPUs well: without a GPU, `auto` takes such a device for
            models of at least this size. Smaller ones may be done before its kernels are compiled. None: never.
        priority: among backends that `auto` may ask for the same kind of device it prefers the highest.
        aliases: other names that find it.
        extra: requirement that brings its libraries, as given to pip (`noria[cuda]`); shown when probe has no hint.
        options: what `[backends.NAME.options]` in plugins.toml may set.
        check_options: called with all options, each of its type; raises a `ConfigError` that begins with the name of
            one whose value makes no sense ("jitter: must be 0 or more, not -1."). Users are told the file as well.

    Raises:
        PluginError: a name that cannot be part of a device id.
    """

    name: str
    factory: Callable[[], Backend]
    summary: str
    kind: DeviceKind
    cpu_from_nbytes: int | None = None
    priority: int = 0
    aliases: tuple[str, ...] = ()
    extra: str = ""
    options: Mapping[str, OptionSpec] = field(default_factory=dict)
    check_options: Callable[[Mapping[str, Any]], None] | None = None

    def __post_init__(self) -> None:
        for name in (self.name, *self.aliases):
            if not BACKEND_NAME.fullmatch(name):
                raise PluginError(
                    f"a backend cannot be named '{name}': use lower-case letters, digits and underscores, begin with "
                    f"a letter and do not end with a digit (the device number follows)."
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchitectureSpec:
    """A model architecture, yielded by `noria_architectures`.

    Attributes:
        name: `general.architecture` of its GGUF files.
        build: makes the model from an open file, as `noria.models.llama.build` does.
        summary: models that have it.
    """

    name: str
    build: Callable[..., Any]
    summary: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySpec:
    """A way to decide how experts are moved, yielded by `noria_policies`.

    Attributes:
        name: what users write (`--prefetch NAME`).
        factory: makes the policy, a `noria.experts.policy.Policy`; one an engine, so it may keep what it has measured.
        summary: one line.
    """

    name: str
    factory: Callable[[], Any]
    summary: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterSpec:
    """A format of timelines, yielded by `noria_timeline_writers`.

    Attributes:
        suffix: end of the file names it writes, with the dot (`.csv`).
        write: writes the spans (`noria.runtime.timeline.TimelineSpan`, in order of their start) to the path.
        summary: one line.
    """

    suffix: str
    write: Callable[[Sequence[Any], Path], None]
    summary: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigDefault:
    """Another default for one value of plugins.toml, yielded by `noria_configure`. What the user's file says wins.

    Attributes:
        key: dotted, in `backends` or `policy` (`backends.vulkan.device`).
        why: shown in the log.
    """

    key: str
    value: bool | int | float | str
    why: str
