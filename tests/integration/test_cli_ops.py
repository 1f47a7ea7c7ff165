"""`noria ops`: every op and type, as the devices answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from noria.api import Op, OpQuery, Support
from noria.builtin.sim.kernels import SimKernels
from noria.gguf import SUPPORTED_TYPES

Noria = Callable[..., Any]
Answers = dict[tuple[str, str], str]


@pytest.fixture
def sim(noria: Noria, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[OpQuery], Support]], Answers]:
    """The answers shown for a device whose kernels answer as given."""

    def ask(supports: Callable[[OpQuery], Support]) -> Answers:
        monkeypatch.setattr(SimKernels, "supports", lambda self, query: supports(query))
        ops = noria("ops", "--backend", "sim", "-o", "json").json()["ops"]
        return {(entry["op"], entry["type"]): entry["support"]["sim0"] for entry in ops}

    return ask


def test_every_op_is_asked_with_every_type(sim: Any) -> None:
    answers = sim(lambda query: Support.NATIVE)
    assert {op for op, _ in answers} == {str(op) for op in Op}
    for op in (Op.GET_ROWS, Op.MATMUL, Op.MUL_MAT_ID, Op.EXPERT_FFN):
        assert [type for name, type in answers if name == op] == list(SUPPORTED_TYPES)
    assert [type for name, type in answers if name == Op.ATTENTION] == ["F32", "F16", "Q8_0", "Q4_0"]
    assert set(answers.values()) == {"native"}


def test_the_answers_are_the_kernels_own(sim: Any) -> None:
    asked: set[OpQuery] = set()

    def supports(query: OpQuery) -> Support:
        asked.add(query)
        if query.op is Op.ATTENTION and query.type == "Q4_0":
            return Support.IMPOSSIBLE
        if query.op is Op.MATMUL and query.type == "IQ2_S" and query.n_rows > 1:
            return Support.MISSING  # a kernel for one row is not enough
        return Support.CONVERTED if query.type == "Q6_K" else Support.NATIVE

    answers = sim(supports)
    assert answers["attention", "Q4_0"] == "impossible"
    assert answers["matmul", "IQ2_S"] == "missing"
    assert answers["matmul", "Q6_K"] == "converted"
    assert answers["matmul", "Q4_K"] == "native"
    assert {q.activation for q in asked if q.op in (Op.MATMUL, Op.MUL_MAT_ID, Op.GLU)} == {"F16"}  # as this device has
    assert {q.type2 for q in asked if q.op is Op.ATTENTION} == {"F32", "F16", "Q8_0", "Q4_0"}


def test_a_fused_op_that_is_missing_runs_as_its_parts(sim: Any) -> None:
    def supports(query: OpQuery) -> Support:
        missing = query.op is Op.EXPERT_FFN or (query.op is Op.MUL_MAT_ID and query.type == "IQ2_S")
        return Support.MISSING if missing else Support.NATIVE

    answers = sim(supports)
    assert answers["expert_ffn", "Q4_K"] == "parts"
    assert answers["expert_ffn", "IQ2_S"] == "missing"


def test_the_reference_has_everything(noria: Noria) -> None:
    ops = noria("ops", "-o", "json").json()["ops"]
    assert {entry["support"]["reference0"] for entry in ops} <= {"native", "converted", "parts"}
    assert all(set(entry["support"]) == {"reference0"} for entry in ops)  # a simulated device answers for nobody


def test_the_table(noria: Noria) -> None:
    lines = noria("ops", "--backend", "reference,sim1").out.splitlines()
    head = [cell.strip() for cell in lines[0].strip("|").split("|")]
    assert head == ["op", "type", "reference0", "sim1"]
    assert len(lines) == 2 + len(noria("ops", "-o", "json").json()["ops"])


def test_a_backend_that_cannot_be_used(noria: Noria, tmp_path: Any) -> None:
    (tmp_path / "plugins.toml").write_text("[backends.reference]\nenabled = false\n")
    result = noria("ops")
    assert result.code == 0
    assert "reference is not shown: backends.reference.enabled is false in plugins.toml" in result.out
    assert noria("ops", "-o", "json").json()["unusable"].keys() == {"reference"}
    assert noria("ops", "--backend", "reference").code == 1
    assert "there are: reference, sim" in noria("ops", "--backend", "metal").err
