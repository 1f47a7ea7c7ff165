"""The conformance kit on a CUDA device; skipped with the reason where there is none."""

import pytest

from noria.testing.suite import BasicSuite, OpsSuite, OverlapSuite, RingSuite

pytestmark = pytest.mark.gpu


class TestBasic(BasicSuite):
    backend = "cuda"


class TestOps(OpsSuite):
    backend = "cuda"


class TestRing(RingSuite):
    backend = "cuda"


class TestOverlap(OverlapSuite):
    backend = "cuda"
