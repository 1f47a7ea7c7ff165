"""What a run did: bytes moved, who waited for whom, which experts were used, what was chosen and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from noria.api import Event, Queue
from noria.experts import Decision, Movement, Unit
from noria.runtime.timeline import Timeline


@dataclass
class LayerUse:
    """Expert use of one layer.

    Attributes:
        n_used: experts used, added up over passes; `n_passes` of them.
        latest: share of experts the latest pass used, by its number of tokens.
    """

    n_used: int = 0
    n_passes: int = 0
    latest: dict[int, float] = field(default_factory=dict)


@dataclass
class Counters:
    """Sums over passes. Times are the device's own, in ns.

    Attributes:
        wall_ns: from the first to the last piece of work of each pass.
        h2d_nbytes: expert bytes copied; gather_nbytes: expert bytes that kernels read from host memory.
        copy_busy_ns: the copy queue moving bytes; copy_stall_ns: it waiting for a free slot.
        stall_ns: compute waiting for a copy, or making one in line.
        n_expert: of a layer, for shares.
        compute_us: what a layer's compute took in the latest pass of so many tokens, waits for experts left out.
    """

    n_passes: int = 0
    n_tokens: int = 0
    wall_ns: int = 0
    h2d_nbytes: int = 0
    gather_nbytes: int = 0
    copy_busy_ns: int = 0
    copy_stall_ns: int = 0
    stall_ns: int = 0
    n_expert: int = 0
    compute_us: dict[int, float] = field(default_factory=dict)
    layers: dict[int, LayerUse] = field(default_factory=dict)
    decisions: dict[int, Decision] = field(default_factory=dict)
    movements: Counter[Movement] = field(default_factory=Counter)

    @property
    def h2d_gbps(self) -> float:
        """Rate while copying, GB/s."""
        return self.h2d_nbytes / self.copy_busy_ns if self.copy_busy_ns else 0.0

    @property
    def busy_ns(self) -> int:
        """Compute not waiting for experts."""
        return self.wall_ns - self.stall_ns

    @property
    def compute_idle_pct(self) -> float:
        return 100.0 * self.stall_ns / self.wall_ns if self.wall_ns else 0.0

    @property
    def copy_busy_pct(self) -> float:
        return 100.0 * self.copy_busy_ns / self.wall_ns if self.wall_ns else 0.0

    @property
    def expert_coverage_pct(self) -> float:
        """Experts used, of all, in an average layer and pass."""
        used = sum(use.n_used for use in self.layers.values())
        passes = sum(use.n_passes for use in self.layers.values())
        return 100.0 * used / (passes * self.n_expert) if passes and self.n_expert else 0.0

    def coverage_by_layer(self) -> dict[int, float]:
        """Share of experts used in an average pass, 0-1, by layer."""
        used = {i: use for i, use in sorted(self.layers.items()) if use.n_passes}
        return {i: use.n_used / (use.n_passes * self.n_expert) for i, use in used.items()}

    def fresh(self) -> Counters:
        """Counters at zero that still know what was learned: of each layer's experts, and of compute times."""
        layers = {i: LayerUse(latest=dict(use.latest)) for i, use in self.layers.items()}
        return Counters(n_expert=self.n_expert, layers=layers, compute_us=dict(self.compute_us))

    def used(self, layer: int, n_tokens: int, n_used: int, n_expert: int) -> None:
        """Note how many experts a layer used in a pass."""
        self.n_expert = n_expert
        use = self.layers.setdefault(layer, LayerUse())
        use.n_used += n_used
        use.n_passes += 1
        use.latest[n_tokens] = n_used / n_expert

    def decided(self, decisions: Mapping[int, Decision]) -> None:
        """Note what was chosen for the layers of a pass."""
        self.decisions.update(decisions)
        self.movements.update(decision.movement for decision in decisions.values())

    def record(self) -> dict[str, Any]:
        """For JSON and tables."""
        return {
            "n_passes": self.n_passes,
            "n_tokens": self.n_tokens,
            "wall_ms": round(self.wall_ns / 1e6, 3),
            "h2d_bytes": self.h2d_nbytes,
            "h2d_gbps": round(self.h2d_gbps, 3),
            "gather_bytes": self.gather_nbytes,
            "copy_busy_pct": round(self.copy_busy_pct, 2),
            "copy_stall_ms": round(self.copy_stall_ns / 1e6, 3),
            "compute_idle_pct": round(self.compute_idle_pct, 2),
            "stall_ms": round(self.stall_ns / 1e6, 3),
            "expert_coverage_pct": round(self.expert_coverage_pct, 2),
            "expert_coverage_by_layer": {i: round(c, 4) for i, c in self.coverage_by_layer().items()},
            "movements": {str(k): v for k, v in sorted(self.movements.items())},
        }


class RingMeter:
    """Collects the ring's events during a pass; `settle` reads their times afterwards."""

    enabled = True

    def __init__(self, current: Callable[[], Counters], timeline: Timeline | None) -> None:
        self.current = current
        self.timeline = timeline
        self._copies: list[tuple[Event, Event, Event]] = []
        self._stalls: list[tuple[Event, Event]] = []
        self._started: Event | None = None

    def copied(self, queue: Queue, unit: Unit, before: Event | None, start: Event | None, end: Event) -> None:
        self.current().h2d_nbytes += unit.nbytes
        if before is None or start is None:
            return
        self._copies.append((before, start, end))
        if self.timeline is not None:
            first, last = unit.bounds
            name = f"layer {unit.layer.layer} experts {first}-{last - 1}"
            self.timeline.span(queue, "wait for a free slot", before, start)
            self.timeline.span(queue, name, start, end, nbytes=unit.nbytes)

    def stalled(self, queue: Queue, unit: Unit, before: Event | None, after: Event | None, *, inline: bool) -> None:
        self._started = after
        if before is None or after is None or inline:
            return
        self._stalls.append((before, after))
        if self.timeline is not None:
            self.timeline.span(queue, "wait for experts", before, after, layer=unit.layer.layer)

    def computed(self, queue: Queue, unit: Unit, end: Event) -> None:
        if self.timeline is not None and self._started is not None:
            first, last = unit.bounds
            self.timeline.span(queue, f"layer {unit.layer.layer} ffn {first}-{last - 1}", self._started, end)

    def settle(self, *, inline: bool) -> None:
        """Add this pass's times; all its work is done."""
        counters = self.current()
        for before, start, end in self._copies:
            t0, t1, t2 = before.timestamp_ns(), start.timestamp_ns(), end.timestamp_ns()
            if t0 is None or t1 is None or t2 is None:
                continue
            counters.copy_busy_ns += t2 - t1
            if inline:
                counters.stall_ns += t2 - t1
            else:
                counters.copy_stall_ns += t1 - t0
        for before, after in self._stalls:
            t0, t1 = before.timestamp_ns(), after.timestamp_ns()
            if t0 is not None and t1 is not None:
                counters.stall_ns += t1 - t0
        self._copies.clear()
        self._stalls.clear()
