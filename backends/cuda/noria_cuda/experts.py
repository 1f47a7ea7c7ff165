"""Products with the experts of a layer: few rows straight from the quantized slabs, many by a grouped GEMM.

Many rows: a group of experts is unpacked to 16-bit tiles once, then all their rows go through in chunks. A number is
the same sum in the same order whatever the group, the chunk or the unit that its row comes in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Self

from noria.api import (
    ELEMENT_TYPES,
    ExpertRows,
    ExpertTable,
    Glu,
    Op,
    OpQuery,
    Queue,
    RowWindow,
    Span,
    Support,
    Tensor,
    align_up,
    tensor_nbytes,
)
from noria_cuda.launch import C_TYPE, Launcher, Limits, address, pointer, table_args
from noria_cuda.matmul import shared_input_nbytes
from noria_cuda.rows import ACTIVATIONS, BLOCK_VALUES, combine

GEMV_ROWS = 256  # at most so many rows are multiplied without unpacking their experts, as in cu/experts.cu
PACKED_NBYTES = 640 * 2**20  # of a group of experts
MAX_GROUP = 256  # experts of a group, as in cu/gemm.cu

_ALIGNMENT = 1024
_SHARED_NBYTES = 48 * 1024  # of a block that reads quantized slabs
_MAX_BATCH = 8  # experts whose pieces are read together
_INPUTS_NBYTES = 40 * 1024  # rows of hidden numbers in a block
_MAX_COLUMNS = 16  # output rows of a block
_DOWN_COLUMNS = 8
_MAX_GRID = 32768
_STAGE_NBYTES = 32 * 1024  # of cu/gemm.cu
_WARPGROUP_SHARED_NBYTES = 4 * 48 * 1024


class Pack(NamedTuple):
    """How weights [n_out, n_in] lie in tiles of 256 rows of 64, `span` rows of each being theirs."""

    n_out: int
    n_in: int
    span: int

    @property
    def nbytes(self) -> int:
        """Of one expert."""
        return -(-self.n_out // self.span) * -(-self.n_in // 64) * 256 * 128


class Window(NamedTuple):
    """A RowWindow as kernels get it."""

    first_expert: int
    end_expert: int
    first_row: int
    n_rows: int


def supports(limits: Limits, query: OpQuery) -> Support:
    """Whether mul_mat_id and expert_ffn run with these types and sizes."""
    _, n_out, n_in = query.dims
    types = [(query.type, n_in)]
    if query.op is Op.EXPERT_FFN:
        types.append((query.type2, n_out))
    fits = query.activation in ACTIVATIONS and n_out % 8 == 0 and n_in % 8 == 0
    fits &= all(type in BLOCK_VALUES and n % BLOCK_VALUES[type] == 0 for type, n in types)
    return Support.NATIVE if fits else Support.MISSING


def has_warpgroups(limits: Limits) -> bool:
    """Whether there are matrix units that work for four warps at once (wgmma, which is sm_90's alone)."""
    return limits.sm == 90


def scratch_nbytes(limits: Limits, query: OpQuery) -> int:
    """Scratch of mul_mat_id and expert_ffn."""
    n_expert, n_out, n_in = query.dims
    if query.op is Op.MUL_MAT_ID:
        return 0 if query.activation == "F32" else _group(n_expert, _plain(n_out, n_in)) * _plain(n_out, n_in).nbytes
    return FfnScratch.of(query.activation, n_expert, query.n_rows, n_out, n_in).nbytes


# --- mul_mat_id ---------------------------------------------------------------------------------------------------


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
    first, end = window.first_expert, window.end_expert
    if x.type == "F32" or window.n_rows <= GEMV_ROWS:
        room_nbytes = launch.limits.shared_nbytes - shared_input_nbytes(w.n_in) - 1024
        n_warp = _columns(w.slab_nbytes // w.n_out, 8, room_nbytes)
        input_at = align_up(n_warp * (w.slab_nbytes // w.n_out), 16) + 16
        shared = input_at + shared_input_nbytes(w.n_in)
        for at in range(0, window.n_rows, _MAX_GRID):
            n = min(_MAX_GRID, window.n_rows - at)
            skipped = ELEMENT_TYPES[x.type].itemsize * at
            args = (
                *(pointer(out) + skipped * w.n_out, pointer(x) + (0 if by_token else skipped * w.n_in)),
                *(*table_args(w), *_order(rows), first, end, window.first_row + at, n),
                *(w.n_out, w.n_in, int(not by_token), input_at),
            )
            grid = (-(-w.n_out // n_warp), n, 1)
            launch(queue, "experts", "mul_rows", grid, 32 * n_warp, args, _gemv_types(x, w, w), shared)
        return
    assert scratch is not None, "mul_mat_id of many rows needs scratch"
    pack = _plain(w.n_out, w.n_in)
    step = _group(end - first, pack)
    part = Window(first, end, window.first_row, window.n_rows)
    for expert in range(first, end, step):
        n = min(step, end - expert)
        _pack(launch, queue, address(scratch), w, pack, 0, rows, expert, n, x.type)
        grouped = Grouped(launch, queue, rows, part, expert, n, (w, w, w))
        grouped.multiply("grouped_mm", pointer(out), pointer(x), address(scratch), pack, x.type, by_token=by_token)


# --- expert_ffn ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class FfnScratch:
    """Where things of expert_ffn lie in its scratch.

    Attributes:
        n_group: experts unpacked at a time.
        gate_up, down: how they are packed.
        down_at, hidden_at, y_at: bytes from the beginning, where gate and up of the group are.
    """

    n_group: int
    gate_up: Pack
    down: Pack
    down_at: int
    hidden_at: int
    y_at: int
    nbytes: int

    @classmethod
    def of(cls, activation: str, n_expert: int, n_rows: int, n_ff: int, n_embd: int) -> Self:
        """For chunks of `n_rows` rows."""
        gate_up, down = Pack(n_ff, n_embd, 128), _plain(n_embd, n_ff)
        few = min(n_rows, GEMV_ROWS) * n_ff * 4  # f32 hidden rows
        if activation == "F32":
            return cls(n_group=0, gate_up=gate_up, down=down, down_at=0, hidden_at=0, y_at=0, nbytes=few)
        n_group = _group(n_expert, gate_up, down)
        hidden_at = n_group * (gate_up.nbytes + down.nbytes)
        y_at = hidden_at + align_up(tensor_nbytes(activation, (n_rows, n_ff)), _ALIGNMENT)
        return cls(
            n_group=n_group,
            gate_up=gate_up,
            down=down,
            down_at=n_group * gate_up.nbytes,
            hidden_at=hidden_at,
            y_at=y_at,
            nbytes=max(few, y_at + tensor_nbytes(activation, (n_rows, n_embd))),
        )


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
    tables = gate, up, down
    most = rows.n_tokens * min(rows.n_expert_used, end - first)
    if x.type == "F32" or rows.n_tokens * rows.n_expert_used <= GEMV_ROWS:
        step = min(chunk_rows, GEMV_ROWS)
        for at in range(0, most, step):
            part = Window(first, end, at, min(step, most - at))
            _few_rows(launch, queue, acc, x, tables, rows, part, kind, address(scratch))
        return
    n_ff, n_embd = gate.n_out, gate.n_in
    plan = FfnScratch.of(x.type, rows.n_expert, chunk_rows, n_ff, n_embd)
    weights, hidden = address(scratch), address(scratch) + plan.hidden_at
    n_group = -(-(end - first) // plan.n_group)
    step = -(-(end - first) // n_group)  # groups of about one size
    for expert in range(first, end, step):
        n = min(step, end - expert)
        _pack(launch, queue, weights, gate, plan.gate_up, 0, rows, expert, n, x.type)
        _pack(launch, queue, weights, up, plan.gate_up, plan.gate_up.span, rows, expert, n, x.type)
        _pack(launch, queue, weights + plan.down_at, down, plan.down, 0, rows, expert, n, x.type)
        most = rows.n_tokens * min(rows.n_expert_used, n)
        for at in range(0, most, chunk_rows):
            window = RowWindow(
                first_expert=expert, end_expert=expert + n, first_row=at, n_rows=min(chunk_rows, most - at)
            )
            y = Tensor(
                scratch.sub(plan.y_at, tensor_nbytes(x.type, (window.n_rows, n_embd))), x.type, (window.n_rows, n_embd)
            )
            part = Window(expert, expert + n, at, window.n_rows)
            grouped = Grouped(launch, queue, rows, part, expert, n, tables)
            grouped.multiply("grouped_glu", hidden, pointer(x), weights, plan.gate_up, x.type, kind=kind)
            at_down = weights + plan.down_at
            grouped.multiply("grouped_mm", pointer(y), hidden, at_down, plan.down, x.type, by_token=False)
            combine(launch, queue, acc, y, down, rows, window)


def _few_rows(
    launch: Launcher,
    queue: Queue,
    acc: Tensor,
    x: Tensor,
    tables: tuple[ExpertTable, ExpertTable, ExpertTable],
    rows: ExpertRows,
    window: Window,
    kind: Glu,
    hidden: int,
) -> None:
    """Two kernels that read each slab once, from wherever it lies."""
    gate, up, down = tables
    n_ff, n_embd = gate.n_out, gate.n_in
    geglu = ("GEGLU",) if kind is Glu.GEGLU else ()

    gate_nbytes, up_nbytes = gate.slab_nbytes // n_ff, up.slab_nbytes // n_ff
    most = launch.limits.shared_nbytes  # of a block, static arrays of 8 KiB included
    n_column = _columns(gate_nbytes + up_nbytes, _MAX_COLUMNS, most - shared_input_nbytes(n_embd) - 1024)
    up_at = align_up(n_column * gate_nbytes, 16) + 16
    input_at = up_at + align_up(n_column * up_nbytes, 16) + 16
    args = (
        *(hidden, pointer(x), *table_args(gate), *table_args(up), pointer(down.where), *_order(rows), *window),
        *(n_ff, n_embd, n_column, up_at, input_at),
    )
    shared = input_at + shared_input_nbytes(n_embd)
    grid = (-(-n_ff // n_column), window.n_rows, 1)
    launch(queue, "experts", "gate_up", grid, 256, args, (*_gemv_types(x, gate, up), *geglu), shared)

    row_nbytes, input_nbytes = down.slab_nbytes // n_embd, shared_input_nbytes(n_ff)
    n_column = _columns(row_nbytes, _DOWN_COLUMNS, most // 4)
    room_nbytes = align_up(n_column * row_nbytes, 16) + 16
    n_batch = min(_MAX_BATCH, window.n_rows, max(1, min(_SHARED_NBYTES, most // 2 - 16384) // room_nbytes))
    n_input = min(window.n_rows, max(1, min(_INPUTS_NBYTES, most // 4) // input_nbytes))
    args = (
        *(pointer(acc), hidden, *table_args(down), pointer(gate.where), pointer(up.where), pointer(rows.ids)),
        *(pointer(rows.weights), pointer(rows.pairs), pointer(rows.offsets), rows.n_expert_used, *window),
        *(rows.n_tokens, n_embd, n_ff, n_column, n_batch, room_nbytes, n_input, input_nbytes),
    )
    shared = n_batch * room_nbytes + n_input * input_nbytes + window.n_rows * n_column * 4
    grid = (-(-n_embd // n_column), 1, 1)
    launch(queue, "experts", "down_add", grid, 512, args, _gemv_types(x, down, down), shared)


# --- kernels ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Grouped:
    """The rows of a window that belong to the experts [expert, expert + n), if they are in all tables."""

    launch: Launcher
    queue: Queue
    rows: ExpertRows
    window: Window
    expert: int
    n: int
    tables: tuple[ExpertTable, ExpertTable, ExpertTable]

    def multiply(
        self,
        name: str,
        out: int,
        x: int,
        weights: int,
        pack: Pack,
        type: str,
        *,
        by_token: bool = True,
        kind: Glu = Glu.SWIGLU,
    ) -> None:
        """out [window, n_out] = x @ W.T with packed weights; `by_token`: row r reads its token's x."""
        limits = self.launch.limits
        stages = 3 if limits.shared_nbytes >= 3 * _STAGE_NBYTES else 2
        args = (
            *(out, x, weights, pointer(self.rows.offsets), pointer(self.rows.pairs) if by_token else 0),
            *(pointer(table.where) for table in self.tables),
            *(self.rows.n_expert_used, self.expert, self.n, *self.window, pack.n_out, pack.n_in),
        )
        defines = (f"ACT={C_TYPE[type]}", f"STAGES={stages}", *(("GEGLU",) if kind is Glu.GEGLU else ()))
        grid = (limits.n_sm, 1, 1)
        if has_warpgroups(limits):
            self.launch(self.queue, "gemm", f"{name}_wg", grid, 384, args, defines, _WARPGROUP_SHARED_NBYTES)
        else:
            self.launch(self.queue, "gemm", name, grid, 256, args, defines, stages * _STAGE_NBYTES)


def _pack(
    launch: Launcher,
    queue: Queue,
    to: int,
    table: ExpertTable,
    pack: Pack,
    at: int,
    rows: ExpertRows,
    expert: int,
    n: int,
    type: str,
) -> None:
    """Unpack experts [expert, expert + n) that have rows; `at`: the first of their rows in a tile."""
    shared = 8 * (table.slab_nbytes // pack.n_out) + 32
    is_staged = shared <= _SHARED_NBYTES
    args = (
        *(to, *table_args(table), pointer(rows.offsets), expert, pack.n_out, pack.n_in),
        *(at, pack.span, int(is_staged)),
    )
    grid = (-(-pack.n_out // 8), n, 1)
    defines = (f"QUANT={table.type}", f"ACT={C_TYPE[type]}")
    launch(queue, "pack", "pack_experts", grid, 256, args, defines, shared if is_staged else 0)


def _plain(n_out: int, n_in: int) -> Pack:
    return Pack(n_out, n_in, 256)


def _group(n_expert: int, *packs: Pack) -> int:
    """Experts that are unpacked at a time."""
    return max(1, min(n_expert, MAX_GROUP, PACKED_NBYTES // sum(pack.nbytes for pack in packs)))


def _columns(nbytes: int, most: int, room_nbytes: int) -> int:
    """Output rows of a block that has to hold `nbytes` of weights for each: as many as fit."""
    while most > 1 and most * nbytes > min(_SHARED_NBYTES, room_nbytes):
        most //= 2
    return most


def _order(rows: ExpertRows) -> tuple[int, ...]:
    return pointer(rows.ids), pointer(rows.pairs), pointer(rows.offsets), rows.n_expert_used


def _gemv_types(x: Tensor, w: ExpertTable, up: ExpertTable) -> tuple[str, ...]:
    return f"QUANT={w.type}", f"UP={up.type}", f"ACT={C_TYPE[x.type]}"
