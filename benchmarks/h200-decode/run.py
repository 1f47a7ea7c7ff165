"""Measure text generation with all experts in RAM and with none. `gather.py` measures what both are compared with."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import Group, Test, run

GROUPS = (
    Group(flags=("-ncmoe", "99"), tests=(Test(name="tg128", n_gen=128),)),
    Group(flags=("-ncmoe", "0"), tests=(Test(name="resident-tg128", n_gen=128),)),
)

if __name__ == "__main__":
    sys.exit(run(__doc__, GROUPS, Path(__file__).parent))
