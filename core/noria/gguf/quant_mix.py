"""Which type each tensor of a model gets under a quantization mix, as llama.cpp chooses it without importance matrix.

Source: llama.cpp, src/llama-quant.cpp, llama_tensor_get_type; checked against files its quantizer wrote.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from gguf import LlamaFileType

from noria.gguf.quants import block_facts

# The type of most tensors, and what `general.file_type` says.
QUANTS: dict[str, tuple[str, LlamaFileType]] = {
    "F16": ("F16", LlamaFileType.MOSTLY_F16),
    "Q8_0": ("Q8_0", LlamaFileType.MOSTLY_Q8_0),
    "Q6_K": ("Q6_K", LlamaFileType.MOSTLY_Q6_K),
    "Q5_K_M": ("Q5_K", LlamaFileType.MOSTLY_Q5_K_M),
    "Q4_K_M": ("Q4_K", LlamaFileType.MOSTLY_Q4_K_M),
    "Q4_0": ("Q4_0", LlamaFileType.MOSTLY_Q4_0),
    "IQ4_XS": ("IQ4_XS", LlamaFileType.MOSTLY_IQ4_XS),
    "MXFP4_MOE": ("MXFP4", LlamaFileType.MOSTLY_MXFP4_MOE),
    "Q3_K_M": ("Q3_K", LlamaFileType.MOSTLY_Q3_K_M),
}

# What takes the place of a type whose blocks are longer than the row allows.
_FALLBACKS = {"Q3_K": "IQ4_NL", "IQ4_XS": "IQ4_NL", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}


@dataclass(frozen=True, kw_only=True)
class QuantMix:
    """A mix for one model.

    Attributes:
        quant: a key of `QUANTS`.
        n_gqa: query heads a key-value head.
    """

    quant: str
    n_layer: int
    n_expert: int
    n_gqa: int

    def type_of(self, name: str, shape: tuple[int, ...]) -> str:
        """The ggml type of tensor `name` of `shape` (NumPy order)."""
        if len(shape) == 1 or name.endswith("ffn_gate_inp.weight"):
            return "F32"
        if self.quant == "F16":
            return "F16"
        wanted = self._wanted(name, is_expert=len(shape) == 3)
        if shape[-1] % block_facts(wanted)[0]:
            wanted = _FALLBACKS.get(wanted, "F16")
        return wanted if shape[-1] % block_facts(wanted)[0] == 0 else "F16"

    def _wanted(self, name: str, *, is_expert: bool) -> str:
        """Before looking at the row length."""
        base = QUANTS[self.quant][0]
        if self.quant == "MXFP4_MOE":
            return "MXFP4" if is_expert else "Q8_0"
        if name == "output.weight":
            return "Q8_0" if base == "Q8_0" else "Q6_K"
        block = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
        if block is None:
            return base
        layer, kind = int(block[1]), block[2]
        if kind in ("attn_v", "attn_k") and self.n_expert == 8:
            return "Q8_0"
        if kind == "attn_v":
            return self._attn_v(base, layer)
        if kind.startswith("ffn_down"):
            return self._ffn_down(base, layer)
        if kind == "attn_output":
            return self._attn_output(base)
        return base

    def _attn_v(self, base: str, layer: int) -> str:
        if self.quant == "Q3_K_M":
            return "Q5_K" if layer < 2 else "Q4_K"
        if self.quant in ("Q4_K_M", "Q5_K_M") and self._more_bits(layer):
            return "Q6_K"
        if self.quant == "IQ4_XS" and self.n_gqa >= 4:
            return "Q5_K"
        return base

    def _ffn_down(self, base: str, layer: int) -> str:
        if self.quant == "Q3_K_M":
            return "Q5_K" if layer < self.n_layer // 16 else "Q4_K"
        if self.quant in ("Q4_K_M", "Q5_K_M") and self._more_bits(layer):
            return "Q6_K"
        if self.quant == "IQ4_XS" and layer < self.n_layer // 8:
            return "Q5_K"
        return base

    def _attn_output(self, base: str) -> str:
        if self.n_expert == 8 and self.quant in ("Q3_K_M", "Q4_K_M", "IQ4_XS"):
            return "Q5_K"
        return "Q4_K" if self.quant == "Q3_K_M" else base

    def _more_bits(self, layer: int) -> bool:
        """The first and last eighth of the layers, and every third in between."""
        eighth = self.n_layer // 8
        return layer < eighth or layer >= 7 * self.n_layer // 8 or (layer - eighth) % 3 == 2
