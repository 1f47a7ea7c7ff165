"""The CUDA sources, without a GPU: tables, signatures, the cache of compiled code, compiling for every generation."""

from __future__ import annotations

import logging
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from noria_cuda import compile, iq_tables, nvrtc

SOURCES = sorted(path.stem for path in compile.SOURCES.glob("*.cu"))
GENERATIONS = (75, 86, 89, 90, 120)


def test_tables_are_those_of_gguf() -> None:
    assert iq_tables.PATH.read_text(encoding="utf-8") == iq_tables.source()


@pytest.mark.parametrize("file", SOURCES)
def test_every_kernel_has_a_signature(file: str) -> None:
    """What the launcher reads from a source covers each `__global__` of it."""
    signatures = compile.signatures(file)
    assert len(signatures) == compile.source(file).count("__global__")
    assert signatures


def test_signatures_have_the_layout_of_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """A struct of five pointers between smaller numbers lies where the compiler puts it."""
    text = """extern "C" __global__ void __launch_bounds__(256, 2) first(const ACT* x, int n,
        Table table,  // of experts
        u32 m, float eps, u64 size) {}
    extern "C" __global__ void second(u8* y) {}"""
    monkeypatch.setattr(compile, "source", lambda file: text)
    signatures = compile.signatures("made up")
    assert signatures == {"first": ["Q", "i", "5Q", "I", "f", "Q"], "second": ["Q"]}
    assert struct.calcsize("@" + "".join(signatures["first"])) == 8 + 8 + 40 + 4 + 4 + 8


