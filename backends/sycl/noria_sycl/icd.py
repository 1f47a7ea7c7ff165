"""Finding OpenCL drivers: the loader looks in one folder, and pip installs them in others."""

from __future__ import annotations

import ctypes
import logging
import os
import site
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger(__name__)

VENDORS = "OCL_ICD_VENDORS"
_SYSTEM = Path("/etc/OpenCL/vendors")


@contextmanager
def all_drivers() -> Iterator[None]:
    """The loader finds every driver while it is inside: it must be imported, and asked for platforms, here.

    A user who has set OCL_ICD_VENDORS has chosen.
    """
    if os.environ.get(VENDORS):
        yield
        return
    with tempfile.TemporaryDirectory(prefix="noria-icd-") as folder:
        for i, library in enumerate(filter(_loads, libraries())):
            (Path(folder) / f"{i:02}.icd").write_text(f"{library}\n", encoding="utf-8")
        os.environ[VENDORS] = folder
        try:
            yield
        finally:
            del os.environ[VENDORS]


def libraries() -> list[str]:
    """What the .icd files of the system and of this environment name, each driver once: the first one that is there."""
    found: dict[str, str] = {}
    for file in _files():
        try:
            named = file.read_text(encoding="utf-8").split("\n")[0].strip()
        except (OSError, UnicodeDecodeError):
            continue
        library = _resolve(named)
        if library is not None:
            found.setdefault(Path(named).name.split(".")[0], library)
    return list(found.values())


def _loads(library: str) -> bool:
    """Whether a driver of pip's or conda's is complete: the loader passes over one that is not, and says nothing."""
    if "/" in library:
        try:
            ctypes.CDLL(library)
        except OSError as error:
            log.warning("the OpenCL driver %s cannot be loaded: %s", library, error)
            return False
    return True


def _files() -> Iterator[Path]:
    """The .icd files: those of the system first. PyOpenCL's loader finds those in PyOpenCL's own folder by itself."""
    for folder in (_SYSTEM, *(prefix / "etc" / "OpenCL" / "vendors" for prefix in _prefixes())):
        yield from sorted(folder.glob("*.icd"))


def _prefixes() -> list[Path]:
    """Where pip and conda install."""
    return [Path(sys.prefix), Path(site.getuserbase())]


def _resolve(named: str) -> str | None:
    """A library that can be loaded: one on the loader's path, one that is where it should be, or beside this Python.

    Intel's wheel names the folder it was built in.
    """
    if named and "/" not in named:
        return named
    places = [Path(named), *(prefix / "lib" / Path(named).name for prefix in _prefixes())]
    return next((str(place) for place in places if place.is_file()), None)
