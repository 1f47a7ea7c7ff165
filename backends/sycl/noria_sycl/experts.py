"""Products with the experts of a layer: few rows straight from the quantized slabs, many by tiles of unpacked weights.

A number is the same sum in the same order whatever the chunk or the unit that its row comes in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from noria.api import ExpertRows, ExpertTable, Glu, Op, OpQuery, Queue, RowWindow, Span, Support, Tensor, align_up
from noria_sycl.launch import Args, Launcher, ints, local, n_blocks, span, table, tensor
from noria_sycl.matmul import PANEL_COLUMNS, PANEL_NBYTES, TILE_COLUMNS, TILE_GROUP, TILE_ROWS, input_nbytes
from noria_sycl.rows import add_rows, glu_defines, takes, window_of

FEW_PER_EXPERT = 6  # from so many rows an expert on, on average, its weights are unpacked

_ALIGNMENT = 256
_TILE_NBYTES = 16  # of an entry in the list of tiles of cl/experts_gpu.cl
_GEMV_COLUMNS = 4  # of a group, as there


def supports(query: OpQuery) -> Support:
    """Whether mul_mat_id and expert_ffn run with these types and sizes."""
    _, n_out, n_in = query.dims
    fits = query.activation == "F32" and takes(query.type, n_in)
    if query.op is Op.EXPERT_FFN:
        fits = fits and takes(query.type2, n_out)
    return Support.NATIVE if fits else Support.MISSING


def scratch_nbytes(launch: Launcher, query: OpQuery) -> int:
    """Scratch of mul_mat_id and expert_ffn."""
    n_expert, n_out, n_in = query.dims
    if query.op is Op.EXPERT_FFN:
        return FfnScratch.of(launch, n_expert, query.n_rows, n_out, n_in).nbytes
    return 0 if launch.on_cpu else _n_tile(query.n_rows, n_expert) * _TILE_NBYTES


def mul_mat_id(
    launch: Launcher,
    queue: Queue,
    out: Tensor,
    w: ExpertTable,
    x: Tensor,
    rows: ExpertRows,
    window: RowWindow,
    by_token: bool,
    scratch: Span | None,
) -> None:
    """Kernels.mul_mat_id."""
    n_expert = window.end_expert - window.first_expert
    args = [*tensor(out), *tensor(x), *table(w), *_order(rows, window), *ints(w.n_out, w.n_in, int(by_token))]
    defines = _types(w, w)
    if launch.on_cpu and _are_few(rows):
        args.append(local(input_nbytes(w.n_in)))
        launch(queue, "experts_cpu", "mul_rows_few", args, launch.share(w.n_out), defines)
    elif launch.on_cpu:
        groups = (n_blocks(w.n_out, PANEL_COLUMNS), n_expert)
        launch(queue, "experts_cpu", "mul_rows_many", [*args, local(PANEL_NBYTES)], groups, defines)
    elif _are_few(rows):
        groups = (n_blocks(w.n_out, _GEMV_COLUMNS), window.n_rows)
        launch(queue, "experts_gpu", "mul_rows_few", args, groups, defines)
    else:
        assert scratch is not None
        n_tile = _list_tiles(launch, queue, span(scratch), rows, window)
        groups = (n_blocks(w.n_out, TILE_COLUMNS), n_tile)
        args = [*tensor(out), *tensor(x), *table(w), *tensor(rows.pairs), *span(scratch), *ints(rows.n_expert_used)]
        args += ints(w.n_out, w.n_in, int(by_token))
        launch(queue, "experts_gpu", "mul_rows_many", args, groups, defines, (TILE_GROUP, 1))


# --- expert_ffn ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class FfnScratch:
    """Where things of expert_ffn lie in its scratch, bytes from its beginning; f(gate) * up comes first.

    Attributes:
        ups: products with up, on a CPU.
        y: what experts say, of each row.
        tiles: the list of tiles, on a GPU.
    """

    ups: int
    y: int
    tiles: int
    nbytes: int

    @classmethod
    def of(cls, launch: Launcher, n_expert: int, n_rows: int, n_ff: int, n_embd: int) -> Self:
        """For chunks of `n_rows` rows."""
        hidden = align_up(n_rows * n_ff * 4, _ALIGNMENT)
        y = hidden * (2 if launch.on_cpu else 1)
        tiles = y + align_up(n_rows * n_embd * 4, _ALIGNMENT)
        n_tile = 0 if launch.on_cpu else _n_tile(n_rows, n_expert)
        return cls(ups=hidden, y=y, tiles=tiles, nbytes=tiles + n_tile * _TILE_NBYTES)


def expert_ffn(
    launch: Launcher,
    queue: Queue,
    acc: Tensor,
    x: Tensor,
    gate: ExpertTable,
    up: ExpertTable,
    down: ExpertTable,
    rows: ExpertRows,
    experts: tuple[int, int],
    chunk_rows: int,
    kind: Glu,
    scratch: Span | None,
) -> None:
    """Kernels.expert_ffn."""
    assert scratch is not None, "expert_ffn needs scratch"
    first, end = experts
    compute = _few_rows if _are_few(rows) else _many_rows_cpu if launch.on_cpu else _many_rows_gpu
    most = rows.n_tokens * min(rows.n_expert_used, end - first)
    for at in range(0, most, chunk_rows):
        window = RowWindow(first_expert=first, end_expert=end, first_row=at, n_rows=min(chunk_rows, most - at))
        plan = FfnScratch.of(launch, rows.n_expert, chunk_rows, gate.n_out, gate.n_in)
        compute(_Ffn(launch, queue, acc, x, (gate, up, down), rows, window, kind, scratch, plan))


@dataclass(frozen=True, slots=True)
class _Ffn:
    """The rows of one window, with what they need."""

    launch: Launcher
    queue: Queue
    acc: Tensor
    x: Tensor
    tables: tuple[ExpertTable, ExpertTable, ExpertTable]
    rows: ExpertRows
    window: RowWindow
    kind: Glu
    scratch: Span
    plan: FfnScratch

    def room(self, at: int) -> Args:
        """Parameters of the scratch from a place of it on."""
        return span(self.scratch.sub(at, self.scratch.nbytes - at))

    @property
    def gate_up_types(self) -> tuple[str, ...]:
        gate, up, _ = self.tables
        return (*_types(gate, up), *glu_defines(self.kind))


def _few_rows(ffn: _Ffn) -> None:
    """Two kernels that read each slab once."""
    launch, (gate, up, down) = ffn.launch, ffn.tables
    n_ff, n_embd, n_row = gate.n_out, gate.n_in, ffn.window.n_rows
    order = _order(ffn.rows, ffn.window)
    args = [*ffn.room(0), *tensor(ffn.x), *table(gate), *table(up), *tensor(down.where), *order, *ints(n_ff, n_embd)]
    args2 = [*tensor(ffn.acc), *ffn.room(0), *table(down), *tensor(gate.where), *tensor(up.where)]
    args2 += [*tensor(ffn.rows.weights), *order, *ints(n_embd, n_ff)]
    groups: tuple[int, ...]
    if launch.on_cpu:
        file, groups, groups2 = "experts_cpu", launch.share(n_ff // 8), launch.share(n_embd)
        args.append(local(input_nbytes(n_embd)))
        args2.append(local(input_nbytes(n_ff)))
    else:
        file, groups = "experts_gpu", (n_blocks(n_ff, _GEMV_COLUMNS), n_row)
        groups2 = (n_blocks(n_embd, _GEMV_COLUMNS),)
    launch(ffn.queue, file, "gate_up_few", args, groups, ffn.gate_up_types)
    launch(ffn.queue, file, "down_add_few", args2, groups2, _types(down, down))


def _many_rows_cpu(ffn: _Ffn) -> None:
    launch, queue, (gate, up, down) = ffn.launch, ffn.queue, ffn.tables
    n_ff, n_embd, n_expert = gate.n_out, gate.n_in, ffn.window.end_expert - ffn.window.first_expert
    order, hidden, y = _order(ffn.rows, ffn.window), ffn.room(0), ffn.room(ffn.plan.y)
    args = [*hidden, *ffn.room(ffn.plan.ups), *tensor(ffn.x), *table(gate), *table(up), *order]
    args += [*ints(n_ff, n_embd), local(PANEL_NBYTES)]
    launch(queue, "experts_cpu", "gate_up_many", args, (n_blocks(n_ff, PANEL_COLUMNS), n_expert), ffn.gate_up_types)
    args = [*y, *hidden, *table(down), *order, *ints(n_embd, n_ff, 0), local(PANEL_NBYTES)]
    groups = (n_blocks(n_embd, PANEL_COLUMNS), n_expert)
    launch(queue, "experts_cpu", "mul_rows_many", args, groups, _types(down, down))
    add_rows(launch, queue, ffn.acc, y, ffn.tables, ffn.rows, ffn.window)


def _many_rows_gpu(ffn: _Ffn) -> None:
    launch, queue, rows, (gate, up, down) = ffn.launch, ffn.queue, ffn.rows, ffn.tables
    n_ff, n_embd, hidden, y, tiles = gate.n_out, gate.n_in, ffn.room(0), ffn.room(ffn.plan.y), ffn.room(ffn.plan.tiles)
    n_tile = _list_tiles(launch, queue, tiles, rows, ffn.window)
    after = [*tensor(rows.pairs), *tiles, *ints(rows.n_expert_used)]
    args = [*hidden, *tensor(ffn.x), *table(gate), *table(up), *after, *ints(n_ff, n_embd)]
    groups = (n_blocks(n_ff, TILE_COLUMNS // 2), n_tile)
    launch(queue, "experts_gpu", "gate_up_many", args, groups, ffn.gate_up_types, (TILE_GROUP, 1))
    args = [*y, *hidden, *table(down), *after, *ints(n_embd, n_ff, 0)]
    groups = (n_blocks(n_embd, TILE_COLUMNS), n_tile)
    launch(queue, "experts_gpu", "mul_rows_many", args, groups, _types(down, down), (TILE_GROUP, 1))
    add_rows(launch, queue, ffn.acc, y, ffn.tables, rows, ffn.window)


# --- rows ---------------------------------------------------------------------------------------------------------


def _are_few(rows: ExpertRows) -> bool:
    return rows.n_tokens * rows.n_expert_used <= FEW_PER_EXPERT * rows.n_expert


def _n_tile(n_rows: int, n_expert: int) -> int:
    """At most so many tiles have rows: each expert may begin one."""
    return n_blocks(n_rows, TILE_ROWS) + min(n_rows, n_expert)


def _list_tiles(launch: Launcher, queue: Queue, tiles: Args, rows: ExpertRows, window: RowWindow) -> int:
    """Fill the list of tiles; how many there are at most."""
    n_tile = _n_tile(window.n_rows, window.end_expert - window.first_expert)
    args = [*tiles, *tensor(rows.offsets), *ints(*window_of(window), n_tile)]
    launch(queue, "experts_gpu", "list_tiles", args, (1,), ("QUANT=F32", "UP=F32"))
    return n_tile


def _order(rows: ExpertRows, window: RowWindow) -> Args:
    """ORDER_PARAMETERS of cl/."""
    args = [*tensor(rows.ids), *tensor(rows.pairs), *tensor(rows.offsets)]
    return [*args, *ints(rows.n_expert_used, *window_of(window))]


def _types(w: ExpertTable, up: ExpertTable) -> tuple[str, str]:
    return f"QUANT={w.type}", f"UP={up.type}"
