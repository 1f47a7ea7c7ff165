"""The choice of the next token from its logits.

The order of the steps and the meaning of each number are llama.cpp's: top-k, top-p, min-p, then temperature.

The same seed and the same logits give the same tokens on every machine: the random stream is PCG64, everything is
computed in float64 with operations that IEEE 754 rounds in one way, in a fixed order, and equal logits are ordered by
token id.

Source: top-p is "nucleus sampling" (Holtzman et al., arXiv:1904.09751), min-p is Nguyen et al., arXiv:2407.01082.
"""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from noria.api.errors import ConfigError, ModelError


@dataclass(frozen=True, kw_only=True)
class SamplerParams:
    """How the next token is chosen.

    Attributes:
        temperature: logits are divided by it; 0 or less always takes the most likely token.
        top_k: only the k most likely tokens; 0 or less is all of them.
        top_p: only the most likely tokens whose probabilities add up to p; 1 is all of them.
        min_p: only tokens at least p times as likely as the most likely one; 0 is all of them.
        seed: of the random stream; None or -1 draws one.

    Raises:
        ConfigError: a value is out of its range.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    seed: int | None = None

    def __post_init__(self) -> None:
        if not math.isfinite(self.temperature):
            raise ConfigError(f"--temp is {self.temperature}; it must be a finite number (0 or less is greedy).")
        for flag, value, off in (("--top-p", self.top_p, 1), ("--min-p", self.min_p, 0)):
            if not 0 <= value <= 1:
                raise ConfigError(f"{flag} is {value}; it must be between 0 and 1 ({off} turns it off).")
        if self.seed is not None and self.seed < -1:
            raise ConfigError(f"--seed is {self.seed}; it must be 0 or more, or -1 for a random one.")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature <= 0


class Sampler:
    """Draws tokens. Holds the state of the random stream, so one sampler belongs to one sequence.

    Attributes:
        params: what it was made with.
        seed: the seed in use: that of `params`, or the one drawn. Writing it down makes a run repeatable.
    """

    def __init__(self, params: SamplerParams) -> None:
        self.params = params
        self.seed = secrets.randbits(32) if params.seed is None or params.seed == -1 else params.seed
        self._random = np.random.Generator(np.random.PCG64(self.seed))

    def sample(self, logits: NDArray[np.float32]) -> int:
        """The next token.

        Args:
            logits: of the whole vocabulary, float32 [n_vocab]; -inf forbids a token.

        Raises:
            ModelError: the largest logit is not a finite number.
        """
        _check(logits)
        if self.params.greedy:
            return int(np.argmax(logits))
        ids = np.arange(len(logits))
        k = self.params.top_k
        if 0 < k < len(logits):
            # All that are as large as the k-th largest: which of equals go is settled by id, not by the partition.
            ids = np.flatnonzero(logits >= np.partition(logits, -k)[-k])
        return self.sample_candidates(logits[ids], ids)

    def sample_candidates(self, values: NDArray[np.float32], ids: NDArray[np.integer]) -> int:
        """The next token, from those that a device's top-k has left.

        With at least `top_k` candidates (of all candidates, if `top_k` is 0) this is `sample` of the whole vocabulary.

        Args:
            values: the candidates' logits, float32 [n], in any order.
            ids: their token ids, integers [n].

        Raises:
            ModelError: the largest logit is not a finite number.
        """
        _check(values)
        order = np.lexsort((ids, -values))
        if self.params.greedy:
            return int(ids[order[0]])
        if self.params.top_k > 0:
            order = order[: self.params.top_k]
        logits = values[order].astype(np.float64)  # [n], falling
        logits -= logits[0]

        weights = _exp(logits)  # 1 for the first; a probability but for the common divisor
        if self.params.top_p < 1:
            cumulative = np.cumsum(weights)
            n_kept = 1 + int(np.searchsorted(cumulative, self.params.top_p * cumulative[-1]))
            weights = weights[:n_kept]
        weights = weights[weights >= self.params.min_p]

        with np.errstate(over="ignore"):  # a tiny temperature sends all but the first to -inf: that is the answer
            scaled = logits[: len(weights)] / self.params.temperature
        cumulative = np.cumsum(_exp(scaled))
        # random() is below 1 and so, also after rounding, the product is below the last sum.
        chosen = np.searchsorted(cumulative, self._random.random() * cumulative[-1], side="right")
        return int(ids[order[chosen]])


def _check(logits: NDArray[np.float32]) -> None:
    largest = logits.max()
    if not np.isfinite(largest):
        where = np.flatnonzero(~np.isfinite(logits))
        raise ModelError(
            f"the largest of {len(logits)} logits is {largest} ({len(where)} are not finite, the first at {where[0]}): "
            f"the model's computation overflowed or its weights are damaged."
        )


# ln 2 in two parts: k * _LN2_HIGH is exact for every k that occurs, so x - k ln 2 keeps its last bits.
_LN2_HIGH = float.fromhex("0x1.62e42fee00000p-1")
_LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
_TAYLOR = [1 / math.factorial(n) for n in range(14)]


def _exp(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """e**x for x <= 0 to within 2 ulp, the same bits everywhere.

    NumPy's own differs in the last bit between instruction sets, and one bit is enough to draw another token.
    """
    x = np.maximum(x, -800.0)  # far below the smallest float64, so still 0, also for -inf
    k = np.rint(x * (1 / math.log(2)))
    r = (x - k * _LN2_HIGH) - k * _LN2_LOW  # |r| <= ln 2 / 2, where 14 terms reach the last bit
    power = np.full_like(r, _TAYLOR[-1])
    for coefficient in _TAYLOR[-2::-1]:
        power = power * r + coefficient
    return np.ldexp(power, k.astype(np.int32))
