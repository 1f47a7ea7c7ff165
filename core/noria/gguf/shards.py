"""The files of a model: one, or shards, found by what they say of themselves.

Each shard of a split model is a GGUF file of its own. It says which one it is (`split.no`, from 0), of how many
(`split.count`), and how many tensors all of them hold together (`split.tensors.count`); the model's metadata is in the
first. The usual name, `NAME-00002-of-00003.gguf`, says where to look first, and a shard of another name is found by its
metadata. Shards one after another in one file, as `cat` joins them, are as good as apart.

Source: llama.cpp, tools/gguf-split/gguf-split.cpp and src/llama-model-loader.cpp.
"""

from __future__ import annotations

import mmap
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from noria.api.errors import GGUFError, ModelError
from noria.gguf.header import MAX_HEADER_NBYTES, Header, read_header

NO = gguf.Keys.Split.LLM_KV_SPLIT_NO
COUNT = gguf.Keys.Split.LLM_KV_SPLIT_COUNT
TENSORS_COUNT = gguf.Keys.Split.LLM_KV_SPLIT_TENSORS_COUNT

_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
_PART_NAME = re.compile(r"\.gguf[.-](?:part|split)|\.gguf\.[a-z]{2}$|\.gguf\.\d+$", re.IGNORECASE)


def shard_name(path: str, no: int, count: int) -> str:
    """The usual name of shard `no` (from 0) of the model `path` (`NAME.gguf`)."""
    return f"{path.removesuffix('.gguf')}-{no + 1:05}-of-{count:05}.gguf"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MappedFile:
    """A file mapped read-only; `data` is all of it, uint8 [nbytes]."""

    path: str
    mapping: mmap.mmap
    data: NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shard:
    """A GGUF file, or one of those that `cat` joined to one; offsets in `header` are from the start of `file`.

    Attributes:
        no: from 0.
        count: shards of the model; 0 in a file that says nothing about shards.
        n_tensors: in all shards together.
    """

    file: MappedFile
    header: Header
    no: int
    count: int
    n_tensors: int

    def fail(self, field: str, text: str) -> GGUFError:
        return GGUFError(self.file.path, field, text)


def open_shards(path: str) -> list[Shard]:
    """The shards of the model that `path` is a file of, in order; a single one if it is all of it.

    Raises:
        ModelError: a file cannot be read.
        GGUFError: one is not sound, is missing, or belongs to another model.
    """
    shards = list(_read(_map(path)))
    opened = shards[0]
    if opened.count <= 1:
        _check_not_named_as_shard(opened)
        return [opened]
    for name in _siblings_by_name(path):
        shards += _read(_map(name))
    expected = _check_same_model(shards)
    _check_distinct(shards)
    missing = set(range(expected.count)) - {shard.no for shard in shards}
    if missing:
        shards += _siblings_by_metadata(shards, expected, missing)
    shards.sort(key=lambda shard: shard.no)
    _check_complete(shards, opened)
    return shards


def _map(path: str) -> MappedFile:
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ModelError(f"{path}: is not a file. Give the path of a .gguf file.")
        with open(path, "rb") as file:
            if not os.fstat(file.fileno()).st_size:
                raise GGUFError(path, "magic", "is missing: the file is empty")
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file.") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read: {error}.") from None
    return MappedFile(path=path, mapping=mapping, data=np.frombuffer(mapping, np.uint8))


def _read(file: MappedFile) -> Iterator[Shard]:
    """The shards in a file: one, unless several were joined by `cat`."""
    shard = _shard(file, 0)
    yield shard
    for _ in range(1, shard.count):
        start = _next_start(shard)
        if start is None:
            return
        shard = _shard(file, start)
        yield shard


def _shard(file: MappedFile, start: int) -> Shard:
    try:
        header = read_header(file.path, file.data, start)
    except GGUFError as error:
        if _PART_NAME.search(os.path.basename(file.path)):
            error.args = (f"{error}. By its name this is a piece of a file: join all of them in order, with cat",)
        raise
    metadata = header.metadata
    no, count = metadata.get_int(NO, 0), metadata.get_int(COUNT, 0)
    shard = Shard(file=file, header=header, no=no, count=count, n_tensors=metadata.get_int(TENSORS_COUNT, 0))
    if count > 1 and not 0 <= no < count:
        raise shard.fail(NO, f"is {no}, but shards of {count} are numbered from 0 to {count - 1}. Fetch the file again")
    return shard


def _next_start(shard: Shard) -> int | None:
    """Where another GGUF file follows in the same one."""
    magic = gguf.GGUF_MAGIC.to_bytes(4, "little")
    for start in (shard.header.end, shard.header.padded_end):
        if shard.file.data[start : start + 4].tobytes() == magic:
            return start
    return None


def _check_not_named_as_shard(shard: Shard) -> None:
    named = _NAME.fullmatch(os.path.basename(shard.file.path))
    if named is not None and int(named[3]) > 1:
        found = f"is {shard.count}" if COUNT in shard.header.metadata else "is missing"
        raise shard.fail(
            COUNT,
            f"{found}, but by its name the file is shard {int(named[2])} of {int(named[3])}. Fetch it again, or rename "
            f"it if it is a whole model",
        )


