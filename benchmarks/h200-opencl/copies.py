"""How OpenCL moves host memory best: kinds of memory, ways to copy it, sizes, and what runs beside a kernel.

Writes `raw/copies.json`. PyOpenCL alone; noria's runtime uses what comes out best here.

kinds of host memory
    mapped      ALLOC_HOST_PTR, mapped for good
    shared      USE_HOST_PTR over anonymous memory
    located     clCreateBufferNV with LOCATION_HOST, mapped for good: it stays in host memory when a kernel takes it
    pinned      clCreateBufferNV with PINNED, mapped for good
    file        clCreateBufferNV with LOCATION_HOST over a mapped file
    pageable    ordinary memory
ways
    pointer     clEnqueueWriteBuffer from the memory's address
    buffer      clEnqueueCopyBuffer from its cl_mem
"""

from __future__ import annotations

import argparse
import json
import mmap
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import machine_of

from noria.plugins import BackendRegistry, PluginManager, load_config
from noria_sycl.nvidia import PINNED, create_buffer

MIB = 2**20
SIZES_MIB = (0.84, 4.0, 16.0, 64.0, 256.0)  # the first is a tensor of an expert of Qwen3-30B-A3B
N_EXPERT, N_USED, SLAB_NBYTES = 128, 8, 2_654_208

KERNELS = """
__kernel void spin(__global uint *sink, ulong n) {
    uint x = get_global_id(0);
    for (ulong i = 0; i < n; i++) x = x * 1664525u + 1013904223u;
    if (x == 1u) sink[0] = x;
}
__kernel void nothing(__global uint *sink) { if (get_global_size(0) == 7) sink[0] = 1; }
__kernel void gather(__global uint *sink, __global const uint4 *memory, __global const int *chosen, ulong n) {
    __global const uint4 *slab = memory + (ulong)chosen[get_global_id(1)] * n;
    uint4 sum = 0;
    for (ulong i = get_global_id(0); i < n; i += get_global_size(0)) sum ^= slab[i];
    if ((sum.x ^ sum.y ^ sum.z ^ sum.w) == 1u) sink[0] = 1;
}
"""


