"""How much RAM there is for what stays on the host."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


def machine_memory_nbytes() -> int:
    """All RAM of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_memory_nbytes(root: Path = ROOT) -> int:
    """RAM that can be taken without anything being swapped out or killed.

    That is what Linux calls available, but no more than the control groups (version 2) of this process leave it:
    those of a container, say. Where the system does not tell, all RAM. `root` is where /proc and /sys are looked for.
    """
    return max(0, min([_system_nbytes(root), *_control_group_nbytes(root)]))


def _system_nbytes(root: Path) -> int:
    try:
        for line in (root / "proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    return machine_memory_nbytes()


def _control_group_nbytes(root: Path) -> Iterator[int]:
    """What the limit of each control group around this process leaves; file pages do not count, they can be dropped."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    top = root / "sys/fs/cgroup"
    for path in (line.removeprefix("0::/") for line in lines if line.startswith("0::/")):
        group = top / path
        for folder in (group, *group.parents):
            if not folder.is_relative_to(top):
                return
            try:
                limit = (folder / "memory.max").read_text(encoding="ascii").strip()
                used = int((folder / "memory.current").read_text(encoding="ascii"))
                stat = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
            except OSError:
                continue  # not controlled here, or not shown to us
            if limit != "max":
                yield int(limit) - used + int(stat["active_file"]) + int(stat["inactive_file"])
