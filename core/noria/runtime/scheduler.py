"""Runs batches through the stages: layer by layer, inside a layer tile by tile, experts unit by unit.

Inside one batch a layer's experts cross the bus once, however many tiles its tokens make. Nothing here waits for the
device but reading back results, and the routing where experts are fetched selectively.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from noria.api import Event, Program, align_up
from noria.api.errors import PluginError
from noria.experts import (
    Decision,
    LinkRates,
    Movement,
    Policy,
    Prefetcher,
    Situation,
    Unit,
    split_used,
    uniform_coverage,
)
from noria.runtime.counters import Counters
from noria.runtime.stage import Stage, Tables
from noria.runtime.timeline import Timeline

PROGRAM_KV_STEP = 256  # cells by which a recorded token's attention bound grows: it is recorded anew so often

Decisions = dict[int, Decision]  # by layer
Ids = npt.NDArray[np.int32]  # routing, [n_layer, n_tokens, n_expert_used]; -1 in layers without experts


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Tokens to be computed together.

    Attributes:
        tokens: I32 [n].
        first_position: of the first token; the others follow.
        logits_all: logits of every token are wanted, not only of the last.
        forced: routing to use instead of the router's choice.
        capture: routing is wanted back.
    """

    tokens: npt.NDArray[np.int32]
    first_position: int
    logits_all: bool = False
    forced: Ids | None = None
    capture: bool = False

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)

    @property
    def n_kv(self) -> int:
        return self.first_position + self.n_tokens


@dataclass(frozen=True, kw_only=True)
class Result:
    """logits: F32 [1 or n, n_vocab]; routing: as captured."""

    logits: npt.NDArray[np.float32]
    routing: Ids | None


