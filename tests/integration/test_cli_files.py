"""Files of the command line: outputs are checked first and whole or absent after; inputs fail in our own words."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from noria.api.errors import ConfigError, NoriaError
from noria.cli.files import check_outputs, load_array, written
from noria.runtime import Session

Noria = Callable[..., Any]
LOGITS = ("logits", "--tokens", "1,2")


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "__init__", lambda *args, **kwargs: pytest.fail("loaded"))


# --- outputs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (("-o", "absent/o.npz"), "cannot write absent/o.npz: No such file or directory."),
        (("-o", "."), "cannot write .: it is a folder."),
        (("-o", "/dev/null"), "cannot write /dev/null: it is no ordinary file."),
        (("-o", "o.npz", "--routing-out", "absent/r.npz"), "cannot write absent/r.npz"),
        (("-o", "o.npz", "--timeline", "absent/t.json"), "cannot write absent/t.json"),
        (("-o", "o.npz", "--routing-out", "./o.npz"), "two outputs have the name o.npz."),
    ],
)
@pytest.mark.usefixtures("nothing_runs")
def test_outputs_are_checked_before_anything_runs(
    noria: Noria, tmp_path: Path, flags: tuple[str, ...], error: str
) -> None:
    result = noria(*LOGITS, *flags)
    assert result.code == 2
    assert error in result.err
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("nothing_runs")
def test_a_timeline_that_cannot_be_written(noria: Noria) -> None:
    for words in (("run", "-p", "x"), ("bench", "--backend", "sim")):
        result = noria(*words, "--timeline", "absent/t.json")
        assert (result.code, result.out) == (2, "")
        assert "cannot write absent/t.json" in result.err


def test_the_file_has_the_name_that_was_given(noria: Noria, tmp_path: Path) -> None:
    assert noria(*LOGITS, "-o", "out.txt", "--routing-out", "routing").code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.txt", "routing"]
    with np.load(tmp_path / "out.txt") as archive:
        assert archive["logits"].shape[0] == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt, ConfigError("no")])
def test_a_failed_run_leaves_files_as_they_were(
    noria: Noria, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Any
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(Session, "forward", fail)
    (tmp_path / "old.npz").write_text("precious")
    for name in ("old.npz", "new.npz"):
        assert noria(*LOGITS, "-o", name).code in (2, 130)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("old.npz", "precious")]


def fail_to_write(path: Path, error: BaseException) -> None:
    with written(path) as file:
        file.write(b"half of it")
        raise error


def test_a_failed_write_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "old"
    path.write_text("precious")
    for error, seen in ((OSError(28, "it is full"), NoriaError), (KeyboardInterrupt(), KeyboardInterrupt)):
        with pytest.raises(seen, match=r"cannot write .*old: it is full\." if seen is NoriaError else None):
            fail_to_write(path, error)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("old", "precious")]
    with written(path) as file:
        file.write(b"new")
    assert path.read_text() == "new"


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("target")
    check_outputs(tmp_path / "link")
    with written(tmp_path / "link") as file:
        file.write(b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_bytes() == b"new"


def test_a_model_is_not_written_over_a_folder(noria: Noria, tmp_path: Path) -> None:
    for flags in ((), ("--force",)):
        result = noria("synth", "tiny", tmp_path, *flags)
        assert (result.code, result.err) == (2, f"noria: error: {tmp_path} is a folder; name a file in it.\n")


# --- inputs -----------------------------------------------------------------------------------------------------------


def test_arrays(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", [1, 2])
    np.savez(tmp_path / "a.npz", ids=[3])
    assert load_array("--x", tmp_path / "a.npy", "ids").tolist() == [1, 2]
    assert load_array("--x", tmp_path / "a.npz", "ids").tolist() == [3]
    with pytest.raises(ConfigError, match=r"there is no array 'tokens' in it; there are: ids\."):
        load_array("--x", tmp_path / "a.npz", "tokens")
    np.savez(tmp_path / "objects.npz", ids=np.array([{}]))
    (tmp_path / "text").write_text("1 2 3")
    (tmp_path / "pickle").write_bytes(pickle.dumps([1]))
    (tmp_path / "empty").touch()
    (tmp_path / "cut.npz").write_bytes((tmp_path / "a.npz").read_bytes()[:100])
    for name in ("objects.npz", "text", "pickle", "empty", "cut.npz"):
        with pytest.raises(ConfigError, match=f"--x .*{name}: not a NumPy file with numbers, or a damaged one"):
            load_array("--x", tmp_path / name, "ids")
    with pytest.raises(ConfigError, match=r"--x .*absent: No such file or directory\."):
        load_array("--x", tmp_path / "absent", "ids")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "--tokens '' is empty; give ids like 1,2,3"),
        ("1.5", "--tokens 1.5: neither ids like 1,2,3 nor a file that holds them."),
        ("1,,2", "--tokens 1,,2: neither ids like 1,2,3 nor a file that holds them."),
        ("9" * 20, "neither ids like 1,2,3 nor a file"),
        ("9" * 12, "an id is negative or too large"),
        ("3,-1", "an id is negative or too large"),
        ("absent.npz", "--tokens absent.npz: No such file or directory."),
    ],
)
@pytest.mark.usefixtures("nothing_runs")
def test_wrong_tokens(noria: Noria, text: str, error: str) -> None:
    result = noria("logits", f"--tokens={text}", "-o", "o.npz")
    assert result.code == 2
    assert error in result.err


def test_a_long_list_of_tokens_is_no_file_name(noria: Noria, tmp_path: Path) -> None:
    assert noria("logits", "--tokens", ",".join("1" for _ in range(300)), "-o", "o.npz").code == 0
    with np.load(tmp_path / "o.npz") as archive:
        assert archive["logits"].shape[0] == 300
