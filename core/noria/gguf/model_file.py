"""A model, its files mapped: metadata, tensor table, and tensor data without a copy."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from noria.api.errors import GGUFError, ModelError
from noria.gguf.header import TensorInfo
from noria.gguf.metadata import Metadata
from noria.gguf.shards import Shard, open_shards

READ_NBYTES = 64 * 1024 * 1024


class ModelFile:
    """An open model. A context manager.

    Tensor data is the files themselves, mapped read-only and shared: pages are read when they are first touched and the
    system may drop them again. Views keep a mapping alive, so one that outlives `close` stays valid.

    Attributes:
        path: as it was opened; of any file of a split model.
        paths: of all its files.
        metadata: the key-value pairs.
        architecture: `general.architecture`.
        tensors: by name, in the order of the files.
        mappings: uint8 [nbytes] a file, read-only, page-aligned; `TensorInfo.shard` and `.offset` point into them.
        nbytes: of all files.
    """

    def __init__(self, path: str, shards: Sequence[Shard]) -> None:
        """`shards` are all of the model, in order; it owns their mappings from here on."""
        files = list(dict.fromkeys(shard.file for shard in shards))
        self.path = path
        self.paths: tuple[str, ...] = tuple(file.path for file in files)
        self.metadata: Metadata = shards[0].header.metadata
        self.tensors: dict[str, TensorInfo] = {
            tensor.name: replace(tensor, shard=files.index(shard.file))
            for shard in shards
            for tensor in shard.header.tensors.values()
        }
        self.mappings: tuple[NDArray[np.uint8], ...] = tuple(file.data for file in files)
        self.nbytes = sum(map(len, self.mappings))
        self._mappings = [file.mapping for file in files]

    @property
    def architecture(self) -> str:
        return self.metadata.architecture

    def tensor(self, name: str) -> TensorInfo:
        """The tensor of this name.

        Raises:
            GGUFError: the model has none.
        """
        try:
            return self.tensors[name]
        except KeyError:
            raise GGUFError(
                self.path, f"tensor '{name}'", "is missing, and the model cannot be used without it"
            ) from None

    def data(self, name: str) -> NDArray[np.uint8]:
        """The bytes of a tensor, uint8 [nbytes]: a read-only view of the mapping."""
        tensor = self.tensor(name)
        if not self.mappings:
            raise ModelError(f"{self.path}: is closed; tensor '{name}' cannot be read any more.")
        return self.mappings[tensor.shard][tensor.offset : tensor.offset + tensor.nbytes]

    def read_into(self, name: str, out: NDArray[np.uint8]) -> None:
        """Read the bytes of a tensor from the file into `out`, uint8 [nbytes], by large sequential reads.

        Unlike a copy out of `data` this maps no page of the file into the process.

        Raises:
            ModelError: the file cannot be read, or has become shorter since it was opened.
        """
        tensor = self.tensor(name)
        path = self.paths[tensor.shard]
        try:
            with open(path, "rb", buffering=0) as file:
                done = 0
                while done < tensor.nbytes:
                    n = os.preadv(file.fileno(), [out[done : done + READ_NBYTES].data], tensor.offset + done)
                    if not n:
                        raise ModelError(f"{path}: has become shorter: tensor '{name}' cannot be read.")
                    done += n
        except OSError as error:
            raise ModelError(f"{path}: tensor '{name}' cannot be read: {error.strerror}.") from None

    def expert_slab(self, name: str, expert: int) -> tuple[int, int]:
        """Where one expert's bytes of tensor `name` [n_expert, n_out, n_in] lie in its file: `(offset, nbytes)`."""
        tensor = self.tensor(name)
        if len(tensor.shape) != 3 or not 0 <= expert < tensor.shape[0]:
            raise IndexError(f"tensor '{name}' of shape {tensor.shape} has no expert {expert}")
        return tensor.offset + expert * tensor.slab_nbytes, tensor.slab_nbytes

    def close(self) -> None:
        """Unmap the files, or leave that to the last view of each. Metadata and tensor table stay readable."""
        self.mappings = ()
        for mapping in self._mappings:
            with suppress(BufferError):
                mapping.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def open_model(path: str | os.PathLike[str]) -> ModelFile:
    """Open a GGUF model, by any of its files.

    Raises:
        ModelError: a file cannot be read.
        GGUFError: what it holds is not a sound GGUF file, or not all of the model is there.
    """
    name = os.fspath(path)
    return ModelFile(name, open_shards(name))
