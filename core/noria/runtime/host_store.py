"""Experts in host RAM: the mapped file page-locked in place, or read into page-locked chunks.

A refusal to page-lock never moves work elsewhere and never ends the load: what could not be locked is copied from
pageable memory, and a note says how much and why.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from noria.api import Device, DeviceCaps, DeviceKind, HostBuffer, Span
from noria.api.errors import PinnedMemoryError
from noria.experts import ExpertLayer, ExpertTensor
from noria.gguf import ModelFile, TensorInfo
from noria.models import MoeSpec
from noria.runtime.config import LoadMode

log = logging.getLogger(__name__)

CHUNK_NBYTES = 2 << 30  # single pinned blocks beyond 2 GiB cost CPU time during DMA on some drivers
PAGE_NBYTES = mmap.PAGESIZE
MIB = 1024 * 1024

Progress = Callable[[str, int, int], None]  # (what, bytes done, bytes in all)


def expert_layer(file: ModelFile, layer: int, moe: MoeSpec, sources: Mapping[str, Span]) -> ExpertLayer:
    """The experts of a layer whose tensors lie in `sources`, by name."""

    def tensor(name: str) -> ExpertTensor:
        info = file.tensors[name]
        n_expert, n_out, n_in = info.shape
        return ExpertTensor(
            name=name,
            type=info.type,
            n_expert=n_expert,
            n_out=n_out,
            n_in=n_in,
            slab_nbytes=info.slab_nbytes,
            source=sources[name],
        )

    return ExpertLayer(layer=layer, gate=tensor(moe.gate), up=tensor(moe.up), down=tensor(moe.down))


def resolve(mode: LoadMode, caps: DeviceCaps) -> LoadMode:
    """What `auto` means on a device."""
    if mode is LoadMode.AUTO:
        return LoadMode.NONE if caps.pinned_host and not caps.host_register else LoadMode.MMAP
    return mode


class HostStore:
    """The offloaded experts of one stage, as host buffers of its device.

    Args:
        mode: not `auto`.
        lockable_nbytes: how much of the mapped file may be page-locked by a driver. Beyond the RAM that is available
            the system does not refuse that, but ends this process.

    Attributes:
        layers: by layer number.
        pinned_nbytes, pageable_nbytes: how much of them is page-locked and how much is not.
        locked_nbytes: of the mapped file, by a driver.
        notes: what went another way than asked, one line each.
    """

    def __init__(
        self,
        file: ModelFile,
        device: Device,
        moes: dict[int, MoeSpec],
        mode: LoadMode,
        lockable_nbytes: int,
        progress: Progress,
    ) -> None:
        self.file, self.device, self.progress = file, device, progress
        self.layers: dict[int, ExpertLayer] = {}
        self.pinned_nbytes = 0
        self.pageable_nbytes = 0
        self.locked_nbytes = 0
        self.notes: list[str] = []
        self.mode = mode
        self.lockable_nbytes = lockable_nbytes
        self._buffers: list[HostBuffer] = []
        self._refusal = ""
        infos = [file.tensors[name] for moe in moes.values() for name in (moe.gate, moe.up, moe.down)]
        try:
            sources = self._map(infos) if self.mode is LoadMode.MMAP else self._read(infos)
        except BaseException:
            self.close()
            raise
        for layer, moe in moes.items():
            self.layers[layer] = expert_layer(file, layer, moe, sources)
        if self._refusal:
            self._note(sum(info.nbytes for info in infos))

    def close(self) -> None:
        """Give the memory back; before the file is unmapped."""
        for buffer in self._buffers:
            buffer.free()

    # --- mmap ----------------------------------------------------------------------------------------------------

    def _map(self, infos: Sequence[TensorInfo]) -> dict[str, Span]:
        """Page-lock the pages of the mapped file that hold these tensors; nothing is copied."""
        sources: dict[str, Span] = {}
        total = sum(info.nbytes for info in infos)
        done = 0
        for shard, begin, end, members in _page_runs(infos):
            memory = self.file.mappings[shard].data[begin:end]
            buffer = self._lock(memory, sum(info.nbytes for info in members))
            for info in members:
                sources[info.name] = buffer.span(info.offset - begin, info.nbytes)
                done += info.nbytes
            self.progress("page-locking experts", done, total)
        return sources

    def _lock(self, memory: memoryview, nbytes: int) -> HostBuffer:
        label = "mapped experts"
        locks = self.device.info.kind not in (DeviceKind.CPU, DeviceKind.SIMULATED)  # which use pages as they are
        if not self.device.caps.host_register:
            self._refusal = f"{self.device.info.id} cannot page-lock a mapped file (--load-mode none can help)"
        elif locks and self.locked_nbytes + len(memory) > self.lockable_nbytes:
            self._refusal = f"there is RAM for {max(self.lockable_nbytes, 0) / MIB:.0f} MiB of them"
        else:
            try:
                buffer = self.device.register_host(memory, label=label)
                self.pinned_nbytes += nbytes
                self.locked_nbytes += len(memory) if locks else 0
                self._buffers.append(buffer)
                return buffer
            except PinnedMemoryError as error:
                self._refusal = self._refusal or str(error)
        buffer = self.device.wrap_host(memory, label=label)
        self.pageable_nbytes += nbytes
        self._buffers.append(buffer)
        return buffer

    # --- none ----------------------------------------------------------------------------------------------------

    def _read(self, infos: Sequence[TensorInfo]) -> dict[str, Span]:
        """Read the tensors, in the order of the file, into page-locked chunks."""
        sources: dict[str, Span] = {}
        ordered = sorted(infos, key=lambda info: (info.shard, info.offset))
        total = sum(info.nbytes for info in ordered)
        done = 0
        for members in _chunks(ordered):
            nbytes = sum(_padded(info.nbytes) for info in members)
            try:
                chunk = self.device.alloc_host(nbytes, label="experts")
            except PinnedMemoryError as error:
                self._refusal = self._refusal or str(error)
                for info in members:
                    buffer = self.device.wrap_host(self.file.data(info.name).data, label="mapped experts")
                    self._buffers.append(buffer)
                    sources[info.name] = buffer.span()
                    self.pageable_nbytes += info.nbytes
                continue
            self._buffers.append(chunk)
            offset = 0
            for info in members:
                span = chunk.span(offset, info.nbytes)
                if self.device.info.kind is not DeviceKind.SIMULATED:  # which computes no numbers
                    self.file.read_into(info.name, span.host_view(np.uint8))
                sources[info.name] = span
                offset += _padded(info.nbytes)
                done += info.nbytes
                if chunk.pinned:
                    self.pinned_nbytes += info.nbytes
                else:
                    self.pageable_nbytes += info.nbytes
                self.progress("reading experts", done, total)
        return sources

    def _note(self, total_nbytes: int) -> None:
        note = (
            f"{self.pageable_nbytes / MIB:.0f} of {total_nbytes / MIB:.0f} MiB of experts are not page-locked, "
            f"copies from them are slow: {self._refusal}"
        )
        log.warning("%s", note)
        self.notes.append(note)


def _padded(nbytes: int) -> int:
    return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES


def _chunks(infos: Sequence[TensorInfo]) -> list[list[TensorInfo]]:
    """Consecutive tensors in groups of at most `CHUNK_NBYTES`; a larger tensor is a group of its own."""
    groups: list[list[TensorInfo]] = []
    size = CHUNK_NBYTES + 1
    for info in infos:
        if size + _padded(info.nbytes) > CHUNK_NBYTES:
            groups.append([])
            size = 0
        groups[-1].append(info)
        size += _padded(info.nbytes)
    return groups


def _page_runs(infos: Sequence[TensorInfo]) -> list[tuple[int, int, int, list[TensorInfo]]]:
    """(shard, begin, end, tensors) in whole pages, such that no page is in two runs: it can be locked only once."""
    runs: list[tuple[int, int, int, list[TensorInfo]]] = []
    for info in sorted(infos, key=lambda info: (info.shard, info.offset)):
        begin, end = info.offset // PAGE_NBYTES * PAGE_NBYTES, _padded(info.offset + info.nbytes)
        if runs and runs[-1][0] == info.shard and begin <= runs[-1][2]:
            shard, first, last, members = runs[-1]
            runs[-1] = (shard, first, max(last, end), [*members, info])
        else:
            runs.append((info.shard, begin, end, [info]))
    return runs
