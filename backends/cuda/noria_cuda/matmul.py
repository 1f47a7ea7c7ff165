"""Products with weights: a few rows straight from the quantized weights, many on matrix units through cuBLAS."""

from __future__ import annotations

from collections.abc import Sequence

from noria.api import (
    ELEMENT_TYPES,
    BufferUsage,
    DeviceBuffer,
    Op,
    OpQuery,
    Queue,
    Span,
    Support,
    Tensor,
    align_up,
    tensor_nbytes,
)
from noria_cuda.cublas import WORKSPACE_NBYTES, cublas_of
from noria_cuda.launch import C_TYPE, Launcher, Limits, address, pointer
from noria_cuda.rows import ACTIVATIONS, BLOCK_VALUES

GEMV_ROWS = 8  # at most so many rows are multiplied without unpacking the weights
UNPACKED_NBYTES = 64 * 2**20  # weights unpacked at a time

_ALIGNMENT = 256
_GEMV_WARPS = 4
_STEP = 1024  # values of a row that a warp takes at a time, as in cu/gemv.cu
_PIECE_NBYTES = 4096  # of a row in shared memory
_SHARED_NBYTES = 96 * 1024  # of a block
_BLOCKS_PER_SM = 8
_ROOM_MORE = 32  # bytes of a room beside a piece, which may begin anywhere


def supports(limits: Limits, query: OpQuery) -> Support:
    """Whether matmul runs with these types and sizes."""
    width = BLOCK_VALUES.get(query.type)
    fits = query.activation in ACTIVATIONS and width is not None and query.dims[1] % width == 0
    if fits and query.op is Op.MATMULS:
        fits = query.n_rows == 1 and _shared_nbytes(query.dims[1], _PIECE_NBYTES + _ROOM_MORE) <= _most_shared(limits)
    return Support.NATIVE if fits else Support.MISSING


def scratch_nbytes(limits: Limits, query: OpQuery) -> int:
    """Scratch of matmul: unpacked weights and the workspace of cuBLAS."""
    if query.n_rows <= GEMV_ROWS:
        return 0
    n_out, n_in = query.dims
    return _weights_nbytes(query.type, query.activation, n_out, n_in) + WORKSPACE_NBYTES


