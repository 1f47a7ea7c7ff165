"""From sources to programs: includes, the cache on disk, errors."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from noria.api.errors import KernelBuildError
from noria_sycl import programs
from noria_sycl.runtime import BuildError


class FakeRuntime:
    """Builds nothing, and tells what it was asked to."""

    def __init__(self) -> None:
        self.limits = SimpleNamespace(language=(3, 0))
        self.built: list[tuple[str, tuple[str, ...], bytes | None]] = []
        self.refuses = False

    def build(self, source: str, options: Sequence[str], binary: bytes | None = None) -> tuple[Any, bytes | None]:
        self.built.append((source, tuple(options), binary))
        if "#error" in source or (self.refuses and binary is not None):
            raise BuildError("line 1")
        return object(), b"binary"

    def kernel(self, program: Any, name: str) -> Any:
        return SimpleNamespace(program=program, name=name)


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of sources and an empty cache."""
    monkeypatch.setattr(programs, "SOURCES", tmp_path)
    monkeypatch.setattr(programs, "user_cache_path", lambda name: tmp_path / "cache")
    programs.source.cache_clear()
    (tmp_path / "a.h").write_text("A\n", encoding="utf-8")
    (tmp_path / "b.h").write_text('#include "a.h"\nB\n', encoding="utf-8")
    (tmp_path / "k.cl").write_text('#include "a.h"\n#include "b.h"\nK\n', encoding="utf-8")
    (tmp_path / "bad.cl").write_text("#error\n", encoding="utf-8")
    yield tmp_path
    programs.source.cache_clear()


def test_includes_are_part_of_the_text_once(sources: Path) -> None:
    assert programs.source("k").split() == ["A", "B", "K"]


def test_a_program_is_built_once_and_kept(sources: Path) -> None:
    runtime = FakeRuntime()
    one = programs.Programs("sycl0", "device, driver", runtime)
    first = one.kernel("k", "f", ("-DX=1",))
    assert one.kernel("k", "f", ("-DX=1",)) is first
    assert one.kernel("k", "g", ("-DX=1",)).program is first.program
    assert [binary for *_, binary in runtime.built] == [None]
    assert runtime.built[0][1] == ("-cl-std=CL3.0", "-DX=1")

    again = programs.Programs("sycl0", "device, driver", runtime)  # as another process
    again.kernel("k", "f", ("-DX=1",))
    assert runtime.built[-1][2] == b"binary"


@pytest.mark.parametrize("change", ["driver", "options", "header"])
def test_what_makes_a_binary_useless(sources: Path, change: str) -> None:
    runtime = FakeRuntime()
    programs.Programs("sycl0", "device, driver 1", runtime).kernel("k", "f")
    if change == "header":
        (sources / "a.h").write_text("A2\n", encoding="utf-8")
        programs.source.cache_clear()
    driver = "device, driver 2" if change == "driver" else "device, driver 1"
    programs.Programs("sycl0", driver, runtime).kernel("k", "f", ("-DX",) if change == "options" else ())
    assert [binary for *_, binary in runtime.built] == [None, None]


def test_a_binary_that_the_driver_refuses_is_built_anew(sources: Path) -> None:
    runtime = FakeRuntime()
    programs.Programs("sycl0", "driver", runtime).kernel("k", "f")
    runtime.refuses = True
    programs.Programs("sycl0", "driver", runtime).kernel("k", "f")
    assert [binary for *_, binary in runtime.built] == [None, b"binary", None]


def test_a_cache_that_cannot_be_written_is_a_warning(sources: Path, caplog: pytest.LogCaptureFixture) -> None:
    (sources / "cache").write_text("a file where the folder should be", encoding="utf-8")
    programs.Programs("sycl0", "driver", FakeRuntime()).kernel("k", "f")
    assert "every start builds them" in caplog.text


def test_what_does_not_compile_is_an_error_with_the_log(sources: Path) -> None:
    with pytest.raises(KernelBuildError, match=r"bad.*-DX=1.*\n.*line 1"):
        programs.Programs("sycl0", "driver", FakeRuntime()).kernel("bad", "f", ("-DX=1",))
    assert not programs.Programs("sycl0", "driver", FakeRuntime()).compiles("#error")
