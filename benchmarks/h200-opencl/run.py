"""Measure prompts and text with all experts in RAM, through OpenCL. `copies.py` measures the ways to copy."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import Group, Test, run

GROUPS = (
    Group(
        flags=("-ncmoe", "99"),
        tests=(Test(name="pp2048", n_prompt=2048), Test(name="pp8192", n_prompt=8192), Test(name="tg64", n_gen=64)),
    ),
    Group(flags=("-ncmoe", "99"), tests=(Test(name="pp2048-off", n_prompt=2048, prefetch="off"),)),
)

if __name__ == "__main__":
    sys.exit(run(__doc__, GROUPS, Path(__file__).parent, device="sycl0"))
