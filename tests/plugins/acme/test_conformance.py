"""noria's conformance kit on this backend. Ops it has no kernels for are skipped, with the reason."""

from noria.testing.suite import *  # noqa: F403


class TestBasic(BasicSuite):  # noqa: F405
    backend = "acme"


class TestOps(OpsSuite):  # noqa: F405
    backend = "acme"


class TestRing(RingSuite):  # noqa: F405
    backend = "acme"
