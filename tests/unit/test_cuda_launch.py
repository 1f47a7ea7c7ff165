"""Which kernels may be launched before the one before them is done."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("cupy")

from noria.api import Queue
from noria_cuda.launch import Launcher, Limits

GRID = (1, 1, 1)


class NotedKernel:
    """A kernel that notes whether it may begin early."""

    def __init__(self, noted: list[bool], *, awaits: bool) -> None:
        self.noted = noted
        self.awaits = awaits

    def launch(self, *args: Any, early: bool) -> None:
        self.noted.append(early)


@pytest.fixture
def noted() -> list[bool]:
    return []


def launcher(noted: list[bool], monkeypatch: pytest.MonkeyPatch, *, dependent_launch: bool = True) -> Launcher:
    """One whose kernels await the one before them, but for `pack_experts`."""
    limits = Limits(sm=90, n_sm=132, shared_nbytes=232448, dependent_launch=dependent_launch)
    launch = Launcher("cuda0", limits)
    monkeypatch.setattr(launch, "_load", lambda file, name, defines: NotedKernel(noted, awaits=name != "pack_experts"))
    return launch


def queue(*, recording: bool) -> Any:
    return SimpleNamespace(stream_ptr=1, recording=recording, ends_in_kernel=False)


def test_kernels_in_a_row(noted: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one begins after whatever was there; one that does not wait by itself is waited for by the device."""
    launch, recording = launcher(noted, monkeypatch), queue(recording=True)
    for file, name in (("rope", "rope"), ("rope", "rope"), ("pack", "pack_experts"), ("kv", "kv_store")):
        launch(cast(Queue, recording), file, name, GRID, 32, ())
    assert noted == [False, True, False, True]


def test_after_a_copy(noted: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    launch, recording = launcher(noted, monkeypatch), queue(recording=True)
    for _ in range(2):
        launch(cast(Queue, recording), "rope", "rope", GRID, 32, ())
        recording.ends_in_kernel = False  # as the queue sets it
    assert noted == [False, False]


@pytest.mark.parametrize(("recording", "dependent_launch"), [(False, True), (True, False)])
def test_outside_of_programs_and_where_it_is_off(
    recording: bool, dependent_launch: bool, noted: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = launcher(noted, monkeypatch, dependent_launch=dependent_launch)
    for _ in range(3):
        launch(cast(Queue, queue(recording=recording)), "rope", "rope", GRID, 32, ())
    same = queue(recording=recording)
    for _ in range(3):
        launch(cast(Queue, same), "rope", "rope", GRID, 32, ())
    assert noted == [False] * 6
