"""Split models: opened by any shard, whatever the files are called, and every damaged set is named."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from struct import pack

import gguf
import numpy as np
import pytest

from noria.api.errors import GGUFError, ModelError
from noria.gguf import ModelFile, open_model
from noria.gguf.synth import synthesize

N_SHARDS = 3


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in one file, and the same one in three."""
    folder = tmp_path_factory.mktemp("split")
    synthesize("tiny", folder / "whole.gguf", n_layer=2)
    synthesize("tiny", folder / "m.gguf", n_layer=2, n_shards=N_SHARDS)
    return folder


@pytest.fixture
def shards(made: Path, tmp_path: Path) -> list[Path]:
    return [Path(shutil.copy(path, tmp_path)) for path in sorted(made.glob("m-*.gguf"))]


def content(model: ModelFile) -> dict[str, bytes]:
    return {name: model.data(name).tobytes() for name in model.tensors}


def assert_is_the_model(path: Path, made: Path) -> None:
    with open_model(path) as model, open_model(made / "whole.gguf") as whole:
        assert list(model.tensors) == list(whole.tensors)
        assert content(model) == content(whole)
        assert {key: model.metadata[key] for key in whole.metadata} == dict(whole.metadata)
        for name, tensor in model.tensors.items():
            out = np.zeros(tensor.nbytes, np.uint8)
            model.read_into(name, out)
            assert np.array_equal(out, model.data(name))


def patch(path: Path, key: str, form: str, value: int) -> None:
    """Give a metadata entry of a shard another value of the same type."""
    data = bytearray(path.read_bytes())
    at = data.index(key.encode()) + len(key) + 4
    data[at : at + len(pack(form, value))] = pack(form, value)
    path.write_bytes(data)


# --- sound models -----------------------------------------------------------------------------------------------------


def test_the_names_are_the_usual_ones(shards: list[Path]) -> None:
    assert [path.name for path in shards] == [f"m-{no:05}-of-00003.gguf" for no in (1, 2, 3)]


def test_shards_are_of_about_the_same_size(shards: list[Path]) -> None:
    with open_model(shards[0]) as model:
        largest = max(tensor.nbytes for tensor in model.tensors.values())
        assert all(abs(len(data) - model.nbytes / N_SHARDS) <= largest for data in model.mappings)


@pytest.mark.parametrize("no", range(N_SHARDS))
def test_opens_from_any_shard(made: Path, shards: list[Path], no: int) -> None:
    assert_is_the_model(shards[no], made)
    with open_model(shards[no]) as model:
        assert model.path == str(shards[no])
        assert model.paths == tuple(map(str, shards))
        assert model.nbytes == sum(path.stat().st_size for path in shards)


