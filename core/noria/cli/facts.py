"""What a model is, in a few words and numbers, for the rows of a benchmark and the head of a plan."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import prod

from gguf import LlamaFileType

from noria.gguf import ModelFile
from noria.models import HParams


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Attributes:
    type: architecture, parameters (`A` = those a token uses), quantization: `qwen3moe 30.5B.A3.3B Q4_K_M`.
    nbytes: of all tensors.
    n_params: numbers in all tensors.
    """

    type: str
    nbytes: int
    n_params: int


def model_facts(file: ModelFile, hparams: HParams) -> ModelFacts:
    n_params = sum(prod(info.shape) for info in file.tensors.values())
    label = amount_text(n_params)
    if hparams.n_expert:
        n_in_experts = sum(prod(info.shape) for info in file.tensors.values() if len(info.shape) == 3)
        n_unused = n_in_experts * (hparams.n_expert - hparams.n_expert_used) // hparams.n_expert
        label += f".A{amount_text(n_params - n_unused)}"
    return ModelFacts(
        type=f"{hparams.architecture} {label} {_quantization(file)}",
        nbytes=sum(info.nbytes for info in file.tensors.values()),
        n_params=n_params,
    )


def amount_text(n: int) -> str:
    """A count of parameters, in billions (B) or millions (M)."""
    return f"{n / 1e9:.1f}B" if n >= 1e9 else f"{n / 1e6:.1f}M"


def _quantization(file: ModelFile) -> str:
    """The mix that `general.file_type` names; without it, the type that most bytes have."""
    number = file.metadata.get("general.file_type")
    if isinstance(number, int) and number in LlamaFileType._value2member_map_:
        return LlamaFileType(number).name.split("_", 1)[1]
    nbytes: Counter[str] = Counter()
    for info in file.tensors.values():
        nbytes[info.type] += info.nbytes
    return nbytes.most_common(1)[0][0]
