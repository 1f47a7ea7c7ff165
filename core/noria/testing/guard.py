"""What keeps a backend's tests from quietly leaving a case of the kit out."""

from __future__ import annotations

from typing import Any

KIT = "noria.testing."


def dropped_cases(suite: type) -> list[str]:
    """Cases of the kit that `suite` deletes or overrides without saying why, one line each.

    A case may be overridden by one that carries `pytest.mark.xfail(reason=...)` or `pytest.mark.skip(reason=...)`.
    """
    lines = []
    for name in sorted({name for cls in suite.__mro__ if _of_kit(cls) for name in vars(cls) if _is_case(name)}):
        owner = next(cls for cls in suite.__mro__ if name in vars(cls))
        if _of_kit(owner):
            continue
        case = vars(owner)[name]
        if not callable(case):
            lines.append(f"{owner.__name__} deletes {name}")
        elif not _has_reason(case):
            lines.append(f"{owner.__name__} overrides {name} without xfail(reason=...) or skip(reason=...)")
    return lines


def _of_kit(cls: type) -> bool:
    return cls.__module__.startswith(KIT)


def _is_case(name: str) -> bool:
    return name.startswith("test")


def _has_reason(case: Any) -> bool:
    marks = getattr(case, "pytestmark", [])
    return any(mark.name in ("xfail", "skip") and str(mark.kwargs.get("reason", "")).strip() for mark in marks)
