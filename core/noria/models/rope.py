"""How a model stretches RoPE beyond the context it was first trained for, as its metadata says.

Linear scaling shrinks all positions. YaRN does so only for the pairs that turn slowly: those that turn often enough
within the original context keep their speed, with a ramp between the two. It also enlarges Q and K a little.

Source: Chen et al. 2023, arXiv 2306.15595 (linear); Peng et al. 2023, arXiv 2309.00071 (YaRN); what the keys mean where
the papers are silent: llama.cpp, llama-context.cpp and ggml-cpu/ops.cpp (ggml_rope_yarn).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor, log, pi

import numpy as np
import numpy.typing as npt

from noria.api.errors import GGUFError, ModelError
from noria.gguf import ModelFile

KINDS = ("none", "linear", "yarn")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Attributes:
    scale: factor on positions.
    magnitude: factor on the turned numbers of Q and of K.
    extrapolation: how much of YaRN's ramp applies, 0-1; 0 is linear scaling.
    beta_fast, beta_slow: turns within the original context from which on, and up to which, a pair keeps its speed or
        is slowed down in full.
    n_ctx_original: the context before it was stretched.
    """

    scale: float = 1.0
    magnitude: float = 1.0
    extrapolation: float = 0.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    n_ctx_original: int = 0

    def frequency_factors(self, n_dims: int, base: float) -> npt.NDArray[np.float32]:
        """What divides each frequency besides the scale, F32 [n_dims/2]: YaRN's ramp."""

        def pair_of(n_turns: float) -> float:
            """The pair that turns so many times within the original context."""
            return n_dims * log(self.n_ctx_original / (n_turns * 2 * pi)) / (2 * log(base))

        low, high = max(floor(pair_of(self.beta_fast)), 0), min(ceil(pair_of(self.beta_slow)), n_dims - 1)
        ramp = np.clip((np.arange(n_dims // 2) - low) / max(high - low, 0.001), 0, 1)
        kept = (1 - ramp) * self.extrapolation
        return (1 / (1 - kept + kept / self.scale)).astype(np.float32)


def read_rope_scaling(file: ModelFile, n_ctx_train: int) -> RopeScaling:
    """Raises:
    GGUFError: a number makes no sense.
    ModelError: the kind of scaling is not known.
    """
    metadata = file.metadata
    kind = metadata.arch_str("rope.scaling.type", "linear")
    factor = metadata.arch_float("rope.scaling.factor", 0.0) or metadata.arch_float("rope.scale_linear", 0.0) or 1.0
    if kind not in KINDS and factor != 1.0:
        raise ModelError(f"{file.path}: RoPE scaling '{kind}' is not supported; {', '.join(KINDS)} are.")
    if not factor > 0:
        raise GGUFError(file.path, "rope.scaling.factor", f"is {factor}, must be positive")
    factor = 1.0 if kind == "none" else factor
    extrapolation = metadata.arch_float("rope.scaling.yarn_ext_factor", -1.0)
    if extrapolation < 0:
        extrapolation = float(kind == "yarn")
    magnitude = metadata.arch_float("rope.scaling.yarn_attn_factor", 1.0)
    if extrapolation:
        multiplier = metadata.arch_float("rope.scaling.yarn_log_multiplier", 0.0)
        magnitude = _magnitude(factor, 1.0) / _magnitude(factor, multiplier)
    scaling = RopeScaling(
        scale=1.0 / factor,
        magnitude=magnitude * metadata.arch_float("rope.scaling.attn_factor", 1.0),
        extrapolation=extrapolation,
        beta_fast=metadata.arch_float("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=metadata.arch_float("rope.scaling.yarn_beta_slow", 1.0),
        n_ctx_original=metadata.arch_int("rope.scaling.original_context_length", 0) or n_ctx_train,
    )
    for key, value in (
        ("original_context_length", scaling.n_ctx_original),
        ("yarn_beta_fast", scaling.beta_fast),
        ("yarn_beta_slow", scaling.beta_slow),
    ):
        if not value > 0:
            raise GGUFError(file.path, f"rope.scaling.{key}", f"is {value}, must be positive")
    return scaling


def _magnitude(factor: float, multiplier: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * multiplier * log(factor) + 1.0