class StageRunner:
    """Enqueues a batch's work on one stage."""

    def __init__(
        self,
        stage: Stage,
        policy: Policy,
        rates: LinkRates | None,
        current: Callable[[], Counters],
        timeline: Timeline | None,
    ) -> None:
        self.stage, self.policy, self.rates = stage, policy, rates
        self._current, self.timeline = current, timeline
        self.programs: dict[Hashable, Program] = {}
        self._decided: tuple[int, Decisions] = (0, {})  # for this many tokens; one token after another is decided once
        self.prefetcher: Prefetcher | None = None

    @property
    def counters(self) -> Counters:
        return self._current()

    # --- a pass --------------------------------------------------------------------------------------------------

    def begin(self, n: int) -> None:
        """Decide how experts move in a pass of `n` tokens, and begin to fill the ring."""
        if n != 1 or self._decided[0] != 1:
            self._decided = n, self._decide(n)
        decisions = self._decided[1]
        self.counters.decided(decisions)
        self.prefetcher = None
        self._prefetch_from(self.stage.layers.start, decisions)

    def enqueue(self, batch: Batch) -> None:
        """Enqueue all layers of this stage, after `upload` and `begin`."""
        stage, n, decisions = self.stage, batch.n_tokens, self._decided[1]
        if n != 1 or not self._recordable(decisions):
            self._layers(batch, decisions, batch.n_kv)
            return
        n_kv = min(align_up(batch.n_kv, PROGRAM_KV_STEP), stage.choice.n_ctx)
        movements = tuple(decision.movement for decision in decisions.values())
        key = (n_kv, batch.forced is not None, batch.capture, batch.logits_all, movements)
        if key not in self.programs:
            with stage.queue.program(key) as program:
                self._layers(batch, decisions, n_kv)
            self.programs[key] = program
        stage.queue.run(self.programs[key])

    def _recordable(self, decisions: Decisions) -> bool:
        """Whether one token's work is the same every time, so that it can be recorded once."""
        fixed = all(d.movement in (Movement.RESIDENT, Movement.GATHER) for d in decisions.values())
        return fixed and self.stage.recordable and self.timeline is None

    def _decide(self, n_tokens: int) -> Decisions:
        stage, decisions = self.stage, {}
        p = stage.model.hparams
        for layer in stage.moes:
            if layer not in stage.plan.offloaded:
                decision = Decision(movement=Movement.RESIDENT, why="on the device")
            elif stage.ring is None:
                decision = Decision(movement=Movement.GATHER, why="the kernels read host memory as their own")
            else:
                assert stage.store is not None
                assert self.rates is not None
                use = self.counters.layers.get(layer)
                guess = uniform_coverage(n_tokens, p.n_expert, p.n_expert_used)
                situation = Situation(
                    n_tokens=n_tokens,
                    coverage=use.latest.get(n_tokens, guess) if use else guess,
                    compute_us=self.counters.compute_us.get(n_tokens, 0.0),
                    rates=self.rates,
                    can_gather=layer in stage.whole,
                    can_prefetch=not stage.ring.inline,
                )
                decision = self.policy(stage.store.layers[layer], situation)
                if decision.movement is Movement.RESIDENT or (
                    decision.movement is Movement.GATHER and not situation.can_gather
                ):
                    raise PluginError(f"the policy chose {decision.movement} for layer {layer}: impossible here.")
            decisions[layer] = decision
        return decisions

    def upload(self, batch: Batch, hidden: npt.NDArray[np.float32] | None) -> None:
        """Enqueue the copies of what a pass needs; `hidden` [n, n_embd] comes from the stage before."""
        stage, n = self.stage, batch.n_tokens
        # The last pass is done (`Scheduler.run`), so nothing reads this host memory any more.
        host = stage.inputs.span().host_view(np.int32)
        host[:n] = batch.tokens
        host[n : 2 * n] = np.arange(batch.first_position, batch.n_kv)
        stage.copy_in(stage.tokens.rows(0, n).span, stage.inputs.span(0, 4 * n))
        stage.copy_in(stage.positions.rows(0, n).span, stage.inputs.span(4 * n, 4 * n))
        if hidden is not None:
            span = stage.hop(n)
            span.host_view(np.float32)[:] = hidden.reshape(-1)
            stage.copy_in(stage.hidden.rows(0, n).span, span)
        if batch.forced is not None or batch.capture:
            stage.keep_routing()
        if batch.forced is not None:
            for layer in stage.moes:
                stage.routing(layer, n).host_view(np.int32)[:] = batch.forced[layer].reshape(-1)

    def _layers(self, batch: Batch, decisions: Decisions, n_kv: int) -> None:
        stage, n = self.stage, batch.n_tokens
        if stage.plan.spec.embed:
            stage.model.embed(stage.graph, stage.hidden.rows(0, n), stage.tokens.rows(0, n))
        for layer in stage.layers:
            with self._host(f"enqueue layer {layer}"):
                self._layer(layer, batch, n_kv)
                if layer in stage.moes:
                    self._experts(layer, batch, decisions)
        if stage.plan.spec.output and not batch.logits_all:
            self._output(n - 1, n)
        stage.fetch_counts()

    def _layer(self, layer: int, batch: Batch, n_kv: int) -> None:
        """Everything of a layer but its experts, ubatch by ubatch."""
        stage, model, g = self.stage, self.stage.model, self.stage.graph
        n, n_ubatch = batch.n_tokens, stage.choice.n_ubatch
        start = self._mark()
        moe = stage.moes.get(layer)
        if batch.forced is not None and moe is not None:
            stage.copy_in(stage.rows(n, layer).ids.span, stage.routing(layer, n))
        for first in range(0, n, n_ubatch):
            end = min(first + n_ubatch, n)
            h, positions = stage.hidden.rows(first, end), stage.positions.rows(first, end)
            with g.workspace.scope():
                bound = n_kv if end == n else batch.first_position + end
                model.attention(g, layer, h, positions, stage.kv[layer], bound)
            with g.workspace.scope():
                if moe is None:
                    model.ffn(g, layer, h)
                    continue
                rows = stage.rows(n, layer)
                ids, weights = rows.ids.rows(first, end), rows.weights.rows(first, end)
                x = stage.x(n).rows(first, end)
                model.route(g, layer, h, x, ids, weights, forced=batch.forced is not None)
        self._span(f"layer {layer} attention and router" if moe else f"layer {layer}", start)

    # --- experts -------------------------------------------------------------------------------------------------

    def _experts(self, layer: int, batch: Batch, decisions: Decisions) -> None:
        stage, n = self.stage, batch.n_tokens
        rows = stage.rows(n, layer)
        stage.kernels.sort_rows(stage.queue, rows, stage.graph.scratch)
        if batch.capture:
            stage.copy_out(stage.routing(layer, n), rows.ids.span)
        movement = decisions[layer].movement
        if movement in (Movement.RESIDENT, Movement.GATHER):
            start = self._mark()
            self._compute(layer, n, stage.whole[layer], (0, rows.n_expert))
            self._span(f"layer {layer} ffn, {movement}", start)
            return
        if movement is Movement.WHOLE:
            assert self.prefetcher is not None
            for _ in stage.units(layer):
                self._compute_unit(self.prefetcher, n)
            return
        assert stage.ring is not None
        assert stage.store is not None
        stage.fetch_counts(layer)
        routing = stage.queue.record("routing")
        self._await(routing)
        used = np.flatnonzero(stage.read_counts()[list(stage.moes).index(layer)]).tolist()
        experts = stage.store.layers[layer]
        units = [Unit(layer=experts, experts=group) for group in split_used(used, stage.capacity(layer))]
        prefetcher = Prefetcher(stage.ring, iter(units), idle_since=routing)
        prefetcher.start()
        for _ in units:
            self._compute_unit(prefetcher, n)
        self._prefetch_from(layer + 1, decisions)

    def _compute_unit(self, prefetcher: Prefetcher, n: int) -> None:
        filled = prefetcher.next()
        self._compute(filled.unit.layer.layer, n, filled.tables, filled.unit.bounds)
        prefetcher.release(filled)

    def _compute(self, layer: int, n: int, tables: Tables, experts: tuple[int, int]) -> None:
        stage, rows = self.stage, self.stage.rows(n, layer)
        gate, up, down = tables
        stage.kernels.expert_ffn(
            stage.queue,
            stage.hidden.rows(0, n),
            stage.x(n),
            gate,
            up,
            down,
            rows,
            experts,
            min(n, stage.choice.n_ubatch) * rows.n_expert_used,
            stage.moes[layer].kind,
            scratch=stage.graph.scratch,
        )

    def _prefetch_from(self, layer: int, decisions: Decisions) -> None:
        """Begin to stream the whole layers from `layer` to the next one that is fetched selectively.

        Such a layer takes the ring for itself, so nothing that comes after it is filled before it is done.
        """
        stage = self.stage
        if stage.ring is None:
            return

        def units() -> Iterator[Unit]:
            for i in range(layer, stage.layers.stop):
                movement = decisions[i].movement if i in decisions else Movement.RESIDENT
                if movement is Movement.SELECTIVE:
                    return
                if movement is Movement.WHOLE:
                    yield from stage.units(i)

        self.prefetcher = Prefetcher(stage.ring, units())
        self.prefetcher.start()

    # --- in and out ----------------------------------------------------------------------------------------------

    def hidden(self, n: int) -> npt.NDArray[np.float32]:
        """The hidden state [n, n_embd] for the next stage; waits for it."""
        stage = self.stage
        span = stage.hop(n)
        stage.copy_out(span, stage.hidden.rows(0, n).span)
        self._await(stage.queue.record("hidden"))
        return span.host_view(np.float32).reshape(n, -1).copy()

    def logits(self, n: int, every: bool) -> npt.NDArray[np.float32]:
        """Logits of all `n` tokens of the batch, or of the last; waits for them. F32 [n or 1, n_vocab]."""
        stage, n_vocab = self.stage, self.stage.model.hparams.n_vocab
        host = stage.logits.span().host_view(np.float32).reshape(-1, n_vocab)
        if not every:
            self._await(stage.queue.record("logits"))
            return host[:1].copy()
        out = np.empty((n, n_vocab), np.float32)
        for first in range(0, n, stage.plan.n_logits):
            end = min(first + stage.plan.n_logits, n)
            self._output(first, end)
            self._await(stage.queue.record("logits"))
            out[first:end] = host[: end - first]
        return out

    def _output(self, first: int, end: int) -> None:
        """Enqueue the logits of tokens [first, end) and their copy to the host."""
        stage = self.stage
        with stage.graph.workspace.scope():
            logits = stage.model.output(stage.graph, stage.hidden.rows(first, end))
            stage.copy_out(stage.logits.span(0, logits.span.nbytes), logits.span)

    def routing(self, n: int) -> dict[int, Ids]:
        """Captured ids [n, n_expert_used] by layer; the pass is done."""
        stage, k = self.stage, self.stage.model.hparams.n_expert_used
        return {i: stage.routing(i, n).host_view(np.int32).reshape(n, k).copy() for i in self.stage.moes}

    @property
    def gathers(self) -> bool:
        """Whether kernels read experts from host memory in the latest pass."""
        return any(decision.movement is Movement.GATHER for decision in self._decided[1].values())

    def settle(self, n: int) -> None:
        """Read the counters of a pass that is done."""
        stage, counters, decisions = self.stage, self.counters, self._decided[1]
        n_expert = stage.model.hparams.n_expert
        n_used_by_layer = np.count_nonzero(stage.read_counts(), axis=1).tolist()
        for layer, n_used in zip(stage.moes, n_used_by_layer, strict=True):
            counters.used(layer, n, n_used, n_expert)
            if decisions[layer].movement is Movement.GATHER and stage.store is not None:
                experts = stage.store.layers[layer]
                counters.gather_nbytes += n_used * experts.nbytes // experts.n_expert
        stage.meter.settle(inline=stage.ring is not None and stage.ring.inline)

    def _await(self, event: Event) -> None:
        with self._host(f"wait for {event.label}"):
            event.wait()

    def _host(self, name: str) -> AbstractContextManager[object]:
        return nullcontext() if self.timeline is None else self.timeline.host(name, lane="scheduler")

    def _mark(self) -> Event | None:
        return self.stage.queue.record() if self.timeline is not None else None

    def _span(self, name: str, start: Event | None) -> None:
        if self.timeline is not None and start is not None:
            self.timeline.span(self.stage.queue, name, start, self.stage.queue.record())