class Bench:
    """A context of one device, with two queues."""

    def __init__(self, cl: Any, device: Any, nbytes: int) -> None:
        self.cl, self.device, self.nbytes = cl, device, nbytes
        self.context = cl.Context([device])
        self.compute, self.copy = self.queue(), self.queue()
        self.on_device = cl.Buffer(self.context, cl.mem_flags.READ_WRITE, nbytes)
        self.sink = cl.Buffer(self.context, cl.mem_flags.READ_WRITE, 64)
        program = cl.Program(self.context, KERNELS).build()
        self.spin, self.nothing, self.gather = (cl.Kernel(program, name) for name in ("spin", "nothing", "gather"))
        cl.enqueue_fill_buffer(self.copy, self.on_device, np.uint8(0), 0, nbytes).wait()

    def queue(self, profiling: bool = True) -> Any:
        cl = self.cl
        properties = cl.command_queue_properties.PROFILING_ENABLE if profiling else 0
        return cl.CommandQueue(self.context, self.device, properties)

    # --- memory --------------------------------------------------------------------------------------------------

    def map(self, buffer: Any) -> np.ndarray:
        cl = self.cl
        flags = cl.map_flags.READ | cl.map_flags.WRITE
        return cl.enqueue_map_buffer(self.copy, buffer, flags, 0, (self.nbytes,), np.uint8)[0]

    def nvidia(self, flags: int, memory: np.ndarray | None = None, **kind: int) -> Any:
        return create_buffer(self.context, self.device, flags, self.nbytes, memory, **kind)

    def memory(self, kind: str, folder: Path) -> tuple[Any, np.ndarray]:
        """(cl_mem or None, its bytes), written once."""
        flags = self.cl.mem_flags
        buffer: Any = None
        if kind == "pageable":
            view = np.empty(self.nbytes, np.uint8)
        elif kind == "mapped":
            buffer = self.cl.Buffer(self.context, flags.READ_WRITE | flags.ALLOC_HOST_PTR, self.nbytes)
            view = self.map(buffer)
        elif kind == "shared":
            view = np.frombuffer(mmap.mmap(-1, self.nbytes), np.uint8)
            view[::4096] = 1
            buffer = self.cl.Buffer(self.context, flags.READ_WRITE | flags.USE_HOST_PTR, hostbuf=view)
        elif kind == "file":
            path = folder / "weights"
            with path.open("wb") as file:
                for _ in range(self.nbytes // MIB):
                    file.write(b"\1" * MIB)
            view = np.memmap(path, np.uint8, "r", shape=(self.nbytes,))
            return self.nvidia(flags.READ_ONLY | flags.USE_HOST_PTR, view), view
        elif kind == "located":
            buffer = self.nvidia(flags.READ_WRITE)
            view = self.map(buffer)
        else:
            buffer = self.nvidia(flags.READ_WRITE, kind=PINNED)
            view = self.map(buffer)
        view[::4096] = 1
        return buffer, view

    # --- copies --------------------------------------------------------------------------------------------------

    def copier(self, way: str, buffer: Any, view: np.ndarray, queue: Any) -> Callable[[int, int], Any]:
        """Enqueues a copy of (offset, bytes)."""
        cl = self.cl
        if way == "pointer":
            return lambda at, n: cl.enqueue_copy(
                queue, self.on_device, view[at : at + n], dst_offset=at, is_blocking=False
            )
        return lambda at, n: cl.enqueue_copy(queue, self.on_device, buffer, byte_count=n, src_offset=at, dst_offset=at)

    def timed(self, copy: Callable[[int, int], Any], queue: Any, size: int, total: int) -> tuple[float, float]:
        """(seconds, share of them in which the host was kept) for copies of `size` that are `total` together."""
        places = range(0, total - size + 1, size)
        begin = time.perf_counter()
        events = [copy(at, size) for at in places]
        enqueued = time.perf_counter() - begin
        queue.finish()
        seconds = time.perf_counter() - begin
        del events
        return seconds, enqueued / seconds

    def rates(self, way: str, buffer: Any, view: np.ndarray, queue: Any) -> list[dict[str, float]]:
        copy, rows = self.copier(way, buffer, view, queue), []
        copy(0, min(self.nbytes, 16 * MIB)).wait()
        for mib in SIZES_MIB:
            size = int(mib * MIB) // 4096 * 4096
            total = min(self.nbytes, 256 * size)
            if size <= self.nbytes:
                seconds, kept = min(self.timed(copy, queue, size, total) for _ in range(3))
                rows.append({"mib": mib, "gbps": total // size * size / seconds / 1e9, "host_kept": kept})
        return rows

    def lanes(self, view: np.ndarray, n: int) -> float:
        """GB/s of expert-sized copies that n threads make, each by a queue of its own."""
        size = int(SIZES_MIB[0] * MIB) // 4096 * 4096
        places = list(range(0, min(self.nbytes, 256 * size) - size, size))
        copies = [self.copier("pointer", None, view, self.queue()) for _ in range(n)]

        def work(lane: int) -> None:
            for at in places[lane::n]:
                copies[lane](at, size).wait()

        def once() -> float:
            threads = [threading.Thread(target=work, args=(lane,)) for lane in range(n)]
            begin = time.perf_counter()
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return time.perf_counter() - begin

        return len(places) * size / min(once() for _ in range(3)) / 1e9

    def overlap(self, way: str, buffer: Any, view: np.ndarray, n_turns: int) -> dict[str, float]:
        """ms of a kernel, of copies, and of both in each order."""
        copy, size = self.copier(way, buffer, view, self.copy), min(64 * MIB, self.nbytes // 4)

        def copies() -> None:
            for at in range(0, self.nbytes - size + 1, size):
                copy(at, size)
            self.copy.flush()

        def kernel() -> None:
            self.spin(self.compute, (1024,), (64,), self.sink, np.uint64(n_turns))
            self.compute.flush()

        def threaded() -> None:
            thread = threading.Thread(target=copies)
            thread.start()
            kernel()
            thread.join()

        def ms(*parts: Callable[[], None]) -> float:
            def once() -> float:
                begin = time.perf_counter()
                for part in parts:
                    part()
                self.compute.finish()
                self.copy.finish()
                return 1e3 * (time.perf_counter() - begin)

            return min(once() for _ in range(3))

        return {
            "kernel": ms(kernel),
            "copies": ms(copies),
            "copies first": ms(copies, kernel),
            "kernel first": ms(kernel, copies),
            "copies in a thread": ms(threaded),
        }

    # --- kernels that read host memory ---------------------------------------------------------------------------

    def gathers(self, buffer: Any) -> list[float]:
        """GB/s of a kernel that reads other experts of a layer at every call."""
        cl, rng, rates = self.cl, np.random.default_rng(0), []
        n_expert = min(N_EXPERT, self.nbytes // SLAB_NBYTES)
        chosen = cl.Buffer(self.context, cl.mem_flags.READ_WRITE, 4 * N_USED)
        for _ in range(6):
            ids = rng.choice(n_expert, min(N_USED, n_expert), replace=False).astype(np.int32)
            cl.enqueue_copy(self.compute, chosen, ids)
            begin = time.perf_counter()
            shape = (16384, len(ids))
            self.gather(self.compute, shape, (128, 1), self.sink, buffer, chosen, np.uint64(SLAB_NBYTES // 16))
            self.compute.finish()
            rates.append(len(ids) * SLAB_NBYTES / (time.perf_counter() - begin) / 1e9)
        return rates

    # --- latencies -----------------------------------------------------------------------------------------------

    def latencies(self, view: np.ndarray) -> dict[str, float]:
        """us of one of each."""
        cl = self.cl

        def us(n: int, once: Callable[[], Any]) -> float:
            once()
            begin = time.perf_counter()
            for _ in range(n):
                once()
            return 1e6 * (time.perf_counter() - begin) / n

        def launches(queue: Any) -> None:
            for _ in range(100):
                self.nothing(queue, (1,), (1,), self.sink)
            queue.finish()

        def gated() -> None:
            gate = cl.UserEvent(self.context)
            event = self.nothing(self.compute, (1,), (1,), self.sink, wait_for=[gate])
            self.compute.flush()
            gate.set_status(cl.command_execution_status.COMPLETE)
            event.wait()

        def across() -> None:
            copied = cl.enqueue_copy(self.copy, self.on_device, view[:4096], is_blocking=False)
            self.copy.flush()
            self.nothing(self.compute, (1,), (1,), self.sink, wait_for=[copied]).wait()

        quiet = self.queue(profiling=False)
        return {
            "launch, of 100": us(10, lambda: launches(self.compute)) / 100,
            "launch without profiling, of 100": us(10, lambda: launches(quiet)) / 100,
            "launch and wait": us(100, lambda: self.nothing(self.compute, (1,), (1,), self.sink).wait()),
            "launch behind the host's event, and wait": us(100, gated),
            "launch behind a copy of 4 KiB, and wait": us(100, across),
            "read 512 bytes": us(100, lambda: cl.enqueue_copy(self.compute, view[:512], self.on_device)),
        }


def measure(bench: Bench, folder: Path) -> dict[str, Any]:
    """Everything; what a driver cannot do is its error in words."""
    n_turns = 1_000_000
    begin = time.perf_counter()
    bench.spin(bench.compute, (1024,), (64,), bench.sink, np.uint64(n_turns)).wait()
    n_turns = int(n_turns * 0.010 / (time.perf_counter() - begin))
    result: dict[str, Any] = {"extensions": bench.device.extensions.split(), "copies": [], "overlap": {}, "gather": {}}
    for kind in ("mapped", "shared", "pageable", "located", "file", "pinned"):
        try:
            buffer, view = bench.memory(kind, folder)
        except (bench.cl.Error, MemoryError) as error:
            result["copies"].append({"kind": kind, "error": str(error)})
            say(f"{kind}: {error}")
            continue
        if kind == "mapped":
            result["latencies_us"] = bench.latencies(view)
            result["lanes_gbps"] = {n: bench.lanes(view, n) for n in (1, 2, 4, 8)}
            say(f"latencies {result['latencies_us']}\nlanes {result['lanes_gbps']}")
        ways = [("pointer", True)] + [("pointer", False)] * (kind == "mapped")
        ways += [("buffer", True)] if buffer is not None else []
        for way, profiling in ways:
            row = {"kind": kind, "way": way, "profiling": profiling}
            try:
                row["rates"] = bench.rates(way, buffer, view, bench.copy if profiling else bench.queue(False))
                if profiling:
                    result["overlap"][f"{kind}, {way}"] = bench.overlap(way, buffer, view, n_turns)
            except bench.cl.Error as error:
                row["error"] = str(error)
            result["copies"].append(row)
            say(f"{row}\n    overlap {result['overlap'].get(f'{kind}, {way}')}")
        if buffer is not None:  # last: a driver may move the memory for it
            try:
                result["gather"][kind] = bench.gathers(buffer)
            except bench.cl.Error as error:
                result["gather"][kind] = str(error)
            say(f"gather from {kind}: {result['gather'][kind]}")
        del buffer, view
    return result


def say(text: str) -> None:
    print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("-dev", "--device", default="sycl0", help="(sycl0)")
    parser.add_argument("--mib", type=int, default=1024, help="host memory of each kind (1024)")
    parser.add_argument("--raw", type=Path, default=Path(__file__).parent / "raw", help="where the raw file goes")
    args = parser.parse_args()
    with BackendRegistry(PluginManager(load_config(None))).open(args.device) as opened:
        native: Any = opened
        device = native.runtime._device
        import pyopencl as cl  # where the backend has found its drivers

        with tempfile.TemporaryDirectory() as folder:
            result = measure(Bench(cl, device, args.mib * MIB), Path(folder))
    args.raw.mkdir(parents=True, exist_ok=True)
    record = result | {"nbytes": args.mib * MIB, "machine": machine_of(args.device)}
    (args.raw / "copies.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
