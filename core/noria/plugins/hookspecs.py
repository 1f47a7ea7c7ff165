"""The hooks. A plugin is a module that has some of these functions, marked with `@hookimpl`, and that is named by an
entry point of the group `noria.plugins`:

    [project.entry-points."noria.plugins"]
    acme = "noria_acme.plugin"

Every hook yields records of `noria.plugins.types`. The plugin module is imported at every start of noria, so it imports
nothing heavy: no GPU library, and its own other modules only inside the factories.
"""

from __future__ import annotations

from collections.abc import Iterable

import pluggy

from noria.plugins.config import Config
from noria.plugins.types import ArchitectureSpec, BackendSpec, ConfigDefault, PolicySpec, WriterSpec

PROJECT = "noria"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def noria_backends() -> Iterable[BackendSpec]:
    """Offer backends.

    Example:
        ```python
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
                summary="Acme accelerators",
                kind=DeviceKind.GPU,
                priority=40,
                extra="noria-acme[driver]",
                options={"copy_queues": OptionSpec(default=1, help="copy queues to open")},
            )
        ```
    """
    raise NotImplementedError


@hookspec
def noria_architectures() -> Iterable[ArchitectureSpec]:
    """Offer model architectures, by the `general.architecture` of their GGUF files.

    Example:
        ```python
        from collections.abc import Iterable
        from typing import Any

        from noria.plugins import ArchitectureSpec, hookimpl


        def build(*args: Any) -> Any:
            from noria.models import llama

            return llama.build(*args)


        @hookimpl
        def noria_architectures() -> Iterable[ArchitectureSpec]:
            yield ArchitectureSpec(name="acme-moe", build=build, summary="llama under a name of its own")
        ```
    """
    raise NotImplementedError


@hookspec
def noria_policies() -> Iterable[PolicySpec]:
    """Offer ways to decide how experts are moved, chosen with `--prefetch NAME`.

    Example:
        ```python
        from collections.abc import Iterable

        from noria.experts.policy import Decision, Movement, Policy, Situation
        from noria.experts.slab import ExpertLayer
        from noria.plugins import PolicySpec, hookimpl


        def choose(layer: ExpertLayer, situation: Situation) -> Decision:
            if situation.n_tokens >= 32:
                return Decision(movement=Movement.WHOLE, why="32 tokens or more")
            return Decision(movement=Movement.SELECTIVE, why="fewer than 32 tokens")


        def make_policy() -> Policy:
            return choose


        @hookimpl
        def noria_policies() -> Iterable[PolicySpec]:
            yield PolicySpec(name="threshold", factory=make_policy, summary="whole from 32 tokens on")
        ```
    """
    raise NotImplementedError


@hookspec
def noria_timeline_writers() -> Iterable[WriterSpec]:
    """Offer file formats for `--timeline FILE`, by suffix.

    Example:
        ```python
        from collections.abc import Iterable, Sequence
        from pathlib import Path
        from typing import Any

        from noria.plugins import WriterSpec, hookimpl


        def write_text(spans: Sequence[Any], path: Path) -> None:
            lines = [f"{span.start_ns} {span.lane} {span.name} {span.duration_ns}\\n" for span in spans]
            path.write_text("".join(lines), encoding="utf-8")


        @hookimpl
        def noria_timeline_writers() -> Iterable[WriterSpec]:
            yield WriterSpec(suffix=".txt", write=write_text, summary="a line a span")
        ```
    """
    raise NotImplementedError


@hookspec
def noria_configure(config: Config) -> Iterable[ConfigDefault]:
    """Propose other defaults for plugins.toml, knowing what the user's file says. Called once, when all plugins loaded.

    For packages that know a machine: a cluster, a driver that needs an option. What the file sets is never changed.

    Example:
        ```python
        import platform
        from collections.abc import Iterable

        from noria.plugins import Config, ConfigDefault, hookimpl


        @hookimpl
        def noria_configure(config: Config) -> Iterable[ConfigDefault]:
            if platform.machine() == "x86_64" and config.policy.prefetch == "auto":
                yield ConfigDefault(key="policy.prefetch_slots", value=6, why="slow link")
        ```
    """
    raise NotImplementedError
