"""The header of a GGUF file: metadata and tensor table, with everything checked against the file.

A header is read once, front to back, and trusts nothing: each count, length, shape and offset is compared with what is
left of the file before anything is allocated for it, so a damaged or hostile file costs a fraction of a second and no
more memory than its own header. `MAX_HEADER_NBYTES` bounds that in a huge (or sparse) file.

Source: the GGUF specification, versions 2 and 3 (ggml, docs/gguf.md).
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from struct import Struct
from typing import Any, NoReturn

import gguf
import numpy as np
from numpy.typing import NDArray

from noria.api.errors import MIB, GGUFError
from noria.api.memory import align_up
from noria.gguf import quants
from noria.gguf.metadata import Metadata, MetadataValue, StringArray

VERSIONS = (2, 3)
MAX_DIMS = 4  # ggml.h: GGML_MAX_DIMS
# Limits of ours, each several times what the largest known models have.
MAX_HEADER_NBYTES = 64 * MIB
MAX_ENTRIES = 65_536
MAX_STRINGS = 2_000_000  # in all arrays together: what can be walked over in well under a second
MAX_NAME_NBYTES = 1024

_ValueType = gguf.GGUFValueType
_U32, _U64 = Struct("<I"), Struct("<Q")
_SCALARS = {
    _ValueType.UINT8: Struct("<B"),
    _ValueType.INT8: Struct("<b"),
    _ValueType.UINT16: Struct("<H"),
    _ValueType.INT16: Struct("<h"),
    _ValueType.UINT32: _U32,
    _ValueType.INT32: Struct("<i"),
    _ValueType.FLOAT32: Struct("<f"),
    _ValueType.BOOL: Struct("<?"),
    _ValueType.UINT64: _U64,
    _ValueType.INT64: Struct("<q"),
    _ValueType.FLOAT64: Struct("<d"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One tensor of a model file.

    Attributes:
        name: as in the file.
        type: ggml name ("Q4_K").
        shape: NumPy order, outer to inner (the reverse of the file's): experts are [n_expert, n_out, n_in].
        shard: which of the model's files holds it.
        offset: of its data, in bytes from the start of that file.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    shard: int = 0
    offset: int
    nbytes: int

    @property
    def row_nbytes(self) -> int:
        """Bytes of one row of the last axis."""
        return self.nbytes // prod(self.shape[:-1])

    @property
    def slab_nbytes(self) -> int:
        """Bytes of one expert: what one step along the first axis spans."""
        return self.nbytes // self.shape[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What the header of one file says.

    Attributes:
        end: where the data of the last tensor ends, or the header of a file without tensors.
        padded_end: the same, rounded up to the alignment of tensor data.
    """

    metadata: Metadata
    tensors: dict[str, TensorInfo]
    end: int
    padded_end: int


def read_header(path: str, data: NDArray[np.uint8], start: int = 0) -> Header:
    """Read and check the header at `start` of the file `data` (uint8 [nbytes], all of it); `path` is for messages.

    All offsets, in metadata and tensors, are from the start of the file.

    Raises:
        GGUFError: whatever is wrong with the file, naming the field.
    """
    reader = _Reader(path, data, start)
    _check_version(reader)
    n_tensors = _read_count(reader, "tensor count")
    n_entries = _read_count(reader, "metadata count")
    values: dict[str, MetadataValue] = {}
    spans: dict[str, tuple[int, int]] = {}
    for i in range(n_entries):
        entry_start = reader.position
        key = reader.name(f"key of metadata entry {i}")
        if key in values:
            reader.fail(key, "is there twice")
        values[key] = _read_value(reader, key)
        spans[key] = entry_start, reader.position
    metadata = Metadata(path, values, spans)
    alignment = metadata.get_int(gguf.Keys.General.ALIGNMENT, gguf.GGUF_DEFAULT_ALIGNMENT)
    if alignment < 1 or alignment & (alignment - 1):
        reader.fail(gguf.Keys.General.ALIGNMENT, f"is {alignment}, which is not a power of two")
    entries = [_read_tensor_entry(reader, i) for i in range(n_tensors)]
    data_offset = start + align_up(reader.position - start, alignment)
    tensors: dict[str, TensorInfo] = {}
    for entry in entries:
        if entry.name in tensors:
            reader.fail(f"tensor '{entry.name}'", "is there twice")
        tensors[entry.name] = _place(reader, entry, data_offset, alignment)
    _check_overlap(reader, tensors)
    end = max((tensor.offset + tensor.nbytes for tensor in tensors.values()), default=reader.position)
    padded_end = start + align_up(end - start, alignment)
    return Header(metadata=metadata, tensors=tensors, end=end, padded_end=padded_end)


