"""The conformance kit. A backend's test file is

    from noria.testing.suite import *  # noqa: F403

    class TestBasic(BasicSuite):
        backend = "acme"

and the same for `OpsSuite`, `RingSuite` and `OverlapSuite`. What a device does not claim to do is skipped, with the
reason; what it claims must be right. Start with `BasicSuite`: the others stand on it.
"""

from pkgutil import iter_modules

import pytest

pytest.register_assert_rewrite(*(f"{__name__}.{module.name}" for module in iter_modules(__path__)))

from noria.testing.suite.basic import BasicSuite  # noqa: E402 - after the rewriting of asserts is arranged
from noria.testing.suite.ops import OpsSuite  # noqa: E402
from noria.testing.suite.overlap import OverlapSuite  # noqa: E402
from noria.testing.suite.ring import RingSuite  # noqa: E402

__all__ = ["BasicSuite", "OpsSuite", "OverlapSuite", "RingSuite"]
