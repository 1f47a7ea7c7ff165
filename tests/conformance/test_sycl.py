"""The conformance kit on OpenCL devices; skipped with the reason where there is none."""

from noria.testing.suite import BasicSuite, OverlapSuite, RingSuite


class TestBasic(BasicSuite):
    backend = "sycl"


class TestRing(RingSuite):
    backend = "sycl"


class TestOverlap(OverlapSuite):
    backend = "sycl"
