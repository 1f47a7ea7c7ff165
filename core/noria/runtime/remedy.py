"""What would make a plan fit: the single change of a flag that asks least of the user.

What a change asks is how much of the flag's value it changes, as a share: one more layer of 48 in RAM (`-ncmoe`) is
2 %, half the context (`-c`) is 50 %. A KV cache of 8 bits instead of 16 (`-ctk`, `-ctv`) counts as 25 %: few notice
it. Using the mapped file instead of copies of it (`--load-mode`) asks for nothing. Of changes that ask the same the one
listed first is taken, in the order of `_changes`: what costs speed before what costs context or precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from noria.plugins.config import MIN_SLOTS
from noria.runtime.config import LoadMode
from noria.runtime.placement import is_auto
from noria.runtime.plan import MemoryPlan

if TYPE_CHECKING:
    from noria.runtime.planner import Planner

LEAST_N_TOKENS = 32
QUANTIZED = "Q8_0"

Over = Callable[[MemoryPlan], int]  # bytes over; 0 or less if it fits


def remedy(planner: Planner, over: Over) -> str:
    """A sentence with the smallest single change after which nothing is `over` any more, and all else still fits."""
    fitting = list(_changes(planner, over))
    if not fitting:
        return (
            "No single change of batch, slots, context, KV types or offloaded layers makes it fit; leave layers on the "
            "host (-ngl), drop -ot, or use a smaller model or quantization."
        )
    return f"The smallest single change that fits: {min(fitting, key=lambda change: change[0])[1]}."


def _changes(planner: Planner, over: Over) -> Iterator[tuple[float, str]]:
    """(share, flag and value) of the smallest change of each flag that fits, if there is one.

    What is `auto` is chosen anew for every change, as it would be in the user's next run.
    """
    config, choice = planner.config, planner.first_choice()

    def smallest(key: str, flag: str, now: int, of: int, *ranges: Sequence[int]) -> Iterator[tuple[float, str]]:
        """The first fitting value of `ranges`, each of which goes from the smallest change to the largest."""
        for values in ranges:
            if (value := _first_fitting(planner, over, key, values)) is not None:
                yield abs(value - now) / of, f"{flag} {value}"
                return

    if config.load_mode is LoadMode.NONE and _fits(planner.changed(load_mode=LoadMode.MMAP)):
        yield 0.0, "--load-mode mmap"
    if not is_auto(config.n_cpu_moe):
        more = range(choice.n_cpu_moe + 1, planner.most_cpu_moe + 1)
        yield from smallest("n_cpu_moe", "-ncmoe", choice.n_cpu_moe, planner.most_cpu_moe, more)
    if config.keep_slots:
        fewer = range(choice.n_slots - 1, MIN_SLOTS - 1, -1)
        yield from smallest("prefetch_slots", "--prefetch-slots", choice.n_slots, choice.n_slots, fewer)
    if not is_auto(config.n_ubatch):
        yield from smallest("n_ubatch", "-ub", choice.n_ubatch, choice.n_ubatch, *_round_below(choice.n_ubatch))
    if not is_auto(config.n_batch):
        yield from smallest("n_batch", "-b", choice.n_batch, choice.n_batch, *_round_below(choice.n_batch))
    yield from smallest("n_ctx", "-c", choice.n_ctx, choice.n_ctx, *_round_below(choice.n_ctx))
    quantized = {"type_k": QUANTIZED, "type_v": QUANTIZED}
    possible = all(QUANTIZED in stage.device.caps.kv_types for stage in planner.stages)
    if choice.type_k != QUANTIZED and possible and _fits(planner.changed(**quantized)):
        yield 0.25, "-ctk q8_0 -ctv q8_0"


def _first_fitting(planner: Planner, over: Over, key: str, values: Sequence[int]) -> int | None:
    """By bisection: whatever a value frees, those after it free too. They may take more of something else."""
    low, high = 0, len(values)
    best: MemoryPlan | None = None
    while low < high:
        middle = (low + high) // 2
        change: dict[str, Any] = {key: values[middle]}
        plan = planner.changed(**change)
        if over(plan) <= 0:
            high, best = middle, plan
        else:
            low = middle + 1
    return values[low] if best is not None and _fits(best) else None


def _fits(plan: MemoryPlan) -> bool:
    return plan.shortfall <= 0 and plan.host_shortfall <= 0


def _round_below(value: int) -> tuple[range, range]:
    """Multiples of 256 below `value` down to 1024, then multiples of 32."""
    return (
        range((value - 1) // 256 * 256, 1023, -256),
        range((min(value, 1024) - 1) // 32 * 32, LEAST_N_TOKENS - 1, -32),
    )