def test_kernels_of_a_token_await_the_one_before() -> None:
    """First of all, but where a kernel has something to do meanwhile."""
    awaiting = {name for file in SOURCES for name in compile.awaiting(file)}
    assert awaiting == {
        *(
            "get_rows",
            "rms_norm",
            "rms_norm_16",
            "rms_norm_32",
            "gemv_1",
            "gemv_3",
            "rope",
            "kv_store",
            "rope_store",
            "swiglu",
        ),
        *("attend_split", "attend_merge", "route_topk", "sort_few", "gate_up", "down_add"),
    }
    for file in SOURCES:
        for name in compile.awaiting(file) - {"gemv_1", "gemv_3"}:
            body = compile.source(file).split(f" {name}(")[1].split("{", 1)[1]
            assert body.split(";")[0].strip() == "await_previous()", name


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The cache in an empty folder, before a compiler that notes what it compiles."""
    compiled: list[str] = []

    def compiler(text: str, name: str, headers: object, options: list[str], *, machine_code: bool) -> bytes:
        compiled.append(name)
        return f"{name} {options} {machine_code}".encode()

    monkeypatch.setattr(compile, "user_cache_path", lambda name: tmp_path / name)
    monkeypatch.setattr(nvrtc, "version", lambda: (13, 0))
    monkeypatch.setattr(nvrtc, "architectures", lambda: (75, 80, 86, 89, 90, 100, 120))
    monkeypatch.setattr(nvrtc, "compile", compiler)
    return compiled


def test_code_is_compiled_once(cache: list[str], tmp_path: Path) -> None:
    first = compile.load_or_compile("sort", 90)
    assert compile.load_or_compile("sort", 90) == first
    assert cache == ["sort.cu"]
    assert len(list((tmp_path / "noria" / "cuda").iterdir())) == 1


def test_code_is_compiled_again_when_anything_is_different(cache: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    results = {
        compile.load_or_compile("rope", 90, ("X=bf16",)),
        compile.load_or_compile("rope", 90, ("X=f16",)),
        compile.load_or_compile("rope", 86, ("X=f16",)),
        compile.load_or_compile("sort", 86, ("X=f16",)),
    }
    assert (len(results), len(cache)) == (4, 4)
    monkeypatch.setattr(nvrtc, "version", lambda: (13, 1))
    compile.load_or_compile("rope", 90, ("X=bf16",))
    assert len(cache) == 5
    monkeypatch.setattr(compile, "_headers", lambda: {"common.cuh": "another"})
    compile.load_or_compile("rope", 90, ("X=bf16",))
    assert len(cache) == 6


def test_a_cache_that_cannot_be_written(
    cache: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compile, "user_cache_path", lambda name: Path("/proc/no such folder"))
    with caplog.at_level(logging.WARNING):
        assert compile.load_or_compile("sort", 90)
    assert "cannot be kept" in caplog.text


@pytest.mark.parametrize(
    ("sm", "architecture", "machine_code"),
    [(75, "sm_75", True), (90, "sm_90a", True), (120, "sm_120a", True), (121, "compute_120", False)],
)
def test_what_each_generation_gets(cache: list[str], sm: int, architecture: str, machine_code: bool) -> None:
    """Machine code for what the compiler knows; for what is newer, code that the driver finishes."""
    code = compile.compile_source("sort", sm).decode()
    assert f"--gpu-architecture={architecture}'" in code
    assert code.endswith(str(machine_code))


# --- compiling --------------------------------------------------------------------------------------------------------

# Macros of each source: sets that between them reach every branch of it. ACT is the type of activations (`act`).
MACROS: dict[str, tuple[tuple[str, ...], ...]] = {
    "attention": tuple(
        ("D_K=128", "D_V=128", f"K_TYPE={k}", f"V_TYPE={v}", "STAGES=2") for k, v in (("F16", "F16"), ("Q8_0", "Q4_0"))
    ),
    "combine": (("X=bf16",), ("X=float",)),
    "delay": ((),),
    "elementwise": (("X=bf16", "W=float", "Y=bf16"), ("X=float", "W=bf16", "Y=f16")),
    "experts": (("QUANT=Q4_K", "UP=Q4_K"), ("QUANT=IQ3_S", "UP=MXFP4", "GEGLU")),
    "gemm": (("STAGES=1",), ("STAGES=3", "GEGLU")),
    "gemv": (("QUANT=Q6_K", "OUT=float"), ("QUANT=F32", "OUT=ACT")),
    "gemv3": (
        ("QUANT=Q4_K", "QUANT1=Q4_K", "QUANT2=Q6_K", "OUT=ACT"),
        ("QUANT=F16", "QUANT1=IQ3_S", "QUANT2=Q8_0", "OUT=float"),
    ),
    "heads": (("X=bf16", "LANES=16"), ("X=float", "LANES=32")),
    "kv": tuple(("X=bf16", f"STORE={type}") for type in ("F16", "Q8_0", "Q4_0")),
    "pack": (("QUANT=Q5_K",), ("QUANT=F16",)),
    "rope": (("X=bf16",),),
    "route": (("PER_LANE=1",), ("PER_LANE=16",)),
    "rows": tuple((f"QUANT={type}", "Y=bf16") for type in ("F32", "BF16", "Q4_K", "IQ2_XXS", "MXFP4")),
    "sort": ((),),
    "topk": ((),),
}


def act(sm: int) -> str:
    """The type of activations that a device has."""
    return "ACT=bf16" if sm >= 80 else "ACT=f16"


def compiled(file: str, sm: int, macros: tuple[str, ...], tmp_path: Path) -> int:
    """Bytes of code, by NVRTC or else by nvcc."""
    try:
        nvrtc.version()
    except (ImportError, OSError):
        nvcc = shutil.which("nvcc")
        if nvcc is None:
            pytest.skip("neither NVRTC (pip install nvidia-cuda-nvrtc cuda-pathfinder) nor nvcc is here")
        out = tmp_path / "code.cubin"
        arch = f"sm_{sm}a" if sm >= 90 else f"sm_{sm}"
        flags = ["-std=c++17", "-cubin", f"-arch={arch}", *(f"-D{macro}" for macro in macros)]
        run = subprocess.run(
            [nvcc, *flags, str(compile.SOURCES / f"{file}.cu"), "-o", str(out)], capture_output=True, text=True
        )
        assert run.returncode == 0, run.stderr
        return out.stat().st_size
    return len(compile.compile_source(file, sm, macros))


def product() -> list[object]:
    """Every source with its first macros for every generation, with the others for one; the rest is slow."""
    cases = []
    for file, sets in MACROS.items():
        for i, macros in enumerate(sets):
            for j, sm in enumerate(GENERATIONS):
                marks = () if i == 0 or i % len(GENERATIONS) == j else (pytest.mark.slow,)
                cases.append(pytest.param(file, macros, sm, marks=marks, id=f"{file}-{i}-sm_{sm}"))
    return cases


@pytest.mark.parametrize(("file", "macros", "sm"), product())
def test_sources_compile(file: str, macros: tuple[str, ...], sm: int, tmp_path: Path) -> None:
    assert compiled(file, sm, (*macros, act(sm)), tmp_path) > 0


def test_every_source_is_compiled_here() -> None:
    assert set(MACROS) == set(SOURCES)


def test_a_mistake_is_shown_with_the_compilers_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        nvrtc.version()
    except (ImportError, OSError) as error:
        pytest.skip(str(error))
    with pytest.raises(nvrtc.NvrtcError, match="UNHEARD_OF"):
        compile.compile_source("rope", 90, ("X=UNHEARD_OF",))
