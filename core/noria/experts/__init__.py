"""Moving experts from host RAM to the kernels: the point of the project. Pure Python over the contract."""

from noria.experts.bounce import Bounce
from noria.experts.chaos import Chaos
from noria.experts.meter import Meter
from noria.experts.policy import (
    OFF,
    POLICIES,
    Decision,
    LinkRates,
    Movement,
    Policy,
    Situation,
    uniform_coverage,
)
from noria.experts.ring import Filled, Prefetcher, Ring, Slot, slot_nbytes_for
from noria.experts.slab import ExpertLayer, ExpertTensor, Unit, UnitLayout, padded, split_range, split_used, unit_layout
from noria.experts.tables import RangeTables, TableKey

__all__ = [
    "OFF",
    "POLICIES",
    "Bounce",
    "Chaos",
    "Decision",
    "ExpertLayer",
    "ExpertTensor",
    "Filled",
    "LinkRates",
    "Meter",
    "Movement",
    "Policy",
    "Prefetcher",
    "RangeTables",
    "Ring",
    "Situation",
    "Slot",
    "TableKey",
    "Unit",
    "UnitLayout",
    "padded",
    "slot_nbytes_for",
    "split_range",
    "split_used",
    "uniform_coverage",
    "unit_layout",
]
