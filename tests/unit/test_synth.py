"""Synthetic models: what llama.cpp's quantizer would have chosen, honest statistics, no two experts alike."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from math import prod
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest

from noria.api.errors import ConfigError, ModelError
from noria.gguf import block_facts, dequantize, open_model
from noria.gguf.presets import PRESETS
from noria.gguf.quant_mix import QUANTS, QuantMix
from noria.gguf.random_blocks import random_blocks
from noria.gguf.synth import synthesize

SHARED = Path(__file__).parents[3] / "shared"
MIN_NORMAL_F16 = 2.0**-14

RANDOM_TYPES = [
    "F32",
    "F16",
    "Q4_0",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ4_NL",
    "IQ4_XS",
    "MXFP4",
]
# Where the F16 scales of a block stand. Source: ggml-common.h.
SCALE_OFFSETS = {"Q5_1": (0, 2), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "MXFP4": ()}


def wanted_std(name: str) -> float:
    kind = name.split(".")[-2]
    return {"token_embd": 1.0, "ffn_gate_inp": 0.03, "attn_output": 0.004, "ffn_down_exps": 0.004}.get(kind, 0.02)


# --- random blocks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("std", [1.0, 0.02, 0.004])
@pytest.mark.parametrize("type_name", RANDOM_TYPES)
def test_random_blocks(type_name: str, std: float) -> None:
    block_size, type_nbytes = block_facts(type_name)
    n_out, n_in = 128, 2048
    data = random_blocks(type_name, n_out * n_in // block_size, std, np.random.default_rng(7))
    weights = dequantize(type_name, data, (n_out, n_in))
    assert np.std(weights) == pytest.approx(std, rel=0.02)
    assert abs(np.mean(weights)) < 0.005 * std
    # No direction stands out: the largest singular value is that of independent numbers.
    largest = np.linalg.eigvalsh(weights @ weights.T)[-1] ** 0.5
    assert largest == pytest.approx(std * (n_in**0.5 + n_out**0.5), rel=0.05)
    if type_name not in ("F32", "F16"):
        blocks = data.reshape(-1, type_nbytes)
        for offset in SCALE_OFFSETS.get(type_name, (0,)):
            scales = blocks[:, offset : offset + 2].copy().view(np.float16).astype(np.float32)
            assert np.abs(scales).min() >= MIN_NORMAL_F16
            assert len(np.unique(scales)) > 100


# --- mixes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "quant"),
    [
        ("parity/qwen3moe-q4_k_m", "Q4_K_M"),
        ("parity/qwen3moe-q3_k_m", "Q3_K_M"),
        ("parity/qwen3moe-q8_0", "Q8_0"),
        ("parity/qwen3moe-iq4_xs", "IQ4_XS"),
        ("parity/qwen3moe-mxfp4_moe", "MXFP4_MOE"),
        ("parity/llama-q4_k_m", "Q4_K_M"),
        ("parity/olmoe-q4_k_m", "Q4_K_M"),
        ("models/demo-q4_k_m", "Q4_K_M"),
    ],
)
def test_mix_equals_what_llama_cpp_wrote(file: str, quant: str) -> None:
    path = SHARED / f"{file}.gguf"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    with open_model(path) as model:
        n_head, n_head_kv = (model.metadata.arch_int(f"attention.head_count{end}") for end in ("", "_kv"))
        mix = QuantMix(
            quant=quant,
            n_layer=model.metadata.arch_int("block_count"),
            n_expert=model.metadata.arch_int("expert_count"),
            n_gqa=n_head // n_head_kv,
        )
        types = {name: tensor.type for name, tensor in model.tensors.items()}
        if "output.weight" not in types:  # tied: the embeddings have the type of the output
            assert types.pop("token_embd.weight") == mix.type_of("output.weight", (4096, 256))
        assert types == {name: mix.type_of(name, model.tensors[name].shape) for name in types}


def test_mix_of_many_layers() -> None:
    mix = QuantMix(quant="Q4_K_M", n_layer=48, n_expert=128, n_gqa=8)
    shape = (128, 2048, 768)
    larger = [i for i in range(48) if mix.type_of(f"blk.{i}.ffn_down_exps.weight", shape) == "Q6_K"]
    assert larger == [*range(6), *range(8, 42, 3), *range(42, 48)]
    assert larger == [i for i in range(48) if mix.type_of(f"blk.{i}.attn_v.weight", (512, 2048)) == "Q6_K"]
    mix = replace(mix, quant="IQ4_XS")
    assert [i for i in range(48) if mix.type_of(f"blk.{i}.ffn_down_exps.weight", shape) == "Q5_K"] == [*range(6)]
    assert mix.type_of("blk.9.attn_v.weight", (512, 2048)) == "Q5_K"


@pytest.mark.parametrize(
    ("quant", "n_in", "wanted"),
    [
        ("Q4_K_M", 128, "Q5_0"),
        ("Q5_K_M", 128, "Q5_1"),
        ("Q6_K", 128, "Q8_0"),
        ("Q3_K_M", 128, "IQ4_NL"),
        ("IQ4_XS", 128, "IQ4_NL"),
        ("Q4_K_M", 100, "F16"),
        ("Q8_0", 100, "F16"),
    ],
)
def test_mix_falls_back_on_short_rows(quant: str, n_in: int, wanted: str) -> None:
    mix = QuantMix(quant=quant, n_layer=48, n_expert=128, n_gqa=1)
    assert mix.type_of("blk.20.attn_q.weight", (256, n_in)) == wanted


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quant", QUANTS)
def test_tiny_model(tmp_path: Path, quant: str) -> None:
    path = tmp_path / "tiny.gguf"
    nbytes = synthesize("tiny", path, quant=quant)
    assert nbytes == path.stat().st_size
    oracle = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    with open_model(path) as model:
        assert model.metadata.get_int("general.file_type") == QUANTS[quant][1]
        assert model.metadata.get_str("tokenizer.ggml.model") == "no_vocab"
        assert {name: tensor.shape for name, tensor in model.tensors.items()} == dict(PRESETS["tiny"].tensors())
        assert oracle.keys() == model.tensors.keys()
        slabs = []
        for name, tensor in model.tensors.items():
            weights = dequantize(tensor.type, model.data(name), tensor.shape)
            assert np.array_equal(model.data(name), oracle[name].data.view(np.uint8).ravel())
            if len(tensor.shape) == 1:
                assert (weights == 1).all()
                continue
            std = wanted_std(name)
            assert np.std(weights) == pytest.approx(std, rel=0.1)
            assert abs(np.mean(weights)) < 5 * std / weights.size**0.5
            if len(tensor.shape) == 3:
                slabs += [model.expert_slab(name, expert) for expert in range(tensor.shape[0])]
        digests = {hashlib.sha256(model.mappings[0][offset : offset + n]).digest() for offset, n in slabs}
    assert len(digests) == len(slabs) == 4 * 16 * 3


def test_rows_are_all_different(tmp_path: Path) -> None:
    """Equal rows of the output would be equal logits: greedy decoding would depend on rounding."""
    synthesize("tiny", tmp_path / "tiny.gguf")
    with open_model(tmp_path / "tiny.gguf") as model:
        for name in ("token_embd.weight", "output.weight"):
            rows = model.data(name).reshape(-1, model.tensor(name).row_nbytes)
            assert len(np.unique(rows, axis=0)) == 512


def test_seed_decides_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def made(seed: int) -> bytes:
        synthesize("tiny", tmp_path / "model.gguf", n_layer=1, seed=seed)
        return (tmp_path / "model.gguf").read_bytes()

    first = made(1)
    assert made(2) != first
    monkeypatch.setattr("noria.gguf.synth.MAX_THREADS", 1)
    assert made(1) == first


def test_vocab_is_copied(tmp_path: Path) -> None:
    tokens = [f"Ġword{i}" for i in range(300)]
    writer = gguf.GGUFWriter(tmp_path / "vocab.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_eos_token_id(299)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    synthesize("tiny", tmp_path / "model.gguf", n_layer=1, vocab=tmp_path / "vocab.gguf")
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    assert fields["tokenizer.ggml.model"].contents() == "gpt2"
    assert fields["tokenizer.ggml.tokens"].contents() == tokens
    assert fields["tokenizer.ggml.eos_token_id"].types == [gguf.GGUFValueType.UINT32]
    assert fields["qwen3moe.vocab_size"].contents() == 300
    with open_model(tmp_path / "model.gguf") as model:
        assert model.tensor("output.weight").shape == model.tensor("token_embd.weight").shape == (300, 256)


@pytest.mark.parametrize(
    ("preset", "gigabytes", "n_params"),
    [("qwen3-30b-a3b", 18.6, 30.5e9), ("mixtral-8x7b", 28.5, 46.7e9), ("qwen3-40x256", 20.6, 33.6e9)],
)
def test_full_size_models_without_the_disk_space(
    tmp_path: Path, preset: str, gigabytes: float, n_params: float
) -> None:
    """Parameters and Q4_K_M sizes of the published models; of the last one, what its shapes make."""
    path = tmp_path / "model.gguf"
    nbytes = synthesize(preset, path, sparse=True)
    assert nbytes == path.stat().st_size == pytest.approx(gigabytes * 1e9, rel=0.02)
    assert path.stat().st_blocks * 512 < 1e6
    with open_model(path) as model:
        assert sum(prod(tensor.shape) for tensor in model.tensors.values()) == pytest.approx(n_params, rel=0.01)
        last = model.metadata.arch_int("block_count") - 1
        assert model.tensor(f"blk.{last}.ffn_down_exps.weight").type == "Q6_K"


def test_metadata_that_llama_cpp_needs(tmp_path: Path) -> None:
    synthesize("mixtral-8x7b", tmp_path / "model.gguf", n_layer=2, sparse=True)
    with open_model(tmp_path / "model.gguf") as model:
        metadata = model.metadata
        assert model.architecture == "llama"
        assert metadata.arch_int("block_count") == 2
        assert metadata.arch_int("feed_forward_length") == 14_336
        assert metadata.arch_int("rope.dimension_count") == metadata.arch_int("attention.key_length") == 128
        assert metadata.arch_float("attention.layer_norm_rms_epsilon") == pytest.approx(1e-5)
        assert metadata.get_int("general.quantization_version") == gguf.GGML_QUANT_VERSION
        assert "blk.0.attn_q_norm.weight" not in model.tensors
        assert model.tensor("blk.0.attn_v.weight").type == "Q8_0"


def test_progress_reaches_the_end(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    synthesize("tiny", tmp_path / "model.gguf", progress=lambda n_done, n_total: calls.append((n_done, n_total)))
    assert calls == sorted(calls)
    assert len({n_total for _, n_total in calls}) == 1
    assert calls[-1][0] == calls[-1][1]


def test_wrong_arguments(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    with pytest.raises(ConfigError, match=r"unknown preset 'qwen3-30b'.*Did you mean 'qwen3-30b-a3b'"):
        synthesize("qwen3-30b", path)
    with pytest.raises(ConfigError, match=r"unknown quant 'Q4_K'; there are: .*Did you mean"):
        synthesize("tiny", path, quant="Q4_K")
    with pytest.raises(ConfigError, match="at least 1 layer, not 0"):
        synthesize("tiny", path, n_layer=0)
    with pytest.raises(ConfigError, match="must not be negative"):
        synthesize("tiny", path, seed=-1)
    with pytest.raises(ConfigError, match="cannot be written: No such file or directory"):
        synthesize("tiny", tmp_path / "absent" / "model.gguf")
    with pytest.raises(ModelError, match="no such file"):
        synthesize("tiny", path, vocab=tmp_path / "absent.gguf")
    assert list(tmp_path.iterdir()) == []


def test_full_disk_is_seen_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=20_000_000_000))
    with pytest.raises(ConfigError, match=r"needs 28\.\d+ GB, but its disk has 20\.00 GB free"):
        synthesize("mixtral-8x7b", tmp_path / "model.gguf")
    assert list(tmp_path.iterdir()) == []


def test_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    with pytest.raises(ConfigError, match=r"model\.gguf: cannot be written: No space left on device"):
        synthesize("tiny", tmp_path / "model.gguf")
    assert list(tmp_path.iterdir()) == []
