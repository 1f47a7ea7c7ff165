"""Measure prompt processing with all experts in RAM, none, and some; and the same copies in line, without the ring."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import Group, Test, run

ALL, NONE, HALF = ("-ncmoe", "99"), ("-ncmoe", "0"), ("-ncmoe", "24")
LONG = ("-c", "33792")


def ab(n_ubatch: int) -> Group:
    """With and without the ring: a prompt of one ubatch, and one of 8,192 tokens."""
    return Group(
        flags=(*ALL, "-ub", str(n_ubatch)),
        tests=tuple(
            Test(name=f"ub{n_ubatch}-pp{n}-{prefetch}", n_prompt=n, prefetch=prefetch)
            for prefetch in ("off", "auto")
            for n in sorted({n_ubatch, 8192})
        ),
    )


GROUPS = (
    Group(flags=ALL, tests=tuple(Test(name=f"pp{n}", n_prompt=n) for n in (16, 64, 512, 2048, 8192))),
    Group(flags=(*ALL, *LONG), tests=(Test(name="pp32768", n_prompt=32768),)),
    Group(
        flags=(*NONE, *LONG),
        tests=tuple(Test(name=f"resident-pp{n}", n_prompt=n) for n in (16, 64, 512, 2048, 8192, 32768)),
    ),
    Group(flags=HALF, tests=(Test(name="ncmoe24-pp2048", n_prompt=2048),)),
    ab(512),
    ab(2048),
    ab(8192),
)

if __name__ == "__main__":
    sys.exit(run(__doc__, GROUPS, Path(__file__).parent))
