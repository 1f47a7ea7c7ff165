"""From the sources in cl/ to built programs, whose binaries are kept on disk.

A source is built the first time a kernel of it is launched, once for each set of macros: `-DQUANT=Q4_K`, `-DX=half`
take the place of templates, so nothing is built that no model asks for.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path

from noria.api.errors import KernelBuildError
from noria_sycl.runtime import BuildError, Kernel, Runtime

SOURCES = Path(__file__).parent / "cl"
_INCLUDE = re.compile(r'^#include "([\w.]+)"$', re.MULTILINE)

log = logging.getLogger(__name__)


@cache
def source(file: str) -> str:
    """The text of cl/`file`.cl with its includes in it: not every runtime finds files, and the text is the cache's key.

    A file is included once, where it is first asked for.
    """
    included: set[str] = set()

    def text(name: str) -> str:
        if name in included:
            return ""
        included.add(name)
        return _INCLUDE.sub(lambda match: text(match[1]), (SOURCES / name).read_text(encoding="utf-8"))

    return text(f"{file}.cl")


class Programs:
    """The programs of one device.

    Args:
        identity: device and driver, for which binaries are good.
    """

    def __init__(self, device_id: str, identity: str, runtime: Runtime) -> None:
        self.device_id = device_id
        self.identity = identity
        self.runtime = runtime
        language = max(v for v in ((1, 2), (2, 0), (3, 0)) if v <= runtime.limits.language or v == (1, 2))
        self._standard = f"-cl-std=CL{language[0]}.{language[1]}"
        self._programs: dict[tuple[str, tuple[str, ...]], Any] = {}
        self._kernels: dict[tuple[str, str, tuple[str, ...]], Kernel] = {}

    def kernel(self, file: str, name: str, options: tuple[str, ...] = ()) -> Kernel:
        """Kernel `name` of cl/`file`.cl, built with `options`; always the same object.

        Raises:
            KernelBuildError: it does not compile.
        """
        key = (file, name, options)
        kernel = self._kernels.get(key)
        if kernel is None:
            if (file, options) not in self._programs:
                self._programs[file, options] = self._load(file, options)
            kernel = self._kernels[key] = self.runtime.kernel(self._programs[file, options], name)
        return kernel

    def compiles(self, text: str, options: Sequence[str] = ()) -> bool:
        """Whether a program builds, which says more of a feature than the device does."""
        try:
            self.runtime.build(text, (self._standard, *options))
        except BuildError:
            return False
        return True

    def _load(self, file: str, options: tuple[str, ...]) -> Any:
        text, options = source(file), (self._standard, *options)
        key = hashlib.sha256()
        for part in (self.identity, *options, text):
            key.update(part.encode() + b"\0")
        path = user_cache_path("noria") / "sycl" / f"{file}-{key.hexdigest()[:32]}"
        try:
            return self.runtime.build(text, options, path.read_bytes())[0]
        except OSError:
            pass  # not kept yet
        except BuildError as error:
            log.debug("%s: the driver refuses the binary it gave for %s: %s", self.device_id, file, error)
        try:
            program, binary = self.runtime.build(text, options)
        except BuildError as error:
            raise KernelBuildError(self.device_id, f"{file} ({' '.join(options)})", str(error)) from error
        if binary is not None:
            _keep(path, binary)
        return program


def _keep(path: Path, binary: bytes) -> None:
    """Written aside and moved into place, so that no other process reads a part of it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(binary)
        Path(name).replace(path)
    except OSError as error:
        log.warning("built kernels cannot be kept in %s, so every start builds them: %s", path.parent, error)
