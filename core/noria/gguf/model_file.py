"""A model file, mapped: metadata, tensor table, and tensor data without a copy."""

from __future__ import annotations

import mmap
import os
import stat
from contextlib import suppress
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from noria.api.errors import GGUFError, ModelError
from noria.gguf.header import TensorInfo, read_header
from noria.gguf.metadata import Metadata

READ_NBYTES = 64 * 1024 * 1024


class ModelFile:
    """An open model. A context manager.

    Tensor data is the file itself, mapped read-only and shared: pages are read when they are first touched and the
    system may drop them again. Views keep the mapping alive, so one that outlives `close` stays valid.

    Attributes:
        path: as it was opened.
        metadata: the key-value pairs.
        architecture: `general.architecture`.
        tensors: by name, in the order of the file.
        mappings: uint8 [nbytes] a shard, read-only, page-aligned; `TensorInfo.shard` and `.offset` point into them.
        nbytes: of all files.
    """

    def __init__(self, path: str, mapping: mmap.mmap) -> None:
        """`mapping` is the whole file; the model owns it from here on."""
        data: NDArray[np.uint8] = np.frombuffer(mapping, np.uint8)
        header = read_header(path, data)
        self.path = path
        self.metadata: Metadata = header.metadata
        self.tensors: dict[str, TensorInfo] = header.tensors
        self.mappings: tuple[NDArray[np.uint8], ...] = (data,)
        self.nbytes = len(data)
        self._mapping = mapping

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
        try:
            with open(self.path, "rb", buffering=0) as file:
                done = 0
                while done < tensor.nbytes:
                    n = os.preadv(file.fileno(), [out[done : done + READ_NBYTES].data], tensor.offset + done)
                    if not n:
                        raise ModelError(f"{self.path}: has become shorter: tensor '{name}' cannot be read.")
                    done += n
        except OSError as error:
            raise ModelError(f"{self.path}: tensor '{name}' cannot be read: {error.strerror}.") from None

    def expert_slab(self, name: str, expert: int) -> tuple[int, int]:
        """Where one expert's bytes of tensor `name` [n_expert, n_out, n_in] lie in its file: `(offset, nbytes)`."""
        tensor = self.tensor(name)
        if len(tensor.shape) != 3 or not 0 <= expert < tensor.shape[0]:
            raise IndexError(f"tensor '{name}' of shape {tensor.shape} has no expert {expert}")
        return tensor.offset + expert * tensor.slab_nbytes, tensor.slab_nbytes

    def close(self) -> None:
        """Unmap the file, or leave that to the last view of it. Metadata and tensor table stay readable."""
        self.mappings = ()
        with suppress(BufferError):
            self._mapping.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def open_model(path: str | os.PathLike[str]) -> ModelFile:
    """Open a GGUF model.

    Raises:
        ModelError: the path cannot be read.
        GGUFError: what it holds is not a sound GGUF file.
    """
    name = os.fspath(path)
    try:
        if not stat.S_ISREG(os.stat(name).st_mode):
            raise ModelError(f"{name}: is not a file. Give the path of a .gguf file.")
        with open(name, "rb") as file:
            if not os.fstat(file.fileno()).st_size:
                raise GGUFError(name, "magic", "is missing: the file is empty")
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ModelError(f"{name}: no such file.") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{name}: cannot be read: {error}.") from None
    return ModelFile(name, mapping)
