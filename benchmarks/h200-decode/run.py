"""Measure text generation with all experts in RAM and with none, and how fast kernels read experts in host memory."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import Group, Test, run

GROUPS = (
    Group(flags=("-ncmoe", "99"), tests=(Test(name="tg128", n_gen=128),)),
    Group(flags=("-ncmoe", "0"), tests=(Test(name="resident-tg128", n_gen=128),)),
    # Tokens enqueued call by call, so that every layer's expert kernels can be timed by themselves.
    Group(flags=("-ncmoe", "99"), tests=(Test(name="gather-tg5", n_gen=5),), timeline=True),
)

if __name__ == "__main__":
    sys.exit(run(__doc__, GROUPS, Path(__file__).parent))
