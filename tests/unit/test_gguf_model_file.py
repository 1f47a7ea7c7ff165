"""Opening, typed metadata, tensor data and expert slabs."""

from __future__ import annotations

import os
from pathlib import Path

import gguf
import numpy as np
import pytest

from noria.api.errors import GGUFError, ModelError
from noria.gguf import ModelFile, open_model

EXPERTS = np.random.default_rng(1).integers(0, 256, (3, 4, 2 * 34), np.uint8)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_expert_count(3)
    writer.add_rope_freq_base(1e6)
    writer.add_bool("qwen3moe.expert_weights_norm", True)
    writer.add_name("a model")
    writer.add_token_list(["a", "b", "c"])
    writer.add_token_types([1, 2, 3])
    writer.add_tensor("norm.weight", np.arange(64, dtype=np.float32))
    writer.add_tensor("up_exps.weight", EXPERTS, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def model(path: Path) -> ModelFile:
    return open_model(path)


def test_typed_metadata(model: ModelFile) -> None:
    metadata = model.metadata
    assert model.architecture == metadata.architecture == "qwen3moe"
    assert metadata.arch_int("expert_count") == 3
    assert metadata.get_int("qwen3moe.expert_count") == 3
    assert metadata.arch_float("rope.freq_base") == 1e6
    assert metadata.arch_float("expert_count") == 3.0
    assert metadata.arch_bool("expert_weights_norm") is True
    assert metadata.get_str("general.name") == "a model"
    assert metadata.get_numbers("tokenizer.ggml.token_type").tolist() == [1, 2, 3]
    assert metadata.arch_int("absent", 5) == 5
    assert metadata.arch_bool("absent", False) is False
    assert metadata.arch_str("absent", "") == ""


@pytest.mark.parametrize(
    ("getter", "name", "text"),
    [
        ("arch_int", "absent", "qwen3moe.absent: is missing"),
        ("arch_int", "rope.freq_base", "should be an integer, but is 1000000.0"),
        ("arch_int", "expert_weights_norm", "should be an integer, but is True"),
        ("arch_float", "expert_weights_norm", "should be a number, but is True"),
        ("arch_bool", "expert_count", "should be a bool, but is 3"),
        ("get_str", "tokenizer.ggml.tokens", "should be a string, but is an array of 3 strings"),
        ("get_strings", "tokenizer.ggml.token_type", "should be an array of strings, but is an array of 3 numbers"),
        ("get_numbers", "general.name", "should be an array of numbers, but is 'a model'"),
    ],
)
def test_metadata_of_another_type(model: ModelFile, path: Path, getter: str, name: str, text: str) -> None:
    with pytest.raises(GGUFError) as caught:
        getattr(model.metadata, getter)(name)
    assert text in str(caught.value)
    assert str(caught.value).startswith(f"{path}: ")


def test_string_array_is_a_sequence(model: ModelFile) -> None:
    tokens = model.metadata.get_strings("tokenizer.ggml.tokens")
    assert (len(tokens), tokens[0], tokens[-1], tokens[1:], list(tokens)) == (3, "a", "c", ["b", "c"], ["a", "b", "c"])
    with pytest.raises(IndexError):
        tokens[3]


def test_string_array_with_bad_utf8_fails_where_it_is_read(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"\x01\0\0\0\0\0\0\0b", b"\x01\0\0\0\0\0\0\0\xff"))
    tokens = open_model(path).metadata.get_strings("tokenizer.ggml.tokens")
    assert tokens[0] == "a"
    with pytest.raises(GGUFError, match=r"tokenizer\.ggml\.tokens\[1\]: is not UTF-8"):
        list(tokens)


def test_span_covers_the_entry(model: ModelFile) -> None:
    start, end = model.metadata.span("general.name")
    assert (
        model.mappings[0][start:end].tobytes() == b"\x0c\0\0\0\0\0\0\0general.name\x08\0\0\0\x07\0\0\0\0\0\0\0a model"
    )


def test_data_is_a_read_only_view(model: ModelFile) -> None:
    data = model.data("norm.weight")
    assert data.view(np.float32).tolist() == list(range(64))
    assert np.shares_memory(data, model.mappings[0])
    assert not data.flags.writeable
    assert model.mappings[0].ctypes.data % os.sysconf("SC_PAGE_SIZE") == 0
    assert model.nbytes == len(model.mappings[0]) == os.path.getsize(model.path)


def test_expert_slabs(model: ModelFile) -> None:
    tensor = model.tensor("up_exps.weight")
    assert (tensor.type, tensor.shape) == ("Q8_0", (3, 4, 64))
    assert (tensor.row_nbytes, tensor.slab_nbytes) == (68, 4 * 68)
    for expert in range(3):
        offset, nbytes = model.expert_slab("up_exps.weight", expert)
        assert np.array_equal(model.mappings[tensor.shard][offset : offset + nbytes], EXPERTS[expert].ravel())
    for name, expert in [("up_exps.weight", 3), ("up_exps.weight", -1), ("norm.weight", 0)]:
        with pytest.raises(IndexError, match=r"no expert"):
            model.expert_slab(name, expert)


def test_missing_tensor(model: ModelFile) -> None:
    with pytest.raises(GGUFError, match=r"tensor 'output\.weight': is missing"):
        model.data("output.weight")


def test_close(path: Path) -> None:
    with open_model(path) as model:
        view = model.data("norm.weight")
    assert view.view(np.float32)[63] == 63  # a view outlives the model
    assert model.metadata.arch_int("expert_count") == 3
    assert model.metadata.get_strings("tokenizer.ggml.tokens")[2] == "c"
    with pytest.raises(ModelError, match="is closed"):
        model.data("norm.weight")
    del view
    with open_model(path) as model:
        pass
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_paths_that_cannot_be_read(tmp_path: Path, path: Path) -> None:
    with pytest.raises(ModelError, match="no such file"):
        open_model(tmp_path / "absent.gguf")
    with pytest.raises(ModelError, match="is not a file"):
        open_model(tmp_path)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ModelError, match="is not a file"):
        open_model(tmp_path / "fifo")
    with pytest.raises(ModelError, match="cannot be read"):
        open_model(path / "below")
    with pytest.raises(ModelError, match="cannot be read"):
        open_model("nul\0byte")
    if os.geteuid():
        path.chmod(0)
        with pytest.raises(ModelError, match=r"cannot be read: .*denied"):
            open_model(path)


def test_read_into_gives_the_bytes_of_the_mapping(path: Path) -> None:
    with open_model(path) as model:
        for name, tensor in model.tensors.items():
            out = np.zeros(tensor.nbytes, np.uint8)
            model.read_into(name, out)
            assert np.array_equal(out, model.data(name))


def test_a_file_cut_after_opening_is_an_error(path: Path) -> None:
    with open_model(path) as model:
        name, tensor = max(model.tensors.items(), key=lambda item: item[1].offset)
        os.truncate(path, tensor.offset + 1)
        with pytest.raises(ModelError, match="become shorter"):
            model.read_into(name, np.zeros(tensor.nbytes, np.uint8))
