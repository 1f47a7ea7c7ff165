"""The kit notices when a backend's tests leave a case out."""

from collections.abc import Callable

import pytest

from noria.testing.fixtures import ConformanceSuite
from noria.testing.guard import dropped_cases
from noria.testing.suite import BasicSuite, OpsSuite, OverlapSuite, RingSuite

CASE = "test_copies_pass_a_busy_compute_queue"


def subclass(**members: object) -> type[ConformanceSuite]:
    return type("TestMine", (OverlapSuite,), {"__module__": __name__, "backend": "acme", **members})


def own_case(*marks: pytest.MarkDecorator) -> Callable[..., None]:
    """A backend's own idea of a case, with these marks."""

    def case(self: object) -> None: ...

    for mark in marks:
        case = mark(case)
    return case


@pytest.mark.parametrize("suite", [BasicSuite, OpsSuite, OverlapSuite, RingSuite])
def test_complete_suites_pass(suite: type[ConformanceSuite]) -> None:
    own = type("TestMine", (suite,), {"__module__": __name__, "backend": "acme", "test_of_my_own": own_case()})
    own().test_no_case_is_dropped()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, f"TestMine deletes {CASE}"),
        (own_case(), f"TestMine overrides {CASE} without"),
        (own_case(pytest.mark.xfail), "without xfail"),
        (own_case(pytest.mark.xfail(reason=" ")), "without xfail"),
        (own_case(pytest.mark.skip(reason="")), "without xfail"),
        (own_case(pytest.mark.timeout(3)), "without xfail"),
    ],
    ids=["deleted", "overridden", "no-reason", "blank-reason", "empty-skip", "other-mark"],
)
def test_dropped_case_fails(value: object, words: str) -> None:
    suite = subclass(**{CASE: value})
    with pytest.raises(AssertionError, match=words):
        suite().test_no_case_is_dropped()


@pytest.mark.parametrize("mark", [pytest.mark.xfail, pytest.mark.skip])
def test_reason_is_accepted(mark: pytest.MarkDecorator) -> None:
    case = own_case(mark(reason="the copy engine of the acme 1 is broken"))
    assert dropped_cases(subclass(**{CASE: case})) == []


def test_override_in_a_base_of_the_backend_is_found() -> None:
    base = subclass(**{CASE: own_case()})
    derived = type("TestDerived", (base,), {"__module__": __name__})
    assert dropped_cases(derived) == [f"TestMine overrides {CASE} without xfail(reason=...) or skip(reason=...)"]


def test_a_mixin_before_the_suite_is_found() -> None:
    mixin = type("Quiet", (), {"__module__": __name__, CASE: None})
    suite = type("TestMine", (mixin, OverlapSuite), {"__module__": __name__})
    assert dropped_cases(suite) == [f"Quiet deletes {CASE}"]
