"""What a user can ask of the engine, in one record. `AUTO` leaves a choice to the memory plan."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Literal

from noria.api.errors import ConfigError
from noria.experts import OFF
from noria.plugins.config import MAX_SLOTS, MIN_SLOTS

AUTO: Final = "auto"
Auto = Literal["auto"]

MAX_TOKENS = 2**31 - 1  # positions and rows are I32


class LoadMode(StrEnum):
    """How experts that stay in RAM get there (`--load-mode`)."""

    AUTO = "auto"  # mmap where the device can page-lock a mapping in place, none otherwise
    MMAP = "mmap"  # the mapped file, registered in place
    NONE = "none"  # read into page-locked memory


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Engine flags. Names in brackets are those of the command line.

    Attributes:
        n_gpu_layers: layers on the devices, counted from the last; the output counts as one more [-ngl]. None = all.
        n_cpu_moe: layers whose experts stay in host RAM, spread evenly [-ncmoe].
        override_tensors: (pattern, "CPU" or "GPU"): experts whose tensor names match, first match wins [-ot].
        n_ctx: KV cells [-c]. None = 4096 or the model's context, whichever is smaller.
        n_batch: tokens for which experts cross the bus once [-b].
        n_ubatch: tokens computed at once [-ub].
        n_prompt: how long prompts will be, if known: no `auto` batch needs to be larger.
        type_k, type_v: ggml types of the KV cache [-ctk, -ctv].
        prefetch: name of a policy; "off" makes its copies in line on the compute queue [--prefetch].
        prefetch_slots: slots of the ring [--prefetch-slots]; fewer if there is no room, unless `keep_slots`.
        logits_all: logits of every position are wanted, not only of the last.
        fallback: ops that a device lacks may run on the reference [--no-fallback].
        chaos_seed: poison slots and delay queues at random; results must not change [--chaos].
        memory_nbytes: plan for this much device memory instead of what is free [--memory].
    """

    n_gpu_layers: int | None = None
    n_cpu_moe: int | Auto = AUTO
    override_tensors: tuple[tuple[str, str], ...] = ()
    n_ctx: int | None = None
    n_batch: int | Auto = AUTO
    n_ubatch: int | Auto = AUTO
    n_prompt: int | None = None
    type_k: str = "F16"
    type_v: str = "F16"
    prefetch: str = "auto"
    prefetch_slots: int = 4
    keep_slots: bool = False
    load_mode: LoadMode = LoadMode.AUTO
    logits_all: bool = False
    fallback: bool = True
    chaos_seed: int | None = None
    memory_nbytes: int | None = None
    _patterns: list[tuple[re.Pattern[str], bool]] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for flag, value, least in (
            ("-ngl", self.n_gpu_layers, 0),
            ("-ncmoe", self.n_cpu_moe, 0),
            ("-c", self.n_ctx, 1),
            ("-b", self.n_batch, 1),
            ("-ub", self.n_ubatch, 1),
        ):
            if isinstance(value, int) and value < least:
                raise ConfigError(f"{flag} is {value}; it must be at least {least}.")
        for flag, value in (("-c", self.n_ctx), ("-b", self.n_batch), ("-ub", self.n_ubatch)):
            if isinstance(value, int) and value > MAX_TOKENS:
                raise ConfigError(f"{flag} is {value}; it must be at most {MAX_TOKENS}, the largest position there is.")
        if not MIN_SLOTS <= self.prefetch_slots <= MAX_SLOTS:
            raise ConfigError(
                f"--prefetch-slots is {self.prefetch_slots}; it must be {MIN_SLOTS} to {MAX_SLOTS} "
                f"(use --prefetch off to turn the ring off)."
            )
        for pattern, target in self.override_tensors:
            if target not in ("CPU", "GPU"):
                raise ConfigError(f"-ot {pattern}={target}: the target must be CPU or GPU.")
            try:
                self._patterns.append((re.compile(pattern), target == "CPU"))
            except re.error as error:
                raise ConfigError(f"-ot {pattern}={target}: not a regular expression: {error}.") from error

    @property
    def inline(self) -> bool:
        """Whether copies run on the compute queue."""
        return self.prefetch == OFF

    def override(self, tensor_names: tuple[str, ...]) -> bool | None:
        """Whether `-ot` sends these experts to the host (True) or the device (False); None where it says nothing."""
        for pattern, to_host in self._patterns:
            if any(pattern.search(name) for name in tensor_names):
                return to_host
        return None