def test_opens_with_a_relative_path(made: Path, shards: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(shards[0].parent)
    assert_is_the_model(Path(shards[1].name), made)
    shards[2].rename(shards[2].with_name("other.gguf"))
    assert_is_the_model(Path(shards[1].name), made)


def test_opens_what_another_writer_split(tmp_path: Path) -> None:
    """The gguf package writes shards as llama.cpp's converter does."""
    writer = gguf.GGUFWriter(tmp_path / "w.gguf", "qwen3moe", split_max_tensors=2)
    writer.add_name("split")
    tensors = {f"t{i}.weight": np.full(32, i, np.float32) for i in range(5)}
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with open_model(tmp_path / "w-00002-of-00003.gguf") as model:
        assert model.metadata.get_str("general.name") == "split"
        assert {name: model.data(name).view(np.float32).tolist() for name in model.tensors} == {
            name: values.tolist() for name, values in tensors.items()
        }


def test_a_closed_model_leaves_no_file_mapped(shards: list[Path]) -> None:
    with open_model(shards[1]):
        pass
    maps = Path("/proc/self/maps").read_text()
    assert not any(str(path) in maps for path in shards)


def test_renamed_shards_are_found_by_their_metadata(made: Path, shards: list[Path]) -> None:
    folder = shards[0].parent
    names = [folder / name for name in ("z.gguf", "a.gguf", "m-00003-of-00003.gguf")]
    for path, name in zip(shards, names, strict=True):
        path.rename(name)
    shutil.copy(made / "whole.gguf", folder)  # not a shard
    (folder / "cut.gguf").write_bytes((made / "whole.gguf").read_bytes()[:1000])  # nobody asked for it
    (folder / "folder.gguf").mkdir()
    (folder / "again.gguf").symlink_to(names[2])  # the same file under another name
    for name in names:
        assert_is_the_model(name, made)


def test_names_that_contradict_the_metadata_do_not_matter(made: Path, shards: list[Path]) -> None:
    """Two shards that were swapped are still one of each."""
    spare = shards[0].with_name("spare")
    shards[0].rename(spare)
    shards[2].rename(shards[0])
    spare.rename(shards[2])
    assert_is_the_model(shards[0], made)


def joined(paths: list[Path], to: Path) -> Path:
    to.write_bytes(b"".join(path.read_bytes() for path in paths))
    for path in paths:
        path.unlink()
    return to


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_shards_joined_by_cat_are_one_model(made: Path, shards: list[Path], order: tuple[int, ...]) -> None:
    path = joined([shards[no] for no in order], shards[0].with_name("joined.gguf"))
    assert_is_the_model(path, made)


def test_some_shards_joined_and_others_apart(made: Path, shards: list[Path]) -> None:
    path = joined(shards[1:], shards[0].with_name("rest.gguf"))
    assert_is_the_model(path, made)
    assert_is_the_model(shards[0], made)


def test_joined_shards_that_end_without_padding(made: Path, shards: list[Path]) -> None:
    with open_model(shards[0]) as model:
        ends = [max(t.offset + t.nbytes for t in model.tensors.values() if t.shard == no) for no in range(N_SHARDS)]
    for path, end in zip(shards, ends, strict=True):
        path.write_bytes(path.read_bytes()[:end])
    assert_is_the_model(joined(shards, shards[0].with_name("joined.gguf")), made)


# --- what is wrong is named -------------------------------------------------------------------------------------------


def cut(shards: list[Path], other: Path) -> None:
    os.truncate(shards[2], shards[2].stat().st_size // 2)


def empty(shards: list[Path], other: Path) -> None:
    os.truncate(shards[2], 0)


def damaged(shards: list[Path], other: Path) -> None:
    shards[2].write_bytes(b"\0" + shards[2].read_bytes()[1:])


def wrong_no(shards: list[Path], other: Path) -> None:
    patch(shards[2], "split.no", "<H", 1)


def impossible_no(shards: list[Path], other: Path) -> None:
    patch(shards[2], "split.no", "<H", 3)


def wrong_count(shards: list[Path], other: Path) -> None:
    patch(shards[2], "split.count", "<H", 4)


def no_count(shards: list[Path], other: Path) -> None:
    patch(shards[2], "split.count", "<H", 0)


def wrong_tensors_count(shards: list[Path], other: Path) -> None:
    patch(shards[2], "split.tensors.count", "<i", 1000)


def of_another_model(shards: list[Path], other: Path) -> None:
    shutil.copy(other / "other-00003-of-00003.gguf", shards[2])


def copy_of_another_shard(shards: list[Path], other: Path) -> None:
    shutil.copy(shards[0], shards[2])


CORRUPTIONS: list[tuple[Callable[[list[Path], Path], None], str]] = [
    (cut, "the file ends at"),
    (empty, "the file is empty"),
    (damaged, "not a GGUF file"),
    (wrong_no, r"split\.no: is 1, as in .*00002.*By its name it should be 2\. Fetch it again"),
    (impossible_no, r"split\.no: is 3, but shards of 3 are numbered from 0 to 2"),
    (wrong_count, r"split\.count: is 4, but .*3"),
    (no_count, r"split\.count: is 0, but"),
    (wrong_tensors_count, r"split\.tensors\.count: is 1000, but \d+ in"),
    (of_another_model, r"split\.tensors\.count: is \d+, but \d+ in .*shard of another model: fetch it again"),
    (copy_of_another_shard, r"split\.no: is 0, as in .*00001.*By its name it should be 2"),
]


@pytest.mark.parametrize("opened", range(N_SHARDS))
@pytest.mark.parametrize(("corrupt", "text"), CORRUPTIONS, ids=[corrupt.__name__ for corrupt, _ in CORRUPTIONS])
def test_a_bad_shard_is_named(
    shards: list[Path], tmp_path_factory: pytest.TempPathFactory, corrupt: Callable[..., None], text: str, opened: int
) -> None:
    other = tmp_path_factory.mktemp("other")
    synthesize("tiny", other / "other.gguf", n_layer=3, n_shards=N_SHARDS)
    corrupt(shards, other)
    with pytest.raises(GGUFError, match=text) as caught:
        open_model(shards[opened])
    assert caught.value.path == str(shards[2])


@pytest.mark.parametrize("gone", range(N_SHARDS))
def test_a_missing_shard_is_named(shards: list[Path], gone: int) -> None:
    shards[gone].unlink()
    opened = shards[gone - 1]
    with pytest.raises(GGUFError) as caught:
        open_model(opened)
    assert f"shard {gone + 1} is not in {opened.parent}" in str(caught.value)
    assert f"fetch {shards[gone].name}" in str(caught.value)


def test_a_shard_all_alone(shards: list[Path], tmp_path: Path) -> None:
    alone = tmp_path / "alone" / "alone.gguf"
    alone.parent.mkdir()
    shards[1].rename(alone)
    with pytest.raises(
        GGUFError, match=r"shard 1, 3 is not in .*: fetch NAME-00001-of-00003\.gguf, NAME-00003-of-00003"
    ):
        open_model(alone)


def test_shards_that_several_models_could_own_are_not_guessed(made: Path, shards: list[Path]) -> None:
    folder = shards[0].parent
    shards[2].rename(folder / "a.gguf")
    shutil.copy(folder / "a.gguf", folder / "b.gguf")
    with pytest.raises(GGUFError, match=r"b\.gguf: split\.no: is 2, as in .*a\.gguf: each could be shard 3 of"):
        open_model(shards[0])


def test_shards_of_two_models_with_the_same_counts(
    shards: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Nothing says that a shard is foreign but the tensors in it: two writers cut the same model at other places."""
    other = tmp_path_factory.mktemp("other")
    synthesize("tiny", other / "m.gguf", n_layer=2, quant="MXFP4_MOE", n_shards=N_SHARDS)
    cuts = []
    for path in (shards[1], other / shards[1].name):
        with open_model(path) as model:
            cuts.append([sum(t.shard == no for t in model.tensors.values()) for no in range(N_SHARDS)])
    assert cuts[0] != cuts[1], "the test needs models that are cut at other places"
    shutil.copy(other / shards[1].name, shards[1])
    with pytest.raises(GGUFError, match=r"also in|hold \d+ tensors together \(m-00001-of-00003\.gguf: \d+, ") as caught:
        open_model(shards[0])
    assert "of another model" in str(caught.value)


def test_a_whole_file_named_as_a_shard(made: Path, tmp_path: Path) -> None:
    path = tmp_path / "m-00002-of-00003.gguf"
    shutil.copy(made / "whole.gguf", path)
    with pytest.raises(GGUFError, match=r"split\.count: is missing, but by its name the file is shard 2 of 3"):
        open_model(path)
    assert open_model(Path(shutil.copy(path, tmp_path / "m-00001-of-00001.gguf"))).metadata


def test_a_piece_of_a_file_that_was_cut_by_size(made: Path, tmp_path: Path) -> None:
    data = (made / "whole.gguf").read_bytes()
    for name in ("m.gguf-split-a", "m.gguf.part1of2", "m.gguf.aa"):
        (tmp_path / name).write_bytes(data[: len(data) // 2])
        with pytest.raises(ModelError, match="a piece of a file: join all of them in order, with cat"):
            open_model(tmp_path / name)
