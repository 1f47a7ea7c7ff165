"""The header parser: equal to gguf's own reader on sound files, a GGUFError naming the field on all others."""

from __future__ import annotations

import struct
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from noria.api.errors import MIB, GGUFError
from noria.gguf import ModelFile, StringArray, open_model

SHARED = Path(__file__).parents[3] / "shared"
KINDS = gguf.GGUFValueType


# --- files ------------------------------------------------------------------------------------------------------------


def write_small_model(path: Path) -> None:
    """Every kind of metadata value and three tensors, written by the gguf package."""
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_name("small · model")
    for kind, value in {"UINT8": 7, "INT8": -7, "UINT16": 700, "INT16": -700, "INT32": -70_000}.items():
        writer.add_key_value(f"small.{kind}", value, KINDS[kind])
    writer.add_uint64("small.UINT64", 2**63 + 1)
    writer.add_key_value("small.INT64", -(2**62), KINDS.INT64)
    writer.add_float64("small.FLOAT64", 0.1)
    writer.add_rope_freq_base(1e6)
    writer.add_expert_count(3)
    writer.add_bool("small.yes", True)
    writer.add_token_list(["a", "Ġthe", "", "ünï", "日本"])
    writer.add_token_types([1, 3, 1, 1, 6])
    writer.add_token_scores([0.5, -1.0, 0.0, 2.0, 3.0])
    writer.add_array("small.flags", [True, False, True])
    writer.add_array("small.none", [])
    rng = np.random.default_rng(5)
    writer.add_tensor("token_embd.weight", rng.standard_normal((5, 64), np.float32))
    experts = rng.integers(0, 256, (3, 4, 2 * 34), np.uint8)
    writer.add_tensor("blk.0.ffn_up_exps.weight", experts, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("output_norm.weight", np.ones(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    write_small_model(path)
    return path.read_bytes()


def string(data: bytes | str) -> bytes:
    data = data.encode() if isinstance(data, str) else data
    return struct.pack("<Q", len(data)) + data


def entry(key: bytes | str, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


def tensor(name: bytes | str, dims: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def model(
    entries: list[bytes],
    tensors: list[bytes],
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    n_tensors: int | None = None,
    n_entries: int | None = None,
    data_nbytes: int = 4096,
) -> bytes:
    n_tensors = len(tensors) if n_tensors is None else n_tensors
    n_entries = len(entries) if n_entries is None else n_entries
    head = magic + struct.pack("<IQQ", version, n_tensors, n_entries) + b"".join(entries) + b"".join(tensors)
    return head + bytes(-len(head) % 32 + data_nbytes)


def read_everything(file: ModelFile) -> None:
    for value in file.metadata.values():
        if isinstance(value, StringArray):
            list(value)
    for name in file.tensors:
        file.data(name).max()


def open_bounded(path: Path) -> None:
    """Open and read all of it: done or a GGUFError, in a second and without memory worth mentioning."""
    start = time.perf_counter()
    tracemalloc.start()
    try:
        with open_model(path) as file:
            read_everything(file)
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert time.perf_counter() - start < 1.0
        assert peak < 2 * MIB


# --- sound files ------------------------------------------------------------------------------------------------------


def assert_equals_oracle(path: Path) -> None:
    oracle = gguf.GGUFReader(path)
    with open_model(path) as file:
        fields = {name: field for name, field in oracle.fields.items() if not name.startswith("GGUF.")}
        assert list(file.metadata) == list(fields)
        for key, value in file.metadata.items():
            expected = fields[key].contents()
            mine = list(value) if isinstance(value, StringArray) else value
            np.testing.assert_equal(mine.tolist() if isinstance(mine, np.ndarray) else mine, expected, key)
            assert isinstance(value, bool) == (fields[key].types == [KINDS.BOOL])
        assert list(file.tensors) == [tensor.name for tensor in oracle.tensors]
        for tensor in oracle.tensors:
            info = file.tensors[tensor.name]
            assert info.type == tensor.tensor_type.name
            assert info.shape == tuple(reversed(tensor.shape.tolist()))
            assert (info.offset, info.nbytes) == (tensor.data_offset, tensor.n_bytes)
            assert np.array_equal(file.data(tensor.name), tensor.data.view(np.uint8).ravel())


def test_small_model_equals_oracle(tmp_path: Path, small_model: bytes) -> None:
    path = tmp_path / "small.gguf"
    path.write_bytes(small_model)
    assert_equals_oracle(path)


@pytest.mark.parametrize("pattern", ["parity/*.gguf", "models/*.gguf", "vocab/*llama-spm.gguf"])
def test_real_files_equal_oracle(pattern: str) -> None:
    paths = sorted(SHARED.glob(pattern))
    if not paths:
        pytest.skip(f"no {pattern} in {SHARED}")
    for path in paths:
        assert_equals_oracle(path)


@pytest.mark.parametrize("path", sorted(SHARED.glob("vocab/*.gguf")), ids=lambda path: path.stem)
def test_real_vocabularies_open(path: Path) -> None:
    with open_model(path) as file:
        tokens = list(file.metadata.get_strings("tokenizer.ggml.tokens"))
        assert len(tokens) == len(file.metadata.get_numbers("tokenizer.ggml.token_type"))
        assert len(set(tokens)) > 0.99 * len(tokens)


def test_large_vocabulary_is_cheap(tmp_path: Path) -> None:
    """152k tokens and 151k merges, opened by a fresh process: under 1 s and 300 MB with everything imported."""
    path = tmp_path / "vocab.gguf"
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_token_list([f"Ġtoken{i}" for i in range(152_000)])
    writer.add_token_types([1] * 152_000)
    writer.add_token_merges([f"Ġto ken{i}" for i in range(151_000)])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    script = f"""
import time
from noria.gguf import open_model
start = time.perf_counter()
file = open_model({str(path)!r})
seconds = time.perf_counter() - start
tokens, merges = (file.metadata.get_strings("tokenizer.ggml." + name) for name in ("tokens", "merges"))
assert tokens[0] == "Ġtoken0" and tokens[-1] == "Ġtoken151999" and merges[150_999] == "Ġto ken150999"
peak_kb = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(seconds, peak_kb)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    seconds, peak_kb = map(float, done.stdout.split())
    assert seconds < 1.0
    assert peak_kb < 300_000


def test_version_2_and_alignment(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    head = model([entry("general.alignment", KINDS.UINT32, struct.pack("<I", 8))], [tensor("a")], version=2)
    path.write_bytes(head[: -(4096 - 128)])
    with open_model(path) as file:
        assert file.tensors["a"].offset % 8 == 0


# --- unsound files ----------------------------------------------------------------------------------------------------


ARRAY, STRING, U32 = int(KINDS.ARRAY), int(KINDS.STRING), int(KINDS.UINT32)
HOSTILE: dict[str, tuple[bytes, str, str]] = {
    "empty": (b"", "magic", "empty"),
    "not a model": (b"\x7fELF" + bytes(100), "magic", "not a GGUF file"),
    "two bytes": (b"GG", "magic", "the file ends at 2"),
    "version 1": (model([], [], version=1), "version", "is 1"),
    "version 4": (model([], [], version=4), "version", "is 4"),
    "big-endian": (model([], [], version=0x03000000), "version", "big-endian"),
    "absurd metadata count": (model([], [], n_entries=2**63), "metadata count", str(2**63)),
    "absurd tensor count": (model([], [], n_tensors=2**64 - 1), "tensor count", str(2**64 - 1)),
    "more metadata than there is": (
        model([entry("k", U32, bytes(4))], [], n_entries=2, data_nbytes=0)[:45],
        "entry 1",
        "file ends",
    ),
    "more tensors than there are": (model([], [], n_tensors=60_000), "name of tensor 0", "not empty"),
    "empty key": (model([entry("", U32, bytes(4))], []), "entry 0", "not empty"),
    "key with a terminal escape": (model([entry("\x1b[2J", U32, bytes(4))], []), "entry 0", "printable"),
    "long key": (model([struct.pack("<Q", 2**62)], [], n_entries=1), "entry 0", str(2**62)),
    "key is not UTF-8": (model([entry(b"\xff\xfe", U32, bytes(4))], []), "entry 0", "not UTF-8"),
    "key twice": (model([entry("k", U32, bytes(4))] * 2, []), "k", "twice"),
    "unknown value type": (model([entry("k", 13, bytes(8))], []), "k", "type 13"),
    "unknown array type": (model([entry("k", ARRAY, struct.pack("<IQ", 99, 1))], []), "k", "type 99"),
    "long string": (model([entry("k", STRING, struct.pack("<Q", 2**50))], []), "k", str(2**50)),
    "string is not UTF-8": (model([entry("k", STRING, string(b"a\xc3("))], []), "k", "not UTF-8"),
    "bool of value 2": (model([entry("k", int(KINDS.BOOL), b"\x02")], []), "k", "bool of value 2"),
    "bools of value 9": (
        model([entry("k", ARRAY, struct.pack("<IQ3B", KINDS.BOOL, 3, 1, 9, 0))], []),
        "k",
        "bool of value 9",
    ),
    "long array": (model([entry("k", ARRAY, struct.pack("<IQ", KINDS.UINT64, 2**61))], []), "k", "needs"),
    "long string array": (
        model([entry("k", ARRAY, struct.pack("<IQ", STRING, 2**61))], []),
        "k",
        "2305843009213693952",
    ),
    "string array runs out": (
        model([entry("k", ARRAY, struct.pack("<IQ", STRING, 1000) + string("a") * 3)], [], data_nbytes=64),
        "k",
        "file ends",
    ),
    "string in array too long": (
        model([entry("k", ARRAY, struct.pack("<IQ", STRING, 2) + string("a") + struct.pack("<Q", 2**64 - 1))], []),
        "k",
        "file ends",
    ),
    "nested arrays": (
        model([entry("k", ARRAY, struct.pack("<IQ", ARRAY, 1) + struct.pack("<IQ", ARRAY, 1) * 1000)], []),
        "k",
        "array of arrays",
    ),
    "alignment 0": (model([entry("general.alignment", U32, bytes(4))], []), "general.alignment", "power of two"),
    "alignment 24": (model([entry("general.alignment", U32, struct.pack("<I", 24))], []), "general.alignment", "is 24"),
    "alignment is a string": (
        model([entry("general.alignment", STRING, string("32"))], []),
        "general.alignment",
        "should be an integer",
    ),
    "alignment beyond the file": (
        model([entry("general.alignment", U32, struct.pack("<I", 2**31))], [tensor("a")]),
        "tensor 'a'",
        "file ends",
    ),
    "no dimensions": (model([], [tensor("a", ())]), "tensor 'a'", "0 dimensions"),
    "many dimensions": (model([], [string("a") + struct.pack("<I", 2**31)]), "tensor 'a'", "2147483648 dimensions"),
    "empty shape": (model([], [tensor("a", (32, 0))]), "tensor 'a'", "empty shape (0, 32)"),
    "overflowing shape": (model([], [tensor("a", (2**32, 2**32, 2**32))]), "tensor 'a'", "needs"),
    "unknown tensor type": (model([], [tensor("a", kind=4242)]), "tensor 'a'", "unknown type 4242"),
    "row of half a block": (model([], [tensor("a", (128,), kind=12)]), "tensor 'a'", "Q4_K blocks of 256"),
    "unaligned data": (model([], [tensor("a", offset=4)]), "tensor 'a'", "multiple of 32"),
    "data past the end": (model([], [tensor("a", offset=4096 - 64)]), "tensor 'a'", "file ends"),
    "data far past the end": (model([], [tensor("a", offset=2**64 - 32)]), "tensor 'a'", "file ends"),
    "overlapping data": (model([], [tensor("a", (64,)), tensor("b", offset=128)]), "tensor 'b'", "inside tensor 'a'"),
    "tensor twice": (model([], [tensor("a"), tensor("a", offset=128)]), "tensor 'a'", "twice"),
    "tensor name is not UTF-8": (model([], [tensor(b"\x80")]), "name of tensor 0", "not UTF-8"),
}


@pytest.mark.parametrize(("data", "field", "text"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_file(tmp_path: Path, data: bytes, field: str, text: str) -> None:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(data)
    with pytest.raises(GGUFError) as caught:
        open_bounded(path)
    assert field in caught.value.field
    assert text in str(caught.value)
    assert caught.value.path == str(path)


def huge_strings() -> bytes:
    return entry("k", ARRAY, struct.pack("<IQ", STRING, 2**30))


@pytest.mark.parametrize(
    "head",
    [
        model([huge_strings()], [], data_nbytes=0),
        model([entry("k", ARRAY, struct.pack("<IQ", KINDS.UINT8, 2**32))], [], data_nbytes=0),
        model([entry("k", STRING, struct.pack("<Q", 2**32))], [], data_nbytes=0),
        model([], [], n_entries=60_000, data_nbytes=0),
        model([], [], n_tensors=60_000, data_nbytes=0),
    ],
    ids=["empty strings", "numbers", "string", "entries", "tensors"],
)
def test_hostile_header_of_a_huge_file(tmp_path: Path, head: bytes) -> None:
    """The end of the file does not bound what the header asks for: it has 16 GiB (of zeros, on no disk space)."""
    path = tmp_path / "huge.gguf"
    with path.open("wb") as file:
        file.write(head)
        file.truncate(16 << 30)
    with pytest.raises(GGUFError):
        open_bounded(path)


def test_every_cut_is_an_error(tmp_path: Path, small_model: bytes) -> None:
    path = tmp_path / "cut.gguf"
    header_nbytes = small_model.index(b"output_norm.weight") + 64
    for nbytes in [*range(header_nbytes), *range(header_nbytes, len(small_model), 97)]:
        path.write_bytes(small_model[:nbytes])
        with pytest.raises(GGUFError, match=r"file (ends|is empty)"):
            open_model(path)


def flip(data: bytearray, rng: np.random.Generator, end: int) -> None:
    for position in rng.integers(0, end, rng.integers(1, 9)):
        data[position] ^= 1 << rng.integers(0, 8)


def overwrite_count(data: bytearray, rng: np.random.Generator, end: int) -> None:
    value = int(rng.choice([0, 1, 255, 2**31, 2**32 - 1, 2**40, 2**63 - 1])) + int(rng.integers(0, 3))
    position = int(rng.integers(4, end - 8))
    data[position : position + 8] = struct.pack("<Q", value)


def cut(data: bytearray, rng: np.random.Generator, end: int) -> None:
    del data[int(rng.integers(0, end)) :]


def repeat(data: bytearray, rng: np.random.Generator, end: int) -> None:
    start = int(rng.integers(0, end - 64))
    data[start:start] = data[start : start + int(rng.integers(1, 64))]


@pytest.mark.parametrize("mutate", [flip, overwrite_count, cut, repeat])
def test_mutated_headers(
    tmp_path: Path, small_model: bytes, mutate: Callable[[bytearray, np.random.Generator, int], Any]
) -> None:
    path = tmp_path / "mutated.gguf"
    rng = np.random.default_rng(20)
    end = small_model.index(b"output_norm.weight") + 64
    n_errors = 0
    for _ in range(60):
        data = bytearray(small_model)
        mutate(data, rng, end)
        path.write_bytes(data)
        try:
            open_bounded(path)
        except GGUFError:
            n_errors += 1
    assert n_errors >= 20
