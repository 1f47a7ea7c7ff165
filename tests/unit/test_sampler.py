"""Each step of the sampler keeps what it should, in llama.cpp's order, and draws the same tokens everywhere."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from noria.api.errors import ConfigError, ModelError
from noria.text import Sampler, SamplerParams
from noria.text.sampler import _exp

ALL: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
INF = float("inf")


def params(**changed: Any) -> SamplerParams:
    """Every step off but for what is changed."""
    return SamplerParams(**(ALL | {"seed": 0} | changed))


def logits_of(*probabilities: float) -> NDArray[np.float32]:
    return np.array([math.log(probability) for probability in probabilities], np.float32)


def drawn(sampler: Sampler, logits: NDArray[np.float32], n: int = 400) -> set[int]:
    return {sampler.sample(logits) for _ in range(n)}


# --- what is kept ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_greedy_takes_the_largest_and_of_equals_the_first(temperature: float) -> None:
    sampler = Sampler(params(temperature=temperature))
    assert sampler.sample(np.array([1, 3, 2, 3], np.float32)) == 1
    assert sampler.sample_candidates(np.array([3, 1, 3], np.float32), np.array([9, 2, 4])) == 4


def test_nothing_is_left_out_when_every_step_is_off() -> None:
    assert drawn(Sampler(params()), logits_of(0.4, 0.3, 0.2, 0.1)) == {0, 1, 2, 3}


@pytest.mark.parametrize(("top_k", "kept"), [(1, {1}), (2, {1, 3}), (9, {0, 1, 2, 3}), (0, {0, 1, 2, 3})])
def test_top_k_keeps_the_most_likely(top_k: int, kept: set[int]) -> None:
    assert drawn(Sampler(params(top_k=top_k)), logits_of(0.15, 0.4, 0.2, 0.25)) == kept


def test_top_k_settles_ties_by_token_id() -> None:
    logits = np.array([0, 5, 0, 5, 5, 5], np.float32)
    assert drawn(Sampler(params(top_k=3)), logits) == {1, 3, 4}
    assert drawn(Sampler(params(top_k=5)), logits_of(0.1, 0.3, 0.1, 0.3, 0.1, 0.1)) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.0, {1}), (0.39, {1}), (0.41, {1, 0}), (0.71, {1, 0, 2}), (1.0, {0, 1, 2, 3})]
)
def test_top_p_keeps_the_fewest_that_reach_it(top_p: float, kept: set[int]) -> None:
    assert drawn(Sampler(params(top_p=top_p)), logits_of(0.3, 0.4, 0.2, 0.1)) == kept


@pytest.mark.parametrize(
    ("min_p", "kept"), [(1.0, {1}), (0.76, {1}), (0.74, {1, 0}), (0.49, {0, 1, 2}), (0.0, {0, 1, 2, 3})]
)
def test_min_p_is_relative_to_the_most_likely(min_p: float, kept: set[int]) -> None:
    assert drawn(Sampler(params(min_p=min_p)), logits_of(0.3, 0.4, 0.2, 0.1)) == kept


def test_top_k_comes_before_top_p() -> None:
    # Of two equals the first alone has half of what top-k left, but a tenth of what was there.
    assert drawn(Sampler(params(top_k=2, top_p=0.5)), np.zeros(10, np.float32)) == {0}


def test_temperature_comes_last() -> None:
    logits = np.array([0, -1], np.float32)
    assert drawn(Sampler(params(min_p=0.5, temperature=100.0)), logits) == {0}
    assert drawn(Sampler(params(top_p=0.7, temperature=100.0)), logits) == {0}
    assert drawn(Sampler(params(temperature=100.0)), logits) == {0, 1}


def test_forbidden_tokens_are_never_drawn() -> None:
    assert drawn(Sampler(params()), np.array([-INF, 0, -INF, 0, -INF], np.float32)) == {1, 3}


@pytest.mark.parametrize("temperature", [1e-300, 1e-3])
def test_a_tiny_temperature_is_all_but_greedy(temperature: float) -> None:
    assert drawn(Sampler(params(temperature=temperature)), np.array([0, 1, -INF], np.float32)) == {1}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_come_as_often_as_their_probability(temperature: float) -> None:
    logits = np.array([1.0, 0.0, 2.0, -1.0], np.float32)
    wanted = np.exp(logits / temperature) / np.exp(logits / temperature).sum()
    n = 4000
    sampler = Sampler(params(temperature=temperature))
    counts = np.bincount([sampler.sample(logits) for _ in range(n)], minlength=4)
    assert np.all(np.abs(counts - n * wanted) < 4 * np.sqrt(n * wanted * (1 - wanted)))


# --- the same everywhere ---------------------------------------------------------------------------------------------


def test_a_seed_gives_these_tokens_on_every_machine() -> None:
    logits = (np.arange(1000) % 37 / 4).astype(np.float32)
    sampler = Sampler(SamplerParams(seed=42))
    assert [sampler.sample(logits) for _ in range(12)] == [35, 591, 183, 924, 147, 368, 998, 35, 184, 591, 480, 294]


@given(st.lists(st.integers(-40, 40), min_size=1, max_size=60), st.integers(0, 12), st.randoms(use_true_random=False))
@settings(deadline=None, derandomize=True)
def test_candidates_of_a_device_give_the_same_token(eighths: list[int], top_k: int, random: Any) -> None:
    logits = np.array([value / 8 for value in eighths], np.float32)  # few values, so many ties
    by_rank = sorted(range(len(logits)), key=lambda id: (-logits[id], id))
    kept = by_rank[: random.randint(top_k, len(logits))] if 0 < top_k <= len(logits) else by_rank
    random.shuffle(kept)
    ids = np.array(kept, np.int32)
    for temperature in (0.0, 0.8):
        chosen = SamplerParams(top_k=top_k, temperature=temperature, seed=7)
        whole, candidates = Sampler(chosen), Sampler(chosen)
        for _ in range(3):
            assert candidates.sample_candidates(logits[ids], ids) == whole.sample(logits)


@pytest.mark.parametrize("seed", [None, -1])
def test_a_drawn_seed_can_be_used_again(seed: int | None) -> None:
    logits = np.zeros(4096, np.float32)
    first = Sampler(params(seed=seed))
    again, other = Sampler(params(seed=first.seed)), Sampler(params(seed=seed))
    tokens = [first.sample(logits) for _ in range(8)]
    assert [again.sample(logits) for _ in range(8)] == tokens
    assert [other.sample(logits) for _ in range(8)] != tokens


def test_our_exponential_is_exact_to_two_units_in_the_last_place() -> None:
    x = -np.concatenate([np.linspace(0, 2, 2001), np.geomspace(1e-12, 700, 2001)])
    wanted = np.array([math.exp(value) for value in x])
    assert np.all(np.abs(_exp(x) - wanted) <= 2 * np.spacing(wanted))
    assert _exp(np.array([0.0, -0.0, -1e4, -INF])).tolist() == [1, 1, 0, 0]


# --- what is refused -------------------------------------------------------------------------------------------------


def test_defaults_are_those_of_llama_cpp() -> None:
    defaults = SamplerParams()
    assert (defaults.temperature, defaults.top_k, defaults.top_p, defaults.min_p) == (0.8, 40, 0.95, 0.05)
    assert defaults.seed is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"temperature": float("nan")}, "--temp is nan; it must be a finite number"),
        ({"temperature": INF}, "--temp is inf"),
        ({"top_p": 1.5}, "--top-p is 1.5; it must be between 0 and 1"),
        ({"top_p": float("nan")}, "--top-p is nan"),
        ({"min_p": -0.1}, "--min-p is -0.1; it must be between 0 and 1"),
        ({"seed": -2}, "--seed is -2; it must be 0 or more, or -1"),
    ],
)
def test_a_value_out_of_range_names_its_flag(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplerParams(**changed)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("bad", [float("nan"), INF])
def test_logits_that_are_not_numbers_are_an_error(bad: float, temperature: float) -> None:
    logits = np.zeros(100, np.float32)
    logits[70] = bad
    with pytest.raises(ModelError, match=r"largest of \d+ logits is (nan|inf) \(1 are not finite, the first at "):
        Sampler(params(temperature=temperature, top_k=40)).sample(logits)
    with pytest.raises(ModelError, match="is -inf"):
        Sampler(params(temperature=temperature)).sample(np.full(4, -INF, np.float32))
