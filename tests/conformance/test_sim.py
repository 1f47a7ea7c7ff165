"""The simulated devices pass what does not look at bytes: order, time and errors."""

from types import MappingProxyType

from noria.testing.suite import BasicSuite, OverlapSuite, RingSuite


class TestBasic(BasicSuite):
    backend = "sim"


class TestRing(RingSuite):
    backend = "sim"


class TestOverlap(OverlapSuite):
    backend = "sim"


class TestBasicWithHostWaits(BasicSuite):
    backend = "sim"
    options = MappingProxyType({"device_wait": "no"})


class TestRingWithHostWaits(RingSuite):
    backend = "sim"
    options = MappingProxyType({"device_wait": "no", "jitter": 0.5})


class TestRingWithBlockingCopies(RingSuite):
    backend = "sim"
    options = MappingProxyType({"blocking_submit": "copy"})


class TestOverlapOfManyQueues(OverlapSuite):
    backend = "sim"
    options = MappingProxyType({"copy_queues": 3})