class _Reader:
    """A position in the header; everything read through it is checked against the end first."""

    def __init__(self, path: str, data: NDArray[np.uint8], start: int) -> None:
        self.path = path
        self.nbytes = len(data)
        self.limit = min(self.nbytes, start + MAX_HEADER_NBYTES)
        self.data = data
        self.buffer = data.data
        self.position = start
        self.n_strings = 0

    def fail(self, field: str, text: str) -> NoReturn:
        raise GGUFError(self.path, field, text)

    def take(self, field: str, nbytes: int) -> int:
        """Step over `nbytes`; returns where they start."""
        start = self.position
        if nbytes > self.limit - start:
            if self.limit < self.nbytes:
                why = f"a header has at most {MAX_HEADER_NBYTES // MIB} MiB. The file is damaged"
            else:
                why = f"the file ends at {self.nbytes}. It is cut or damaged: fetch it again"
            self.fail(field, f"needs {nbytes} bytes at offset {start}, but {why}")
        self.position = start + nbytes
        return start

    def number(self, field: str, form: Struct) -> Any:
        return form.unpack_from(self.buffer, self.take(field, form.size))[0]

    def string(self, field: str, max_nbytes: int = MAX_HEADER_NBYTES) -> str:
        nbytes = self.number(field, _U64)
        if nbytes > max_nbytes:
            self.fail(field, f"is said to be {nbytes} bytes long; at most {max_nbytes} make sense")
        start = self.take(field, nbytes)
        try:
            return str(self.buffer[start : start + nbytes], "utf-8")
        except UnicodeDecodeError as error:
            self.fail(field, f"is not UTF-8 ({error.reason} at offset {start + error.start})")

    def name(self, field: str) -> str:
        """A string that later messages repeat."""
        name = self.string(field, MAX_NAME_NBYTES)
        if not name or not name.isprintable():
            self.fail(field, f"is {name!r}; names are printable and not empty")
        return name


def _check_version(reader: _Reader) -> None:
    magic = reader.number("magic", _U32)
    if magic != gguf.GGUF_MAGIC:
        reader.fail("magic", f"is {magic.to_bytes(4, 'little')!r}, not b'GGUF'. This is not a GGUF file")
    version = reader.number("version", _U32)
    if version & 0xFFFF == 0 and version:  # a small number with its bytes swapped
        reader.fail("version", "is stored big-endian. Convert the file to little-endian (gguf_convert_endian.py)")
    if version not in VERSIONS:
        known = " and ".join(map(str, VERSIONS))
        reader.fail("version", f"is {version}; noria reads {known}. Convert the model again with a current llama.cpp")


def _read_count(reader: _Reader, field: str) -> int:
    count = reader.number(field, _U64)
    if count > MAX_ENTRIES:
        reader.fail(field, f"is {count}; more than {MAX_ENTRIES} make no sense. The file is damaged")
    return int(count)


def _read_value_type(reader: _Reader, key: str) -> _ValueType:
    number = reader.number(key, _U32)
    try:
        return _ValueType(number)
    except ValueError:
        reader.fail(key, f"has the unknown value type {number}")


def _read_value(reader: _Reader, key: str) -> MetadataValue:
    kind = _read_value_type(reader, key)
    if kind == _ValueType.STRING:
        return reader.string(key)
    if kind == _ValueType.ARRAY:
        return _read_array(reader, key)
    value: MetadataValue = reader.number(key, _SCALARS[kind])
    if kind == _ValueType.BOOL and reader.buffer[reader.position - 1] > 1:
        reader.fail(key, f"is a bool of value {reader.buffer[reader.position - 1]}; only 0 and 1 are")
    return value


