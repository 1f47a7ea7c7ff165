"""How fast kernels read experts in page-locked host memory: a token's expert kernels alone, replayed as one program.

Writes `raw/gather.json`. Shapes and types are those of Qwen3-30B-A3B in Q4_K_M; every layer chooses 8 of 128 experts at
random, another eight in every one of the 48 calls.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import machine_of

from noria.api import (
    BufferUsage,
    Device,
    ExpertRows,
    ExpertTable,
    Glu,
    HostBuffer,
    Op,
    OpQuery,
    QueueKind,
    Span,
    Tensor,
)
from noria.experts.tables import TableKey, range_table
from noria.gguf import row_nbytes
from noria.plugins import BackendRegistry, PluginManager, load_config

N_EXPERT, N_USED, N_EMBD, N_FF = 128, 8, 2048, 768
N_CALLS = 48  # as many as the model has layers
N_HOST_LAYERS = 12  # in host memory, used in turn: several times what any cache holds
DOWN_TYPES = ("Q6_K", "Q4_K")  # half of the layers have the larger one
N_RUNS = 20


class Memory:
    """Tensors on a device, filled from the host."""

    def __init__(self, device: Device) -> None:
        self.device, self.queue = device, device.queue(QueueKind.COMPUTE)

    def tensor(self, array: np.ndarray) -> Tensor:
        type_name = {"float32": "F32", "int32": "I32", "uint16": "BF16"}[array.dtype.name]
        buffer = self.device.alloc(array.nbytes, usage=BufferUsage.COMPUTE, label="gather")
        host = self.device.alloc_host(array.nbytes, label="gather")
        host.array()[:] = array.reshape(-1).view(np.uint8)
        self.queue.copy_h2d(buffer.span(), host.span())
        self.queue.synchronize()
        host.free()
        return Tensor(buffer.span(), type_name, array.shape)


def host_experts(device: Device, down_type: str) -> tuple[HostBuffer, list[tuple[str, int, int, int, int]]]:
    """Random experts of a layer, and (type, n_out, n_in, slab bytes, offset) of gate, up and down."""
    parts, offset = [], 0
    for type_name, n_out, n_in in (("Q4_K", N_FF, N_EMBD), ("Q4_K", N_FF, N_EMBD), (down_type, N_EMBD, N_FF)):
        slab = n_out * row_nbytes(type_name, n_in)
        parts.append((type_name, n_out, n_in, slab, offset))
        offset += N_EXPERT * slab
    buffer = device.alloc_host(offset, label="experts")
    buffer.array()[:] = 0x11  # small finite scales, whatever the type
    return buffer, parts


def measure(device: Device) -> dict[str, object]:
    """ns of each run of a token's expert kernels, and the bytes they read."""
    memory, queue = Memory(device), device.queue(QueueKind.COMPUTE)
    rng = np.random.default_rng(0)
    kernels, activation = device.kernels, device.caps.activation_type
    wheres: dict[int, Tensor] = {}
    layers = [host_experts(device, DOWN_TYPES[i % 2]) for i in range(N_HOST_LAYERS)]
    x_type = {"F32": np.float32, "F16": np.uint16, "BF16": np.uint16}[activation]
    x = Tensor(memory.tensor(np.zeros((1, N_EMBD), x_type)).span, activation, (1, N_EMBD))
    acc = memory.tensor(np.zeros((1, N_EMBD), np.float32))
    dims = (N_EXPERT, N_FF, N_EMBD)
    nbytes = max(
        kernels.scratch_nbytes(
            OpQuery(op=Op.EXPERT_FFN, type="Q4_K", type2=down, activation=activation, n_rows=N_USED, dims=dims)
        )
        for down in DOWN_TYPES
    )
    scratch: Span = device.alloc(max(nbytes, 4096), usage=BufferUsage.COMPUTE, label="scratch").span()
    calls, read_nbytes = [], 0
    for i in range(N_CALLS):
        buffer, parts = layers[i % N_HOST_LAYERS]
        tables = []
        for type_name, n_out, n_in, slab, offset in parts:
            if slab not in wheres:
                key = TableKey(N_EXPERT, 0, N_EXPERT, slab)
                wheres[slab] = memory.tensor(range_table(key, device.caps.table_unit))
            tables.append(
                ExpertTable(
                    spans=(buffer.span(offset, N_EXPERT * slab),),
                    where=wheres[slab],
                    type=type_name,
                    n_out=n_out,
                    n_in=n_in,
                    slab_nbytes=slab,
                )
            )
            read_nbytes += N_USED * slab
        rows = ExpertRows(
            ids=memory.tensor(rng.choice(N_EXPERT, (1, N_USED), replace=False).astype(np.int32)),
            weights=memory.tensor(np.full((1, N_USED), 1 / N_USED, np.float32)),
            pairs=memory.tensor(np.zeros(N_USED, np.int32)),
            offsets=memory.tensor(np.zeros(N_EXPERT + 1, np.int32)),
            positions=memory.tensor(np.zeros((1, N_USED), np.int32)),
        )
        kernels.sort_rows(queue, rows, scratch)
        calls.append((tables, rows))
    with queue.program("token") as program:
        for (gate, up, down), rows in calls:
            kernels.expert_ffn(queue, acc, x, gate, up, down, rows, (0, N_EXPERT), N_USED, Glu.SWIGLU, scratch=scratch)
    samples = []
    for _ in range(N_RUNS + 1):
        first = queue.record("first")
        queue.run(program)
        last = queue.record("last")
        last.wait()
        samples.append((last.timestamp_ns() or 0) - (first.timestamp_ns() or 0))
    return {"read_bytes": read_nbytes, "samples_ns": samples[1:], "gbps": read_nbytes / median(samples[1:])}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("-dev", "--device", default="cuda0", help="(cuda0)")
    parser.add_argument("--raw", type=Path, default=Path(__file__).parent / "raw", help="where the raw file goes")
    args = parser.parse_args()
    with BackendRegistry(PluginManager(load_config(None))).open(args.device) as opened:
        result = measure(opened)
    args.raw.mkdir(parents=True, exist_ok=True)
    (args.raw / "gather.json").write_text(json.dumps(result | {"machine": machine_of(args.device)}, indent=1) + "\n")
    print(f"gather {result['gbps']:.1f} GB/s")
