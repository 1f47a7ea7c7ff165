"""The reference backend is held to the definitions of the ops like any other, in every form its options give it."""

from types import MappingProxyType

import numpy as np
import pytest

from noria.testing import cases
from noria.testing.accuracy import assert_same_bits
from noria.testing.bench import Bench
from noria.testing.suite import BasicSuite, OpsSuite, OverlapSuite, RingSuite
from noria.testing.suite.experts import N_EXPERT, Ffn, Routed
from noria.testing.suite.routing import random_ids


class TestBasic(BasicSuite):
    backend = "reference"


class TestOps(OpsSuite):
    backend = "reference"

    @pytest.mark.parametrize("type", cases.FEW_TYPES)
    def test_chunks_do_not_change_bits(self, bench: Bench, rng: np.random.Generator, type: str) -> None:
        """What other backends do only nearly: the bits do not depend on how many rows are computed at once."""
        routed, ffn = Routed(bench, rng, random_ids(rng, 20, N_EXPERT, 4)), Ffn(rng, type, type)
        whole = ffn.run(bench, routed, [(0, N_EXPERT)], 1000)
        for chunk_rows in (1, 7, 16):
            assert_same_bits(ffn.run(bench, routed, [(0, N_EXPERT)], chunk_rows), whole, f"chunks of {chunk_rows}")


class TestRing(RingSuite):
    backend = "reference"


class TestOverlap(OverlapSuite):
    backend = "reference"


class TestBasicOnOneQueue(BasicSuite):
    backend = "reference"
    options = MappingProxyType({"copy_queues": 0})


class TestRingOnOneQueue(RingSuite):
    backend = "reference"
    options = MappingProxyType({"copy_queues": 0})


class TestBasicWithHostWaits(BasicSuite):
    backend = "reference"
    options = MappingProxyType({"device_wait": False})


class TestRingWithHostWaits(RingSuite):
    backend = "reference"
    options = MappingProxyType({"device_wait": False})


class TestBasicWithManyQueues(BasicSuite):
    backend = "reference"
    options = MappingProxyType({"copy_queues": 3})


class TestOverlapWithManyQueues(OverlapSuite):
    backend = "reference"
    options = MappingProxyType({"copy_queues": 3})
