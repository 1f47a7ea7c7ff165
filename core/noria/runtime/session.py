"""A loaded model: tokens in, logits out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from noria.api import Device, Kernels
from noria.api.errors import ConfigError, DeviceError, PinnedMemoryError
from noria.experts import POLICIES, Policy
from noria.gguf import ModelFile
from noria.models import Model
from noria.runtime.config import EngineConfig
from noria.runtime.counters import Counters, RingMeter
from noria.runtime.fallback import FallbackKernels
from noria.runtime.host_store import Progress
from noria.runtime.link import UNMEASURED, LinkRates, measure_link
from noria.runtime.placement import check_tensors, stage_specs
from noria.runtime.plan import MemoryPlan
from noria.runtime.planner import Planner
from noria.runtime.scheduler import Batch, Ids, Scheduler
from noria.runtime.stage import Stage
from noria.runtime.timeline import Timeline

OpenHost = Callable[[], Device]


def plan_memory(
    file: ModelFile,
    model: Model,
    devices: Sequence[Device],
    open_host: OpenHost,
    config: EngineConfig,
    timeline: Timeline | None = None,
) -> MemoryPlan:
    """The memory plan of a run, without loading anything.

    `open_host` opens the reference device, wanted where layers stay on the host or where a device lacks ops.

    Raises:
        DoesNotFit, ConfigError, ModelError, OpUnsupported: see `Planner.make` and `check_tensors`.
    """
    check_tensors(file, model)
    reference: Device | None = None

    def host() -> Device:
        nonlocal reference
        reference = reference or open_host()
        return reference

    def with_fallback(device: Device) -> Kernels:
        if device.info.backend == host().info.backend:
            return device.kernels
        return FallbackKernels(device.kernels, host(), strict=not config.fallback, timeline=timeline)

    entries = [(device, with_fallback(device)) for device in devices]
    n_layer = model.hparams.n_layer
    on_host = config.n_gpu_layers is not None and config.n_gpu_layers <= n_layer
    host_entry = (host(), host().kernels) if on_host else None
    return Planner(file, model, stage_specs(model, entries, host_entry, config.n_gpu_layers), config).make()


class Session:
    """A model on its devices, with one KV cache. A context manager; the devices and the file stay the caller's.

    Attributes:
        plan: the memory plan it was loaded by.
        counters: of everything since the last `take_counters`.
        notes: what went another way than asked, one line each.
        unused: tensors of the file that the model does not use.
        n_past: tokens in the KV cache.
        rates: of the link of each stage that streams.
    """

    def __init__(
        self,
        file: ModelFile,
        model: Model,
        devices: Sequence[Device],
        open_host: OpenHost,
        config: EngineConfig,
        *,
        policies: Mapping[str, Policy] = POLICIES,
        progress: Progress = lambda what, done, total: None,
        timeline: Timeline | None = None,
    ) -> None:
        if config.prefetch not in policies:
            raise ConfigError(
                f"--prefetch {config.prefetch}: there is no such policy; there are {', '.join(policies)}."
            )
        self.model = model
        self.config = config
        self.unused = check_tensors(file, model)
        self.plan = plan_memory(file, model, devices, open_host, config, timeline)
        self.notes = list(self.plan.notes)
        self.counters = Counters()
        self.n_past = 0
        self.stages: list[Stage] = []
        self.rates: list[LinkRates | None] = []
        lockable_nbytes = self.plan.lockable_nbytes
        try:
            for stage_plan in self.plan.stages:
                device = stage_plan.spec.device
                self.rates.append(self._measure(device) if stage_plan.streamed else None)
                meter = RingMeter(lambda: self.counters, timeline)
                self.stages.append(
                    Stage(stage_plan, self.plan.choice, file, model, config, meter, progress, lockable_nbytes)
                )
                if (store := self.stages[-1].store) is not None:
                    self.notes += store.notes
                    lockable_nbytes -= store.locked_nbytes
        except BaseException:
            self.close()
            raise
        self._scheduler = Scheduler(self.stages, policies[config.prefetch], self.rates, lambda: self.counters, timeline)

    @staticmethod
    def _measure(device: Device) -> LinkRates:
        rates = UNMEASURED
        with suppress(DeviceError, PinnedMemoryError):  # a device that is nearly full can still run
            rates = measure_link(device)
        device.allocated_peak = sum(device.allocated.values())  # the peak that is reported is that of the model
        return rates

    @property
    def n_ctx(self) -> int:
        return self.plan.choice.n_ctx

    def forward(
        self,
        tokens: Sequence[int] | npt.NDArray[np.int32],
        *,
        logits_all: bool = False,
        forced: Ids | None = None,
        capture: bool = False,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> tuple[npt.NDArray[np.float32], Ids | None]:
        """Append tokens to the context; logits of the last (or of all) of them, and the routing if captured.

        Args:
            forced: routing [n_layer, n_tokens, n_expert_used] to use instead of the router's choice.
            progress: called with (tokens done, tokens in all) after every batch.

        Returns:
            F32 [1 or n_tokens, n_vocab], and I32 [n_layer, n_tokens, n_expert_used] or None.

        Raises:
            ConfigError: an id is out of range, the context is full, or the routing has another shape.
            DeviceError: the work failed.
        """
        ids = np.asarray(tokens, np.int32)
        self._check(ids, logits_all, forced)
        logits, routing = [], []
        for first in range(0, len(ids), self.plan.choice.n_batch):
            part = ids[first : first + self.plan.choice.n_batch]
            last = first + len(part) == len(ids)
            result = self._scheduler.run(
                Batch(
                    tokens=part,
                    first_position=self.n_past,
                    logits_all=logits_all,
                    forced=None if forced is None else forced[:, first : first + len(part)],
                    capture=capture,
                )
            )
            self.n_past += len(part)
            if logits_all or last:
                logits.append(result.logits)
            if result.routing is not None:
                routing.append(result.routing)
            progress(first + len(part), len(ids))
        joined = logits[0] if len(logits) == 1 else np.concatenate(logits)  # a token's are not copied once more
        return joined, np.concatenate(routing, axis=1) if routing else None

    def _check(self, ids: npt.NDArray[np.int32], logits_all: bool, forced: Ids | None) -> None:
        p = self.model.hparams
        if not len(ids):
            raise ConfigError("there are no tokens to compute; give a prompt.")
        if ids.min() < 0 or ids.max() >= p.n_vocab:
            bad = int(ids[(ids < 0) | (ids >= p.n_vocab)][0])
            raise ConfigError(f"token id {bad} is outside the model's vocabulary of {p.n_vocab}.")
        if self.n_past + len(ids) > self.n_ctx:
            raise ConfigError(
                f"the context is full: {self.n_past} tokens are in it, {len(ids)} more do not fit -c {self.n_ctx}. "
                f"Raise -c (the model was trained for {p.n_ctx_train})."
            )
        if logits_all and not self.config.logits_all:
            raise ConfigError("logits of all positions were asked of a session that was not planned for them.")
        if forced is not None:
            shape = (p.n_layer, len(ids), max(p.n_expert_used, 1))  # as captured
            if forced.shape != shape:
                raise ConfigError(f"the routing has shape {list(forced.shape)}; this run needs {list(shape)}.")
            moe = [layer for layer in range(p.n_layer) if self.model.moe(layer)]
            if moe and (forced[moe].min() < 0 or forced[moe].max() >= p.n_expert):
                raise ConfigError(f"the routing names experts outside 0-{p.n_expert - 1}.")

    def take_counters(self) -> Counters:
        """The counters since the last call; counting begins anew, but what was learned of coverage is kept."""
        taken, self.counters = self.counters, self.counters.fresh()
        return taken

    def reset(self) -> None:
        """Forget the context."""
        self.n_past = 0

    @property
    def vram_peak_nbytes(self) -> int:
        """The most device memory that was ever allocated, on all devices but the host."""
        devices = {id(stage.device): stage.device for stage in self.stages if not stage.plan.spec.host}
        return sum(device.allocated_peak for device in devices.values())

    def close(self) -> None:
        """Wait for the devices and give back all memory; before the file is closed. A second call does nothing."""
        for stage in self.stages:
            stage.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