class Scheduler:
    """Runs batches through all stages, one after another."""

    def __init__(
        self,
        stages: list[Stage],
        policy: Policy,
        rates: Sequence[LinkRates | None],
        current: Callable[[], Counters],
        timeline: Timeline | None,
    ) -> None:
        self._current = current
        self.runners = [
            StageRunner(stage, policy, r, current, timeline) for stage, r in zip(stages, rates, strict=True)
        ]

    @property
    def counters(self) -> Counters:
        return self._current()

    def run(self, batch: Batch) -> Result:
        """Compute a batch and wait for it; its KV rows are in the cache afterwards."""
        try:
            return self._run(batch)
        except BaseException:
            for runner in self.runners:
                runner.stage.drain()
            raise

    def _run(self, batch: Batch) -> Result:
        n, hidden = batch.n_tokens, None
        first = last = None
        busy_ns = self.counters.busy_ns
        # Rings of later stages fill while the first one computes, unless copying would keep the host from that.
        early = [runner for runner in self.runners[1:] if not runner.stage.device.caps.blocking_submit]
        for i, runner in enumerate(self.runners):
            first = runner.stage.queue.record("pass start")
            runner.upload(batch, hidden)  # before the experts, which would keep it waiting
            if runner not in early:
                runner.begin(n)
            for other in early if i == 0 else ():
                other.begin(n)
            runner.enqueue(batch)
            last = runner.stage.queue.record("pass end")
            if i + 1 < len(self.runners):
                hidden = runner.hidden(n)
                self._timed(first, last)
        logits = self.runners[-1].logits(n, batch.logits_all)
        assert first is not None
        assert last is not None
        self._timed(first, last)
        for runner in self.runners:
            runner.settle(n)
        if not any(runner.gathers for runner in self.runners):  # a gather is a wait that nothing tells from compute
            n_layer = self.runners[0].stage.model.hparams.n_layer
            self.counters.compute_us[n] = (self.counters.busy_ns - busy_ns) / n_layer / 1e3
        self.counters.n_passes += 1
        self.counters.n_tokens += n
        return Result(logits=logits, routing=self._captured(n) if batch.capture else None)

    def _timed(self, first: Event, last: Event) -> None:
        begin, end = first.timestamp_ns(), last.timestamp_ns()
        if begin is not None and end is not None:
            self.counters.wall_ns += end - begin

    def _captured(self, n: int) -> Ids:
        p = self.runners[0].stage.model.hparams
        routing = np.full((p.n_layer, n, max(p.n_expert_used, 1)), -1, np.int32)
        for runner in self.runners:
            for layer, ids in runner.routing(n).items():
                routing[layer] = ids
        return routing
