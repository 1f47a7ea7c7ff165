"""Version of the contract between the core and its backends.

Rule: removing or changing anything raises the first number once it is 1 or more; adding an op, a capability or an
optional argument raises the second. While the first number is 0 the contract may still change as a whole, and it does
so everywhere in one commit. A new op is MISSING for a backend that was written before it.
"""

from __future__ import annotations

API_VERSION = (0, 1)


def compatible(wanted: tuple[int, int], have: tuple[int, int] = API_VERSION) -> bool:
    """Whether a backend written for `wanted` works with a core that speaks `have`."""
    if wanted[0] == 0:
        return wanted == have
    return wanted[0] == have[0] and wanted[1] <= have[1]
