"""How experts reach the kernels, decided for each layer and step by measured cost.

Every choice computes the same bits; they differ in what crosses the bus and in who waits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from noria.experts.slab import ExpertLayer

GATHER_SHARE = 0.89  # of the rate of copies, that of kernels reading pinned memory: 48.8 of 54.8 GB/s on an H200
ALL = 0.98  # coverage from which on a prefetched whole stream is always better: it is ahead of the compute


class Movement(StrEnum):
    RESIDENT = "resident"  # on the device for good
    WHOLE = "whole"  # all experts, prefetched through the ring; nobody reads the routing
    SELECTIVE = "selective"  # only the used ones: the host reads the routing first
    GATHER = "gather"  # kernels read the used ones straight from pinned host memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What was chosen for a layer, and why in a few words."""

    movement: Movement
    why: str


class LinkRates(Protocol):
    """What the policy wants to know of a link."""

    def rate_gbps(self, nbytes: int) -> float:
        """Host-to-device GB/s of copies of this size."""

    @property
    def latency_us(self) -> float:
        """From the host's decision to the first byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What a policy may look at.

    Attributes:
        n_tokens: of the batch.
        coverage: share of the layer's experts that this many tokens are expected to use, 0-1.
        compute_us: what computing a layer took when this many tokens were computed last, without waiting for experts;
            0 while nobody knows.
        rates: of the link.
        can_gather: kernels can read this layer's experts where they are.
        can_prefetch: the ring runs beside the compute.
    """

    n_tokens: int
    coverage: float
    compute_us: float
    rates: LinkRates
    can_gather: bool
    can_prefetch: bool


Policy = Callable[[ExpertLayer, Situation], Decision]


def uniform_coverage(n_tokens: int, n_expert: int, n_expert_used: int) -> float:
    """Expected share of experts used by `n_tokens` if each chose at random."""
    return 1.0 - (1.0 - n_expert_used / n_expert) ** n_tokens


def whole(layer: ExpertLayer, situation: Situation) -> Decision:
    return Decision(movement=Movement.WHOLE, why="asked for")


def selective(layer: ExpertLayer, situation: Situation) -> Decision:
    return Decision(movement=Movement.SELECTIVE, why="asked for")


def cheapest(layer: ExpertLayer, situation: Situation) -> Decision:
    """Whatever moves a layer's experts in the least time, by the rates of the link.

    A whole stream moves every byte at the link's best rate, beside the compute. The alternatives move only the used
    slabs, but nothing of it can begin before this layer's routing is known, so compute and copies take turns: selective
    copies also pay the way to the host and back, a gather does not.
    """
    rates, coverage, compute_us = situation.rates, situation.coverage, situation.compute_us
    used_nbytes, tensor_nbytes = coverage * layer.nbytes, layer.nbytes // 3
    # Neighbours that are both used make one copy; if tokens choose at random, so many experts on average.
    n_run = 1 / max(1 - coverage, 1 / layer.n_expert)
    run_nbytes = int(n_run * tensor_nbytes / layer.n_expert)
    whole_us = layer.nbytes / rates.rate_gbps(tensor_nbytes) / 1e3
    us = {
        Movement.WHOLE: max(whole_us, compute_us) if situation.can_prefetch else whole_us + compute_us,
        Movement.SELECTIVE: used_nbytes / rates.rate_gbps(run_nbytes) / 1e3 + 2 * rates.latency_us + compute_us,
    }
    if situation.can_gather:
        us[Movement.GATHER] = used_nbytes / (GATHER_SHARE * rates.rate_gbps(tensor_nbytes)) / 1e3 + compute_us
    movement = min(us, key=us.__getitem__)
    if situation.can_prefetch and coverage > ALL:
        movement = Movement.WHOLE
    figures = ", ".join(f"{way} {time:.0f} us" for way, time in us.items())
    return Decision(movement=movement, why=f"{coverage * layer.n_expert:.0f} of {layer.n_expert} experts: {figures}")


def inline(layer: ExpertLayer, situation: Situation) -> Decision:
    """The same bytes as `cheapest` would move by copies, without a ring to hide them."""
    few = Situation(
        n_tokens=situation.n_tokens,
        coverage=situation.coverage,
        compute_us=situation.compute_us,
        rates=situation.rates,
        can_gather=False,
        can_prefetch=False,
    )
    return cheapest(layer, few)


OFF = "off"  # the one name that also says where copies run: in line on the compute queue, the A of every A/B

POLICIES: dict[str, Policy] = {OFF: inline, "whole": whole, "selective": selective, "auto": cheapest}
