"""Files that commands read and write. Outputs are checked before the work, and complete or not there after it."""

from __future__ import annotations

import os
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from noria.api.errors import ConfigError, NoriaError


def check_outputs(*paths: Path | None) -> None:
    """Fail before computing if a result could not be written.

    Raises:
        ConfigError: two paths are the same, or one is no ordinary file or cannot be written.
    """
    targets: set[Path] = set()
    for path in filter(None, paths):
        if path.exists() and not path.is_file():
            what = "a folder" if path.is_dir() else "no ordinary file"
            raise ConfigError(f"cannot write {path}: it is {what}.")
        if path.exists() and not os.access(path, os.W_OK):
            raise ConfigError(f"cannot write {path}: it is write-protected.")
        target = path.resolve()
        if target in targets:
            raise ConfigError(f"two outputs have the name {path}.")
        targets.add(target)
        try:
            tempfile.TemporaryFile(dir=target.parent).close()
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}.") from error


@contextmanager
def written(path: Path) -> Iterator[BinaryIO]:
    """A file to write to. It gets its name when the block ends; if that fails, what was there before is untouched.

    Raises:
        NoriaError: it cannot be written.
    """
    target = path.resolve()
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with open(draft, "wb") as file:
            yield file
        draft.replace(target)
    except OSError as error:
        raise NoriaError(f"cannot write {path}: {error.strerror}.") from error
    finally:
        draft.unlink(missing_ok=True)


def load_array(flag: str, path: Path, key: str) -> npt.NDArray[Any]:
    """The array `key` of an .npz file, or the one array of an .npy file.

    Raises:
        ConfigError: it cannot be read or holds something else; the text names `flag`.
    """
    try:
        loaded = np.load(path)
        if isinstance(loaded, np.ndarray):
            return loaded
        with loaded as archive:
            if key in archive:
                return np.asarray(archive[key])
            names = ", ".join(archive) or "none"
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror or 'it cannot be read'}.") from error
    except (ValueError, EOFError, BadZipFile, zlib.error) as error:
        raise ConfigError(f"{flag} {path}: not a NumPy file with numbers, or a damaged one.") from error
    raise ConfigError(f"{flag} {path}: there is no array '{key}' in it; there are: {names}.")
