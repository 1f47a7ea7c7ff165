"""`noria plan`: exact sums, quick on a file of any size, and a remedy when it does not fit."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from noria.gguf.synth import synthesize
from noria.runtime import Session

Noria = Callable[..., Any]
GIB = 2**30
FIXED = ("-b", 4096, "-ub", 2048, "--prefetch-slots", 2)  # so that -ncmoe alone decides whether it fits


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Qwen3-30B-A3B, 17 GiB of holes."""
    path = tmp_path / "model.gguf"
    synthesize("qwen3-30b-a3b", path, sparse=True)
    return path


def test_a_large_model_is_planned_without_reading_it(noria: Noria, model: Path) -> None:
    begin = time.perf_counter()
    flags = ("-m", model, "--backend", "sim", *FIXED)
    result = noria("plan", *flags, "-o", "json")
    assert result.code == 0, result.err
    assert time.perf_counter() - begin < 5
    plan = result.json()
    assert plan["model"]["type"] == "qwen3moe 30.5B.A3.4B Q4_K_M"
    (stage,) = plan["stages"]
    assert sum(buffer["nbytes"] for buffer in stage["buffers"]) == stage["nbytes"] <= stage["usable_nbytes"] < 12 * GIB
    assert noria("plan", *flags, "-ncmoe", plan["choice"]["n_cpu_moe"] - 1).code == 1


def test_what_crosses_the_bus(noria: Noria, model: Path) -> None:
    flags = ("-m", model, "--backend", "sim", "-o", "json")
    every, half = (noria("plan", *flags, "-ncmoe", n).json() for n in (48, 24))
    assert every["bus"]["batch_nbytes"] == every["host_nbytes"] > 16 * GIB
    assert every["bus"]["token_nbytes"] == every["host_nbytes"] * 8 // 128
    assert len(half["stages"][0]["units"]) == half["bus"]["n_layer"] == 24
    assert half["bus"]["batch_nbytes"] < 0.55 * every["bus"]["batch_nbytes"]


def test_units_fill_the_slots(noria: Noria, model: Path) -> None:
    plan = noria("plan", "-m", model, "--backend", "sim", "-cmoe", "--prefetch-slots", 3, "-o", "json").json()
    (stage,) = plan["stages"]
    (ring,) = (buffer for buffer in stage["buffers"] if buffer["label"] == "ring, 3 slots")
    assert 3 * stage["slot_nbytes"] <= ring["nbytes"] < 3 * stage["slot_nbytes"] + 10_000
    slab_nbytes = plan["host_nbytes"] / (48 * 128)
    for units in stage["units"].values():
        assert sum(units) == 128
        assert max(units) * slab_nbytes < 1.2 * stage["slot_nbytes"]


def test_the_plan_as_a_table(noria: Noria, model: Path) -> None:
    lines = noria("plan", "-m", model, "--backend", "sim", "-ncmoe", 30).out.splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert rows[0] == ["device", "buffer", "MiB"]
    assert rows[2][0] == "sim0, layers 0-47 and output"
    mib = {label: float(number) for _, label, number in rows[2:-1]}
    parts = [number for label, number in mib.items() if label not in ("sum", "usable")]
    assert sum(parts) == pytest.approx(mib["sum"], abs=0.5)
    assert rows[-1][:2] == ["host RAM", "experts"]
    text = "\n".join(lines)
    assert "-ncmoe 30" in text
    assert "ring of sim0: 4 slots of" in text
    assert "all experts of 30 layers, once" in text


def test_layers_on_the_host(noria: Noria) -> None:
    plan = noria("plan", "--backend", "sim", "-ngl", 3, "-o", "json").json()
    host, device = plan["stages"]
    assert (host["device"], host["n_layer"], host["embed"], host["output"]) == ("reference0", 2, True, False)
    assert (device["device"], device["first_layer"], device["output"]) == ("sim0", 2, True)


def test_what_is_given_up_is_said(noria: Noria, model: Path) -> None:
    result = noria("plan", "-m", model, "--backend", "sim", "--memory", 1900)
    assert result.code == 0, result.err
    assert "note: " in result.out
    assert "lowered to" in result.out or "slots instead of" in result.out


def test_a_plan_that_does_not_fit(noria: Noria, model: Path) -> None:
    flags = ("-m", model, "--backend", "sim", *FIXED, "-ncmoe")
    result = noria("plan", *flags, 0, "-o", "json")
    assert (result.code, result.out) == (1, "")
    assert "MiB over. The smallest single change that fits: -ncmoe " in result.err
    remedy = int(result.err.split("-ncmoe ")[-1].split(".")[0])
    assert noria("plan", *flags, remedy).code == 0
    assert noria("plan", *flags, remedy - 1).code == 1


def test_nothing_is_loaded(noria: Noria, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "__init__", lambda *args, **kwargs: pytest.fail("loaded"))
    assert noria("plan", "--backend", "sim").code == 0


def test_a_missing_model(noria: Noria) -> None:
    result = noria("plan", "-m", "nope.gguf")
    assert (result.code, result.err) == (1, "noria: error: nope.gguf: no such file.\n")