def _read_array(reader: _Reader, key: str) -> MetadataValue:
    kind = _read_value_type(reader, key)
    count = reader.number(key, _U64)
    if kind == _ValueType.ARRAY:
        reader.fail(key, "is an array of arrays, which no model has")
    if kind == _ValueType.STRING:
        return _read_string_array(reader, key, count)
    dtype = np.dtype(np.uint8 if kind == _ValueType.BOOL else _SCALARS[kind].format)
    start = reader.take(key, count * dtype.itemsize)
    numbers = np.frombuffer(reader.data, dtype, count, start).copy()
    if kind == _ValueType.BOOL:
        if numbers.max(initial=0) > 1:
            reader.fail(key, f"holds a bool of value {numbers.max()}; only 0 and 1 are")
        numbers = numbers.view(np.bool_)
    numbers.flags.writeable = False
    return numbers


def _read_string_array(reader: _Reader, key: str, count: int) -> StringArray:
    """Only walks over the lengths: this loop runs some 300,000 times for a real vocabulary."""
    reader.n_strings += count
    if reader.n_strings > MAX_STRINGS:
        reader.fail(key, f"is said to hold {count} strings; a header has at most {MAX_STRINGS}. The file is damaged")
    ends = array("Q")
    buffer, length_of, limit = reader.buffer, _U64.unpack_from, reader.limit
    first = position = reader.position
    for _ in range(count):
        if position + 8 > limit:
            break
        position += 8 + length_of(buffer, position)[0]
        if position > limit:
            break
        ends.append(position - first)
    start = reader.take(f"{key} ({count} strings)", position - first + 8 * (count - len(ends)))
    return StringArray(reader.path, key, bytes(buffer[start:position]), ends)


@dataclass(frozen=True, slots=True)
class _TensorEntry:
    """A row of the tensor table as it stands; `dims` inner to outer, `offset` from the start of tensor data."""

    name: str
    dims: tuple[int, ...]
    type_id: int
    offset: int


def _read_tensor_entry(reader: _Reader, index: int) -> _TensorEntry:
    name = reader.name(f"name of tensor {index}")
    field = f"tensor '{name}'"
    n_dims = reader.number(field, _U32)
    if not 1 <= n_dims <= MAX_DIMS:
        reader.fail(field, f"has {n_dims} dimensions; 1 to {MAX_DIMS} are possible")
    dims = tuple(reader.number(field, _U64) for _ in range(n_dims))
    return _TensorEntry(name, dims, reader.number(field, _U32), reader.number(field, _U64))


def _place(reader: _Reader, entry: _TensorEntry, data_offset: int, alignment: int) -> TensorInfo:
    """The entry as a tensor whose type is known and whose data lies in the file."""
    field = f"tensor '{entry.name}'"
    type_name = quants.type_name(entry.type_id)
    if type_name is None:
        reader.fail(field, f"has the unknown type {entry.type_id}. A newer gguf package may know it")
    if 0 in entry.dims:
        reader.fail(field, f"has an empty shape {entry.dims[::-1]}")
    try:
        nbytes = prod(entry.dims[1:]) * quants.row_nbytes(type_name, entry.dims[0])
    except ValueError as error:
        reader.fail(field, str(error))
    if entry.offset % alignment:
        reader.fail(field, f"has the data offset {entry.offset}, which is not a multiple of {alignment}")
    offset = data_offset + entry.offset
    if offset + nbytes > reader.nbytes:
        reader.fail(
            field,
            f"of {type_name} {entry.dims[::-1]} needs {nbytes} bytes at offset {offset}, but the file ends at "
            f"{reader.nbytes}. It is cut or damaged: fetch it again",
        )
    return TensorInfo(name=entry.name, type=type_name, shape=entry.dims[::-1], offset=offset, nbytes=nbytes)


def _check_overlap(reader: _Reader, tensors: dict[str, TensorInfo]) -> None:
    in_order = sorted(tensors.values(), key=lambda tensor: tensor.offset)
    for before, after in pairwise(in_order):
        if before.offset + before.nbytes > after.offset:
            reader.fail(f"tensor '{after.name}'", f"starts inside tensor '{before.name}', at offset {after.offset}")