def _siblings_by_name(path: str) -> list[str]:
    """The other files beside `path` that are named as shards of the same model."""
    folder, base = os.path.split(path)
    named = _NAME.fullmatch(base)
    if named is None:
        return []
    siblings = []
    for name in sorted(os.listdir(folder or ".")):
        other = _NAME.fullmatch(name)
        if other is not None and name != base and (other[1], other[3]) == (named[1], named[3]):
            siblings.append(os.path.join(folder, name))
    return siblings


def _check_same_model(shards: Sequence[Shard]) -> Shard:
    """Any shard whose counts are those of most; the one that differs is to blame."""
    counts = Counter((shard.count, shard.n_tensors) for shard in shards)
    most = counts.most_common(1)[0][0]
    expected = next(shard for shard in shards if (shard.count, shard.n_tensors) == most)
    for shard in shards:
        for field, value, other in (
            (COUNT, shard.count, expected.count),
            (TENSORS_COUNT, shard.n_tensors, expected.n_tensors),
        ):
            if value != other:
                raise shard.fail(
                    field,
                    f"is {value}, but {other} in {expected.file.path}. It is damaged or a shard of another model: "
                    f"fetch it again",
                )
    return expected


def _check_distinct(shards: Sequence[Shard]) -> None:
    by_no: dict[int, Shard] = {}
    for shard in shards:
        other = by_no.setdefault(shard.no, shard)
        if other is shard:
            continue
        if _named_no(other) not in (None, other.no):
            shard, other = other, shard
        belongs = _named_no(shard)
        place = "" if belongs in (None, shard.no) else f" By its name it should be {belongs}."
        raise shard.fail(NO, f"is {shard.no}, as in {other.file.path}.{place} Fetch it again")


def _named_no(shard: Shard) -> int | None:
    named = _NAME.fullmatch(os.path.basename(shard.file.path))
    return None if named is None else int(named[2]) - 1


def _siblings_by_metadata(shards: Sequence[Shard], expected: Shard, missing: set[int]) -> list[Shard]:
    """The `missing` shards, from the other GGUF files of the folder that say they are of the same model."""
    folder = os.path.dirname(expected.file.path)
    known = [shard.file.path for shard in shards]
    found: dict[int, Shard] = {}
    for path in sorted(Path(folder).glob("*.gguf")):
        if not path.is_file() or any(os.path.samefile(path, other) for other in known):
            continue
        for shard in _read_if_shard(os.path.join(folder, path.name)):
            if (shard.count, shard.n_tensors) != (expected.count, expected.n_tensors) or shard.no not in missing:
                continue
            if shard.no in found:
                raise shard.fail(
                    NO,
                    f"is {shard.no}, as in {found[shard.no].file.path}: each could be shard {shard.no + 1} of "
                    f"{expected.file.path}. Move one away, or name the shards of one model "
                    f"{shard_name('NAME', 0, expected.count)} and so on",
                )
            found[shard.no] = shard
            known.append(shard.file.path)
    return list(found.values())


def _read_if_shard(path: str) -> list[Shard]:
    """The shards in a file that nobody named; none if it is damaged or something else."""
    try:
        file = _map(path)
        if file.mapping.find(COUNT.encode(), 0, MAX_HEADER_NBYTES) < 0:  # cheaper than its header
            return []
        return list(_read(file))
    except ModelError:
        return []


def _check_complete(shards: Sequence[Shard], opened: Shard) -> None:
    absent = sorted(set(range(opened.count)) - {shard.no for shard in shards})
    folder, base = os.path.split(opened.file.path)
    if absent:
        named = _NAME.fullmatch(base)
        stem = named[1] if named else "NAME"
        names = ", ".join(shard_name(stem, no, opened.count) for no in absent[:3]) + (" ..." if absent[3:] else "")
        raise opened.fail(
            COUNT,
            f"is {opened.count}, but shard {', '.join(str(no + 1) for no in absent[:3])}"
            f"{' ...' if absent[3:] else ''} is not in {folder or 'this folder'}: fetch {names} and put it beside the "
            f"others",
        )
    held_by: dict[str, Shard] = {}
    for shard in shards:
        for name in shard.header.tensors:
            other = held_by.setdefault(name, shard)
            if other is not shard:
                raise shard.fail(
                    f"tensor '{name}'",
                    f"is also in {other.file.path}. One of the two is a shard of another model: fetch both again",
                )
    if len(held_by) != opened.n_tensors:
        counts = ", ".join(f"{os.path.basename(s.file.path)}: {len(s.header.tensors)}" for s in shards[:16])
        raise opened.fail(
            TENSORS_COUNT,
            f"is {opened.n_tensors}, but the shards hold {len(held_by)} tensors together ({counts}). One of them is "
            f"damaged or of another model: fetch them again",
        )
