"""Full-size models with random weights, written in seconds.

An engine's speed depends on shapes and types, not on what the weights say, provided that activations stay finite and
routing spreads over the experts. The deviations below see to that: embeddings dominate the residual stream, so that no
common direction of the layers' outputs grows until half of the experts are never chosen.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import chain
from math import prod
from struct import pack
from typing import TypeVar

import gguf
import numpy as np
from numpy.typing import NDArray

from noria.api.errors import MIB, ConfigError
from noria.api.memory import align_up
from noria.gguf.header import TensorInfo
from noria.gguf.model_file import open_model
from noria.gguf.presets import PRESETS, Preset
from noria.gguf.quant_mix import QUANTS, QuantMix
from noria.gguf.quants import block_facts, row_nbytes
from noria.gguf.random_blocks import random_blocks
from noria.gguf.shards import COUNT, NO, TENSORS_COUNT, shard_name

ALIGNMENT: int = gguf.GGUF_DEFAULT_ALIGNMENT
CHUNK_NBYTES = 4 * MIB
MAX_THREADS = 16

_T = TypeVar("_T")

# Standard deviations by the last part of a tensor's name; norm weights are 1.
_STD = {"token_embd": 1.0, "ffn_gate_inp": 0.03, "attn_output": 0.004, "ffn_down_exps": 0.004}
_OTHER_STD = 0.02


def synthesize(
    preset: str,
    path: str | os.PathLike[str],
    *,
    n_layer: int | None = None,
    quant: str = "Q4_K_M",
    vocab: str | os.PathLike[str] | None = None,
    seed: int = 0,
    sparse: bool = False,
    n_shards: int = 1,
    progress: Callable[[int, int], None] = lambda n_done, n_total: None,
) -> int:
    """Write a random-weight model that llama.cpp loads, too; returns its bytes.

    The file depends on the arguments alone, not on the machine. It appears under its name when it is complete.

    Args:
        preset: a key of `PRESETS`.
        n_layer: instead of the preset's.
        quant: a key of `QUANTS`.
        vocab: a GGUF file whose tokenizer is copied; `n_vocab` becomes its number of tokens. Without it the model has
            no tokenizer, only token ids.
        seed: of the weights, not negative.
        sparse: leave a hole in place of the weights (all zero bits, no disk space): for planning, not for running.
        n_shards: files to split the model into; more than one are named `shard_name(path, ...)`.
        progress: called as `progress(n_done, n_total)`, in bytes of tensor data.

    Raises:
        ConfigError: an argument makes no sense, or `path` cannot be written.
        ModelError: `vocab` cannot be read.
    """
    shapes = _chosen("preset", preset, PRESETS)
    _chosen("quant", quant, QUANTS)
    if seed < 0:
        raise ConfigError(f"the seed must not be negative, but is {seed}")
    if n_layer is not None:
        if n_layer < 1:
            raise ConfigError(f"a model needs at least 1 layer, not {n_layer}")
        shapes = replace(shapes, n_layer=n_layer)
    tokenizer = [_entry("tokenizer.ggml.model", "no_vocab")]
    if vocab is not None:
        tokenizer, n_vocab = _copied_tokenizer(vocab)
        shapes = replace(shapes, n_vocab=n_vocab)
    tensors = list(_layout(shapes, quant))
    if not 1 <= n_shards <= len(tensors):
        raise ConfigError(f"a model of {len(tensors)} tensors cannot be split into {n_shards} files")
    files = _files(os.fspath(path), [*_entries(preset, shapes, quant), *tokenizer], tensors, n_shards)
    _write(files, None if sparse else seed, progress)
    return sum(file.nbytes for file in files)


def _chosen(what: str, name: str, table: dict[str, _T]) -> _T:
    if name in table:
        return table[name]
    near = get_close_matches(name, table, 1)
    hint = f" Did you mean '{near[0]}'?" if near else ""
    raise ConfigError(f"unknown {what} '{name}'; there are: {', '.join(table)}.{hint}")


def _layout(shapes: Preset, quant: str) -> Iterator[TensorInfo]:
    """The tensors one after another; their offsets count from the start of tensor data."""
    mix = QuantMix(
        quant=quant, n_layer=shapes.n_layer, n_expert=shapes.n_expert, n_gqa=shapes.n_head // shapes.n_head_kv
    )
    offset = 0
    for name, shape in shapes.tensors():
        type_name = mix.type_of(name, shape)
        nbytes = prod(shape[:-1]) * row_nbytes(type_name, shape[-1])
        yield TensorInfo(name=name, type=type_name, shape=shape, offset=offset, nbytes=nbytes)
        offset = align_up(offset + nbytes, ALIGNMENT)


@dataclass(frozen=True, slots=True)
class _File:
    """A file to write: tensors of the model from number `first` on, their offsets from the end of the header."""

    path: str
    header: bytes
    tensors: list[TensorInfo]
    first: int

    @property
    def nbytes(self) -> int:
        return len(self.header) + align_up(self.tensors[-1].offset + self.tensors[-1].nbytes, ALIGNMENT)


def _files(path: str, entries: list[bytes], tensors: list[TensorInfo], n_shards: int) -> list[_File]:
    """The whole model, or shards of about the same size, the metadata in the first."""
    if n_shards == 1:
        return [_File(path, _header(entries, tensors), tensors, 0)]
    files: list[_File] = []
    end, total = 0, tensors[-1].offset + tensors[-1].nbytes
    for no in range(n_shards):
        first, n_left = end, n_shards - no - 1
        end = first + 1
        while end < len(tensors) - n_left and (no + 1) * total > n_shards * (tensors[end].offset + tensors[end].nbytes):
            end += 1
        end = end if n_left else len(tensors)
        members = [replace(tensor, offset=tensor.offset - tensors[first].offset) for tensor in tensors[first:end]]
        split = [
            _string(NO) + pack("<IH", gguf.GGUFValueType.UINT16, no),
            _string(COUNT) + pack("<IH", gguf.GGUFValueType.UINT16, n_shards),
            _string(TENSORS_COUNT) + pack("<Ii", gguf.GGUFValueType.INT32, len(tensors)),
        ]
        header = _header([*(() if no else entries), *split], members)
        files.append(_File(shard_name(path, no, n_shards), header, members, first))
    return files


# --- the header -------------------------------------------------------------------------------------------------------


def _string(text: str) -> bytes:
    data = text.encode()
    return pack("<Q", len(data)) + data


def _entry(key: str, value: str | int | float) -> bytes:
    """A metadata entry as it stands in a file; integers are UINT32, other numbers FLOAT32."""
    if isinstance(value, str):
        return _string(key) + pack("<I", gguf.GGUFValueType.STRING) + _string(value)
    if isinstance(value, int):
        return _string(key) + pack("<II", gguf.GGUFValueType.UINT32, value)
    return _string(key) + pack("<If", gguf.GGUFValueType.FLOAT32, value)


def _entries(preset: str, shapes: Preset, quant: str) -> Iterator[bytes]:
    yield _entry(gguf.Keys.General.ARCHITECTURE, shapes.architecture)
    yield _entry(gguf.Keys.General.NAME, f"{preset} (random weights)")
    yield _entry(gguf.Keys.General.FILE_TYPE, int(QUANTS[quant][1]))
    yield _entry(gguf.Keys.General.QUANTIZATION_VERSION, gguf.GGML_QUANT_VERSION)
    for name, value in shapes.metadata().items():
        yield _entry(f"{shapes.architecture}.{name}", value)


def _copied_tokenizer(path: str | os.PathLike[str]) -> tuple[list[bytes], int]:
    """The tokenizer entries of a model file, byte for byte, and its number of tokens."""
    with open_model(path) as source:
        spans = [source.metadata.span(key) for key in source.metadata if key.startswith("tokenizer.")]
        entries = [source.mappings[0][start:end].tobytes() for start, end in spans]
        return entries, len(source.metadata.get_strings("tokenizer.ggml.tokens"))


def _header(entries: list[bytes], tensors: list[TensorInfo]) -> bytes:
    parts = [pack("<IIQQ", gguf.GGUF_MAGIC, gguf.GGUF_VERSION, len(tensors), len(entries)), *entries]
    for tensor in tensors:
        dims = tensor.shape[::-1]
        parts.append(_string(tensor.name) + pack(f"<I{len(dims)}Q", len(dims), *dims))
        parts.append(pack("<IQ", gguf.GGMLQuantizationType[tensor.type], tensor.offset))
    header = b"".join(parts)
    return header.ljust(align_up(len(header), ALIGNMENT), b"\0")


# --- the weights ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Chunk:
    """`n` blocks of a tensor at `offset` of a file: what one thread makes and writes at once, from its own stream."""

    fd: int
    offset: int
    tensor: TensorInfo
    stream: tuple[int, int]
    n: int


def _chunks(file: _File, fd: int) -> Iterator[_Chunk]:
    for i, tensor in enumerate(file.tensors, file.first):
        type_nbytes = block_facts(tensor.type)[1]
        n_blocks, step = tensor.nbytes // type_nbytes, CHUNK_NBYTES // type_nbytes
        for j, first in enumerate(range(0, n_blocks, step)):
            offset = len(file.header) + tensor.offset + first * type_nbytes
            yield _Chunk(fd, offset, tensor, (i, j), min(step, n_blocks - first))


def _weights(chunk: _Chunk, seed: int) -> NDArray[np.uint8]:
    if "norm" in chunk.tensor.name:
        return np.ones(chunk.n, np.float32).view(np.uint8)
    rng = np.random.Generator(np.random.SFC64(np.random.SeedSequence([seed, *chunk.stream])))
    std = _STD.get(chunk.tensor.name.split(".")[-2], _OTHER_STD)
    return random_blocks(chunk.tensor.type, chunk.n, std, rng)


def _write(files: list[_File], seed: int | None, progress: Callable[[int, int], None]) -> None:
    """Without a seed the weights stay a hole."""
    path, nbytes = files[0].path, sum(file.nbytes for file in files)
    try:
        free = shutil.disk_usage(os.path.dirname(os.path.abspath(path))).free
        if seed is not None and nbytes > free:
            raise ConfigError(f"{path}: needs {nbytes / 1e9:.2f} GB, but its disk has {free / 1e9:.2f} GB free.")
        with ExitStack() as stack:
            chunks: list[Iterator[_Chunk]] = []
            for file in files:
                out = stack.enter_context(open(f"{file.path}.part", "wb", buffering=0))
                out.write(file.header)
                out.truncate(file.nbytes)
                chunks.append(_chunks(file, out.fileno()))
            if seed is not None:
                n_total = sum(tensor.nbytes for file in files for tensor in file.tensors)
                _write_weights(chain.from_iterable(chunks), n_total, seed, progress)
        for file in files:
            os.replace(f"{file.path}.part", file.path)
    except OSError as error:
        raise ConfigError(f"{error.filename or path}: cannot be written: {error.strerror}.") from None
    finally:
        for file in files:
            with suppress(OSError):
                os.remove(f"{file.path}.part")


def _write_weights(chunks: Iterable[_Chunk], n_total: int, seed: int, progress: Callable[[int, int], None]) -> None:
    def write(chunk: _Chunk) -> int:
        data = _weights(chunk, seed)
        view, offset = data.data, chunk.offset
        while view:
            n_written = os.pwrite(chunk.fd, view, offset)
            view, offset = view[n_written:], offset + n_written
        return len(data)

    n_done = 0
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool:
        for n_written in pool.map(write, chunks):
            n_done += n_written
            progress(n_done, n_total)
