"""`noria logits` and `noria run`: the fixed formats, forced routing, and answers to bad input."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from noria.cli.main import main

F32_KV = ("-ctk", "f32", "-ctv", "f32")
TOKENS = "40,878,398,11,603,375"


def logits(tmp_path: Path, *flags: str, name: str = "out.npz") -> dict[str, np.ndarray]:
    out = tmp_path / name
    assert main(["logits", "--tokens", TOKENS, "-o", str(out), *F32_KV, *flags]) == 0
    with np.load(out) as archive:
        return dict(archive)


def test_format(tmp_path: Path) -> None:
    result = logits(tmp_path, "--greedy", "4")
    assert set(result) == {"logits", "greedy"}
    assert result["logits"].dtype == np.float32
    assert result["logits"].shape == (6, 4096)
    assert result["greedy"].dtype == np.int32
    assert result["greedy"].shape == (4,)
    assert result["greedy"][0] == result["logits"][-1].argmax()
    assert logits(tmp_path)["greedy"].shape == (0,)


@pytest.mark.parametrize("form", ["npz", "npy", "txt"])
def test_tokens_from_a_file(form: str, tmp_path: Path) -> None:
    ids = np.array([int(t) for t in TOKENS.split(",")], np.int32)
    path = tmp_path / f"tokens.{form}"
    if form == "npz":
        np.savez(path, tokens=ids)
    elif form == "npy":
        np.save(path, ids)
    else:
        path.write_text("\n".join(str(i) for i in ids))
    out = tmp_path / "out.npz"
    assert main(["logits", "--tokens", str(path), "-o", str(out), *F32_KV]) == 0
    assert np.array_equal(np.load(out)["logits"], logits(tmp_path, name="ids.npz")["logits"])


def test_written_routing_forced_again_gives_the_same_bits(tmp_path: Path) -> None:
    routing = tmp_path / "routing.npz"
    free = logits(tmp_path, "--greedy", "3", "--routing-out", str(routing))
    ids = np.load(routing)["ids"]
    assert ids.dtype == np.int32
    assert ids.shape == (4, 6 + 2, 4)  # the last greedy token is never computed
    for flags in ((), ("-cmoe", "--prefetch", "selective", "-ub", "3")):
        forced = logits(tmp_path, "--greedy", "3", "--routing", str(routing), *flags)
        assert np.array_equal(forced["logits"], free["logits"])
        assert np.array_equal(forced["greedy"], free["greedy"])


def test_forced_routing_decides_which_experts_compute(tmp_path: Path) -> None:
    routing = tmp_path / "routing.npz"
    free = logits(tmp_path, "--routing-out", str(routing))
    ids = np.load(routing)["ids"]
    np.savez(routing, ids=(ids + 1) % 16)
    written = tmp_path / "written.npz"
    forced = logits(tmp_path, "--routing", str(routing), "--routing-out", str(written))
    assert not np.allclose(forced["logits"], free["logits"])
    assert np.array_equal(np.load(written)["ids"], (ids + 1) % 16)


def test_run_is_greedy_at_temperature_0_and_reports_figures(capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for flags in ((), ("-cmoe", "-ub", "5", "--prefetch", "whole")):
        assert main(["run", "-p", "In the beginning God", "-n", "12", "--temp", "0", *flags]) == 0
        captured = capsys.readouterr()
        texts.append(captured.out)
        assert "prefill 4 tokens" in captured.err
        assert "decode 11 tokens" in captured.err
    assert texts[0] == texts[1]
    assert texts[0].startswith("In the beginning God")
    assert "GB/s" in captured.err, "the streamed run says how fast experts moved"


def test_run_with_a_seed_repeats_itself(capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for seed in ("1", "1", "2"):
        assert main(["run", "-p", "And the LORD said", "-n", "16", "--temp", "1.5", "-s", seed]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def test_timeline_is_written(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    flags = ["-n", "3", "-cmoe", "--prefetch", "whole", "--timeline", str(path)]
    assert main(["run", "-p", "In the beginning God", *flags]) == 0
    text = path.read_text()
    assert "wait for experts" in text
    assert "layer 3 attention and router" in text


MISTAKES = {
    "no such model": (["run", "-m", "absent.gguf", "-p", "x"], "absent.gguf: no such file"),
    "no such backend": (["run", "-p", "x", "--backend", "cudda"], "cuda"),
    "backend that cannot be used": (["run", "-p", "x", "--backend", "vulkan"], "vulkan"),
    "empty prompt": (["run", "-p", ""], "the prompt is empty"),
    "context too small": (
        ["run", "-p", "In the beginning God", "-c", "2"],
        "the prompt has 4 tokens, the context is 2 (-c)",
    ),
    "no such policy": (["run", "-p", "x", "--prefetch", "most"], "whole"),
    "too few slots": (["run", "-p", "x", "--prefetch-slots", "1"], "--prefetch-slots is 1"),
    "bad pattern": (["run", "-p", "x", "-ot", "([=CPU"], "not a regular expression"),
    "temperature": (["run", "-p", "x", "--top-p", "7"], "top-p"),
    "token out of range": (["logits", "--tokens", "1,99999", "-o", "OUT"], "99999"),
    "words for tokens": (["logits", "--tokens", "a,b", "-o", "OUT"], "--tokens a,b"),
    "unwritable result": (["logits", "--tokens", "1", "-o", "absent/o.npz"], "absent/o.npz"),
    "routing of another model": (["logits", "--tokens", "1", "--routing", "ROUTING", "-o", "OUT"], "shape"),
    "does not fit": (["run", "-p", "x", "--memory", "4"], "MiB over"),
    "prompt file": (["run", "-f", "absent.txt"], "absent.txt"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_a_clear_answer(mistake: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags, expected = MISTAKES[mistake]
    np.savez(tmp_path / "routing.npz", ids=np.zeros((2, 1, 3), np.int32))
    files = {"OUT": str(tmp_path / "out.npz"), "ROUTING": str(tmp_path / "routing.npz")}
    code = main([files.get(flag, flag) for flag in flags])
    captured = capsys.readouterr()
    assert code in (1, 2)
    assert expected in captured.err
    assert "Traceback" not in captured.err


@pytest.mark.parametrize(
    "flags", [["run"], ["run", "-p", "x", "-c", "many"], ["run", "-p", "x", "--memory", "big"], ["walk"], []]
)
def test_wrong_usage_exits_with_2(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(flags)
    assert exit_info.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("noria: error: ")
    assert line.endswith(" --help`.")


def test_a_model_without_a_tokenizer_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).parents[1] / "data" / "llama-q4_k_m.gguf"
    assert main(["run", "-m", str(path), "-p", "x"]) == 1
    assert "tokenizer" in capsys.readouterr().err
