"""Routing files: which experts each token chose, to be written by one run and forced on another.

An .npz with `ids`, int32 [n_layer, n_tokens, n_expert_used]; -1 in layers without experts.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import numpy.typing as npt

from noria.api.errors import ConfigError

Ids = npt.NDArray[np.int32]


def add_routing_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("routing")
    group.add_argument("--routing", type=Path, metavar="FILE", help="use the experts named in this file (.npz)")


def load_routing(path: Path | None) -> Ids | None:
    """Read a routing file.

    Raises:
        ConfigError: it cannot be read or holds something else.
    """
    if path is None:
        return None
    try:
        with np.load(path) as archive:
            ids = archive["ids"]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"--routing {path}: not a routing file (.npz with 'ids'): {error}.") from error
    if ids.ndim != 3 or not np.issubdtype(ids.dtype, np.integer):
        raise ConfigError(f"--routing {path}: 'ids' is {ids.dtype} {list(ids.shape)}, expected int32 with 3 axes.")
    return np.asarray(ids, np.int32)


def forced_part(routing: Ids | None, first: int, n: int) -> Ids | None:
    """The routing of `n` tokens from position `first`; None where the file has none for them.

    Raises:
        ConfigError: it ends in the middle of them.
    """
    if routing is None or first >= routing.shape[1]:
        return None
    if first + n > routing.shape[1]:
        raise ConfigError(
            f"the routing file covers {routing.shape[1]} tokens, this run computes {first + n} of them at once; "
            f"give it all of them."
        )
    return routing[:, first : first + n]