def matmul(
    launch: Launcher,
    queue: Queue,
    out: Tensor,
    w: Tensor,
    x: Tensor,
    bias: Tensor | None,
    accumulate: bool,
    scratch: Span | None,
) -> None:
    """Kernels.matmul."""
    if x.n_rows <= GEMV_ROWS:
        _gemv(launch, queue, out, w, x, bias, accumulate)
        return
    assert scratch is not None, "matmul of many rows needs scratch"
    n, (n_out, n_in) = x.n_rows, w.shape
    weights = address(scratch)
    weights_nbytes = _weights_nbytes(w.type, x.type, n_out, n_in)
    workspace = weights + weights_nbytes
    itemsize = ELEMENT_TYPES[x.type].itemsize
    cublas = cublas_of(queue)

    def product(first: int, end: int, part: int, *, accumulate: bool) -> None:
        to = pointer(out) + first * ELEMENT_TYPES[out.type].itemsize
        shape = (n, end - first, n_in)
        cublas.matmul(to, out.type, part, pointer(x), x.type, shape, n_out, accumulate=accumulate, workspace=workspace)
        queue.ends_in_kernel = False  # type: ignore[attr-defined]  # not one of the launcher's

    if w.type == x.type:
        product(0, n_out, pointer(w), accumulate=accumulate)
    else:
        step = _rows_at_a_time(w.type, x.type, n_out, n_in)
        # F32 weights are two 16-bit numbers each, where the output can hold what the second one adds.
        has_rest = w.type == "F32" and out.type == "F32"
        defines = (f"QUANT={w.type}", f"ACT={C_TYPE[x.type]}")
        for first in range(0, n_out, step):
            end = min(first + step, n_out)
            rest = weights + align_up((end - first) * n_in * itemsize, _ALIGNMENT) if has_rest else 0
            src = pointer(w) + first * w.row_nbytes
            grid = (min((end - first) * -(-n_in // 256) // 8 + 1, 32 * launch.limits.n_sm), 1, 1)
            launch(queue, "pack", "unpack_rows", grid, 256, (weights, rest, src, end - first, n_in), defines)
            product(first, end, weights, accumulate=accumulate)
            if rest:
                product(first, end, rest, accumulate=True)
    if bias is not None:
        c_type = C_TYPE[out.type]
        size = n * n_out
        launch(
            queue,
            "elementwise",
            "add",
            (-(-size // 2048), 1, 1),
            256,
            (pointer(out), pointer(out), pointer(bias), size, n_out),
            (f"X={c_type}", "W=float", f"Y={c_type}"),
        )


def _gemv(
    launch: Launcher, queue: Queue, out: Tensor, w: Tensor, x: Tensor, bias: Tensor | None, accumulate: bool
) -> None:
    n, (n_out, n_in) = x.n_rows, w.shape
    room_nbytes = _room_nbytes(w)
    defines = (f"QUANT={w.type}", f"ACT={C_TYPE[x.type]}", f"OUT={C_TYPE[out.type]}")
    tensors = pointer(out), pointer(w), pointer(x), pointer(bias)
    n_thread, shared = 32 * _GEMV_WARPS, _shared_nbytes(n_in, room_nbytes)
    if n == 1 and shared <= _most_shared(launch.limits):
        grid = (_n_block(launch.limits, n_out), 1, 1)
        sizes = (n_out, n_in, shared_input_nbytes(n_in), room_nbytes)
        args: tuple[int, ...] = (*tensors, *sizes, int(accumulate), int(_is_constant(w)))
        launch(queue, "gemv", "gemv_1", grid, n_thread, args, defines, shared)
    else:
        name = "gemv_4" if n <= 4 else "gemv_8"
        args = (*tensors, n, n_out, n_in, room_nbytes, int(accumulate))
        launch(
            queue, "gemv", name, (-(-n_out // _GEMV_WARPS), 1, 1), n_thread, args, defines, _GEMV_WARPS * room_nbytes
        )


def matmuls(
    launch: Launcher,
    queue: Queue,
    outs: Sequence[Tensor],
    ws: Sequence[Tensor],
    x: Tensor,
    biases: Sequence[Tensor | None],
    scratch: Span | None,
) -> None:
    """Kernels.matmuls: of one row, three at a time."""
    if len(ws) != 3 or len({out.type for out in outs}) > 1:
        for out, w, bias in zip(outs, ws, biases, strict=True):
            _gemv(launch, queue, out, w, x, bias, False)
        return
    n_in, n_outs = x.shape[-1], [w.shape[0] for w in ws]
    room_nbytes = max(_room_nbytes(w) for w in ws)
    blocks = [_n_block(launch.limits, n_out) for n_out in n_outs]
    one_column = all(n_out <= n * _GEMV_WARPS for n_out, n in zip(n_outs, blocks, strict=True))
    n_room = 1 if one_column and all(w.row_nbytes <= _room_nbytes(w) - _ROOM_MORE for w in ws) else 2
    args = (
        *(*map(pointer, outs), *map(pointer, ws), pointer(x), *map(pointer, biases), *n_outs, *blocks[:2], n_in),
        *(shared_input_nbytes(n_in), room_nbytes, n_room, int(all(map(_is_constant, ws)))),
    )
    quants = (f"QUANT={ws[0].type}", f"QUANT1={ws[1].type}", f"QUANT2={ws[2].type}")
    defines = (*quants, f"ACT={C_TYPE[x.type]}", f"OUT={C_TYPE[outs[0].type]}")
    shared = shared_input_nbytes(n_in) + n_room * _GEMV_WARPS * room_nbytes
    launch(queue, "gemv3", "gemv_3", (sum(blocks), 1, 1), 32 * _GEMV_WARPS, args, defines, shared)


def _n_block(limits: Limits, n_out: int) -> int:
    return min(-(-n_out // _GEMV_WARPS), _BLOCKS_PER_SM * limits.n_sm)


def _room_nbytes(w: Tensor) -> int:
    """Room for a piece of a row, wherever it begins."""
    step_nbytes = w.row_nbytes * _STEP // w.shape[1]
    piece_nbytes = max(_PIECE_NBYTES // step_nbytes, 1) * step_nbytes
    return align_up(min(w.row_nbytes, piece_nbytes), 16) + _ROOM_MORE


def _shared_nbytes(n_in: int, room_nbytes: int) -> int:
    """Shared memory of a block that multiplies one row."""
    return shared_input_nbytes(n_in) + 2 * _GEMV_WARPS * room_nbytes


def _most_shared(limits: Limits) -> int:
    return min(_SHARED_NBYTES, limits.shared_nbytes)


def _is_constant(w: Tensor) -> bool:
    """Whether no kernel writes it."""
    return isinstance(w.span.buffer, DeviceBuffer) and w.span.buffer.usage is BufferUsage.WEIGHTS


def shared_input_nbytes(n: int) -> int:
    """An `Input` of cu/dot.cuh: n numbers, padded, and the sums of every 8."""
    return align_up(-(-n // 32) * 36 * 4 + n // 8 * 4, 16)


def _rows_at_a_time(type: str, activation: str, n_out: int, n_in: int) -> int:
    """Output rows whose weights are unpacked together: as many as fit, in whole tiles of matrix units."""
    most = UNPACKED_NBYTES // (_n_part(type, activation) * n_in * ELEMENT_TYPES[activation].itemsize)
    return min(n_out, max(most // 256 * 256, 256))


def _n_part(type: str, activation: str) -> int:
    return 2 if type == "F32" and activation != "F32" else 1


def _weights_nbytes(type: str, activation: str, n_out: int, n_in: int) -> int:
    if type == activation:
        return 0
    n_row = _rows_at_a_time(type, activation, n_out, n_in)
    part = align_up(tensor_nbytes(activation, (n_row, n_in)), _ALIGNMENT)
    return _n_part(type, activation) * part
