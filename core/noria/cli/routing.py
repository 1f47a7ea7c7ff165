"""Routing files: which experts each token chose, to be written by one run and forced on another.

An .npz with `ids`, int32 [n_layer, n_tokens, n_expert_used]; -1 in layers without experts.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import numpy.typing as npt

from noria.api.errors import ConfigError
from noria.cli.arguments import file_path
from noria.cli.files import load_array
from noria.cli.output import plural

Ids = npt.NDArray[np.int32]


def add_routing_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("routing")
    group.add_argument("--routing", type=file_path, metavar="FILE", help="use the experts named in this file (.npz)")


class Routing:
    """The experts to use, of a file or, without one, the router's own choice.

    Raises:
        ConfigError: the file cannot be read or holds something else.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._ids: Ids | None = None
        if path is not None:
            ids = load_array("--routing", path, "ids")
            if ids.ndim != 3 or not np.issubdtype(ids.dtype, np.integer):
                raise ConfigError(f"--routing {path}: 'ids' is {ids.dtype} {list(ids.shape)}, expected int32, 3 axes.")
            self._ids = ids.astype(np.int32)

    def check(self, n_tokens: int) -> None:
        """Fail before computing if the file ends before `n_tokens`.

        Raises:
            ConfigError: it does.
        """
        if self._ids is not None and self._ids.shape[1] < n_tokens:
            raise ConfigError(
                f"--routing {self.path} has the experts of {plural(self._ids.shape[1], 'token')}; "
                f"this run may compute {n_tokens}."
            )

    def part(self, first: int, n: int) -> Ids | None:
        """The experts of `n` tokens from position `first`."""
        return None if self._ids is None else self._ids[:, first : first + n]
