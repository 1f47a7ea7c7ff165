"""Products with weights: a few rows straight from the quantized weights, many by tiles of unpacked ones."""

from __future__ import annotations

from collections.abc import Sequence

from noria.api import Op, OpQuery, Queue, Support, Tensor
from noria_sycl.launch import Args, Launcher, ints, local, n_blocks, tensor
from noria_sycl.rows import takes

GEMV_ROWS = 6  # at most so many rows are multiplied without unpacking the weights

PANEL_COLUMNS, PANEL_NBYTES = 16, 16 * 1024 * 4  # as in cl/panel.h
_PANEL_ROWS = 192  # of x that go through one panel

TILE_ROWS, TILE_COLUMNS, TILE_GROUP = 64, 128, 128  # as in cl/tile.h
_GEMV_COLUMNS = 4  # of a group, as in cl/matmul_gpu.cl


def supports(launch: Launcher, query: OpQuery) -> Support:
    """Whether matmul runs with these types and sizes."""
    n_in = query.dims[1]
    fits = query.activation == "F32" and takes(query.type, n_in)
    fits &= not launch.on_cpu or input_nbytes(n_in) <= launch.device.limits.local_nbytes
    if fits and query.op is Op.MATMULS:
        fits = query.n_rows <= GEMV_ROWS
    return Support.NATIVE if fits else Support.MISSING


def matmul(
    launch: Launcher, queue: Queue, out: Tensor, w: Tensor, x: Tensor, bias: Tensor | None, accumulate: bool
) -> None:
    """Kernels.matmul."""
    n, (n_out, n_in) = x.n_rows, w.shape
    args = [*_tensors(out, w, bias), *tensor(x), *ints(n, n_in, int(accumulate))]
    defines = (f"QUANT={w.type}",)
    if launch.on_cpu and n <= GEMV_ROWS:
        launch(queue, "matmul_cpu", "multiply_few", [*args, local(input_nbytes(n_in))], launch.share(n_out), defines)
    elif launch.on_cpu:
        groups = (n_blocks(n_out, PANEL_COLUMNS), n_blocks(n, _PANEL_ROWS))
        more = [*ints(_PANEL_ROWS), local(PANEL_NBYTES)]
        launch(queue, "matmul_cpu", "multiply_many", [*args, *more], groups, defines)
    elif n <= GEMV_ROWS:
        launch(queue, "matmul_gpu", "multiply_few", args, (n_blocks(n_out, _GEMV_COLUMNS), n), defines)
    else:
        groups = (n_blocks(n_out, TILE_COLUMNS), n_blocks(n, TILE_ROWS))
        launch(queue, "matmul_gpu", "multiply_many", args, groups, defines, (TILE_GROUP, 1))


def matmuls(
    launch: Launcher,
    queue: Queue,
    outs: Sequence[Tensor],
    ws: Sequence[Tensor],
    x: Tensor,
    biases: Sequence[Tensor | None],
) -> None:
    """Kernels.matmuls: of a few rows, three at a time."""
    if len(ws) != 3:
        for out, w, bias in zip(outs, ws, biases, strict=True):
            matmul(launch, queue, out, w, x, bias, accumulate=False)
        return
    n, n_in, n_outs = x.n_rows, x.shape[-1], [w.shape[0] for w in ws]
    args = [arg for each in zip(outs, ws, biases, strict=True) for arg in _tensors(*each)]
    args += [*tensor(x), *ints(n, n_in)]
    defines = tuple(f"QUANT{i or ''}={w.type}" for i, w in enumerate(ws))
    if launch.on_cpu:
        args.append(local(input_nbytes(n_in)))
        launch(queue, "matmul_cpu", "multiply_few_3", args, launch.share(sum(n_outs)), defines)
    else:
        groups = (sum(n_blocks(n_out, _GEMV_COLUMNS) for n_out in n_outs), n)
        launch(queue, "matmul_gpu", "multiply_few_3", args, groups, defines)


def _tensors(out: Tensor, w: Tensor, bias: Tensor | None) -> Args:
    """TENSORS of cl/."""
    return [*tensor(out), *tensor(w), *tensor(bias), *ints(w.shape[0])]


def input_nbytes(n: int) -> int:
    """An `Input` of cl/dot.h: n numbers of 16 bits, a scale of each 32, a sum of each 16."""
    return n * 2 + n // 32 * 4 + n // 16 * 4
