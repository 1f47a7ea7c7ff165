"""The command line as a whole: wrong words get one helpful line, and streams and interrupts an orderly end."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from noria.cli.engine import flag_notes
from noria.cli.output import plural, sentence
from noria.models import HParams
from noria.runtime import EngineConfig
from noria.runtime.plan import Choice

Noria = Callable[..., Any]


# --- wrong words ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ((), "no command was given; there are run, bench,"),
        (("run", "--temprature", 1), "there is no flag --temprature. Did you mean '--temp'? See `noria run --help`."),
        (("bench", "--prefetch-slot=3"), "there is no flag --prefetch-slot. Did you mean '--prefetch-slots'?"),
        (("run", "-p", "x", "-t", 8), "there is no flag -t. See `noria run --help`."),
        (("run", "-p", "x", "-n5"), "there is no flag -n5."),
        (("run", "-p", "x", "-sm", "layer"), "there is no flag -sm."),
        (("run", "-p", "x", "extra"), "unrecognized arguments: extra. See `noria run --help`."),
        (("run", "-p", "x", "-c", "many"), "-c/--ctx-size: 'many' is not a whole number. See `noria run --help`."),
        (("run", "-p", "x", "-c", 10**20), "is too large"),
        (("run", "-p", "x", "-b", 10**20), "is neither a whole number nor 'auto'"),
        (("run", "-p", "x", "--temp", "hot"), "--temp: 'hot' is not a number."),
        (("run", "-p", "x", "--memory", 0), "--memory: '0' is no size"),
        (("run", "-p", "x", "-m", ""), "-m/--model: the name of the file is empty."),
        (("run", "-p", "x", "-cmoe", "-ncmoe", 2), "not allowed with argument -cmoe/--cpu-moe"),
        (("plan", "--backend", "reference", "-dev", "sim0"), "not allowed with argument --backend"),
        (("bench", "--fallback", "--no-fallback"), "not allowed with argument --fallback"),
        (("plan", "-fa", "off"), "'off' is not on or auto; there is no other attention than the flash one"),
        (("plan", "-ot", "exps=DISK"), "'exps=DISK' is not REGEX=CPU or REGEX=GPU"),
        (("plan", "-ot", "exps=CPU,up=DISK"), "is not REGEX=CPU or REGEX=GPU"),
    ],
)
def test_a_wrong_word_gets_one_line(noria: Noria, words: tuple[object, ...], error: str) -> None:
    result = noria(*words)
    (line,) = result.err.splitlines()
    assert (result.code, result.out) == (2, "")
    assert line.startswith("noria: error: ")
    assert error in line
    assert line.endswith(" --help`.")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("plan", "--backend", "cudda"), "no backend or device 'cudda'"),
        (("plan", "--backend", ""), "empty entry"),
        (("plan", "-dev", "sim9"), "there are: sim0, sim1"),
        (("plan", "--prefetch", "hole"), "no policy 'hole' (--prefetch); there are off, whole, selective, auto."),
        (("plan", "--prefetch", ""), "no policy ''"),
        (("bench", "--backend", "cudda"), "no backend or device 'cudda'"),
        (("ops", "--backend", "metal"), "no backend or device 'metal'"),
    ],
)
def test_a_wrong_name_is_a_wrong_flag(noria: Noria, words: tuple[object, ...], error: str) -> None:
    result = noria(*words)
    assert result.code == 2
    assert error in result.err


@pytest.mark.parametrize("words", [("-fa",), ("-fa", "on"), ("--flash-attn", "auto"), ("-ot", "up=CPU,down=GPU")])
def test_words_of_llama_cpp(noria: Noria, words: tuple[str, ...]) -> None:
    result = noria("plan", *words)
    assert (result.code, result.err) == (0, "")


def test_several_overrides_of_one_flag_are_all_obeyed(noria: Noria) -> None:
    one, two = (noria("plan", "--backend", "sim", "-ot", text, "-o", "json").json()["host_nbytes"] for text in TWO)
    assert 0 < one < two


TWO = (r"blk\.0.*exps=CPU", r"blk\.0.*exps=CPU,blk\.1.*exps=cpu")


def test_sentences_and_plurals() -> None:
    assert [sentence(text) for text in ("not 0", "what?", "done.")] == ["not 0.", "what?", "done."]
    assert [plural(n, "layer") for n in (0, 1, 2)] == ["0 layers", "1 layer", "2 layers"]


def test_what_does_nothing_is_said(noria: Noria) -> None:
    dense = HParams(**{field.name: 0 for field in dataclasses.fields(HParams)} | {"n_ctx_train": 100})
    choice = Choice(n_ctx=10, n_batch=10, n_ubatch=10, n_slots=1, n_cpu_moe=0, type_k="F16", type_v="F16")
    for n, said in ((9999, True), (0, False), ("auto", False)):
        notes = flag_notes(dense, EngineConfig(n_cpu_moe=n), choice)
        assert notes == ["-ncmoe and -cmoe do nothing: this model has no experts"] * said
    assert "the context of 3000 tokens is longer than the 2048 of the training" in noria("plan", "-c", 3000).err
    assert "-b 4000 means 100 here" in noria("plan", "-c", 100, "-b", 4000).err
    assert noria("plan", "-c", 100, "-b", 50, "-ub", 50).err == ""


# --- streams and interrupts, in real processes ------------------------------------------------------------------------


def shell(command: str, tmp_path: Path) -> tuple[int, str, str]:
    """Run a command line of `noria` in a shell, which can close streams: code, stdout, stderr."""
    done = subprocess.run(
        f'"{sys.executable}" -m noria {command}',
        shell=True,
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's full device")
def test_a_full_disk(tmp_path: Path) -> None:
    code, _, err = shell("plan > /dev/full", tmp_path)
    assert (code, err) == (1, "noria: error: cannot write the output: No space left on device.\n")


def test_closed_streams(tmp_path: Path) -> None:
    code, out, err = shell("plan >&-", tmp_path)
    assert (code, out, err) == (0, "", "")
    code, _, err = shell("run -f - <&-", tmp_path)
    assert (code, err) == (2, "noria: error: the prompt is empty; give some text with -p or -f.\n")
    code, out, _ = shell("run -p x -c 0 2>&-", tmp_path)
    assert (code, out) == (2, ""), "an error went to stdout"


INTERRUPTED_IMPORT = """
import sys
class Interrupt:
    def find_spec(self, name, path, target=None):
        if name == "numpy":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
from noria.cli.main import main
sys.exit(main(["plan"]))
"""


def test_an_interrupt_while_modules_are_imported() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED_IMPORT], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, "")


def test_an_interrupted_run_says_how_it_went(tmp_path: Path) -> None:
    argv = ["run", "-p", "In the beginning", "-n", "100000", "--ignore-eos", "--timeline", "t.json"]
    process = subprocess.Popen(
        [sys.executable, "-m", "noria", *argv], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        text = os.read(process.stdout.fileno(), 100)
        while len(text) < 40:  # some tokens after the prompt
            text += os.read(process.stdout.fileno(), 100)
        process.send_signal(signal.SIGINT)
        rest, err = (stream.decode() for stream in process.communicate(timeout=20))
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert rest.endswith("\n")
    assert "Traceback" not in err
    assert "noria: prefill 3 tokens, " in err
    assert " | decode " in err
    assert " | interrupted | " in err
    assert "layer 3 attention and router" in (tmp_path / "t.json").read_text()
