"""The key-value pairs of a model file, with typed access."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from noria.api.errors import GGUFError

T = TypeVar("T")


class StringArray(Sequence[str]):
    """The strings of one metadata array, decoded each time they are read.

    A vocabulary is some 300,000 short strings: as Python objects they would take 20 MB and most of the time to open a
    file, so it is kept as its bytes and where each string ends.

    Raises:
        GGUFError: on reading a string that is not UTF-8.
    """

    __slots__ = ("_blob", "_ends", "_key", "_path")

    def __init__(self, path: str, key: str, blob: bytes, ends: array[int]) -> None:
        """`blob`: each string after its 8-byte length, as in the file; `ends`: where each ends in `blob`."""
        self._path, self._key, self._blob, self._ends = path, key, blob, ends

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self._decode(i) for i in range(*index.indices(len(self)))]
        return self._decode(range(len(self))[index])

    def __iter__(self) -> Iterator[str]:
        return map(self._decode, range(len(self)))

    def _decode(self, index: int) -> str:
        start = (self._ends[index - 1] if index else 0) + 8
        try:
            return self._blob[start : self._ends[index]].decode()
        except UnicodeDecodeError as error:
            raise GGUFError(self._path, f"{self._key}[{index}]", f"is not UTF-8 ({error.reason})") from None


MetadataValue: TypeAlias = bool | int | float | str | StringArray | NDArray[Any]


class Metadata(Mapping[str, MetadataValue]):
    """Values by key: Python scalars, `StringArray` for arrays of strings, NumPy arrays for the others.

    The typed getters say which key is missing or of another type; without a default the key is required. The `arch_`
    ones read a key of the model's architecture: `arch_int("expert_count")` reads `qwen3moe.expert_count`.
    """

    def __init__(self, path: str, values: Mapping[str, MetadataValue], spans: Mapping[str, tuple[int, int]]) -> None:
        self._path, self._values, self._spans = path, values, spans

    def __getitem__(self, key: str) -> MetadataValue:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    @property
    def architecture(self) -> str:
        """`general.architecture`."""
        return self.get_str("general.architecture")

    def span(self, key: str) -> tuple[int, int]:
        """Where the whole entry (key, type, value) lies in the file: `(start, end)` in bytes."""
        return self._spans[key]

    def get_int(self, key: str, default: int | None = None) -> int:
        return self._get(key, default, int, "an integer")

    def get_float(self, key: str, default: float | None = None) -> float:
        value = self._values.get(key)
        if isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        return self._get(key, default, float, "a number")

    def get_bool(self, key: str, default: bool | None = None) -> bool:
        return self._get(key, default, bool, "a bool")

    def get_str(self, key: str, default: str | None = None) -> str:
        return self._get(key, default, str, "a string")

    def get_strings(self, key: str) -> Sequence[str]:
        return self._get(key, None, StringArray, "an array of strings")

    def get_numbers(self, key: str) -> NDArray[Any]:
        return self._get(key, None, np.ndarray, "an array of numbers")

    def arch_int(self, name: str, default: int | None = None) -> int:
        return self.get_int(f"{self.architecture}.{name}", default)

    def arch_float(self, name: str, default: float | None = None) -> float:
        return self.get_float(f"{self.architecture}.{name}", default)

    def arch_bool(self, name: str, default: bool | None = None) -> bool:
        return self.get_bool(f"{self.architecture}.{name}", default)

    def arch_str(self, name: str, default: str | None = None) -> str:
        return self.get_str(f"{self.architecture}.{name}", default)

    def _get(self, key: str, default: T | None, kind: type[T], label: str) -> T:
        value = self._values.get(key)
        if value is None:
            if default is None:
                raise GGUFError(self._path, key, "is missing, and the model cannot be used without it")
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise GGUFError(self._path, key, f"should be {label}, but is {_describe(value)}")
        return value


def _describe(value: MetadataValue) -> str:
    if isinstance(value, StringArray):
        return f"an array of {len(value)} strings"
    if isinstance(value, np.ndarray):
        return f"an array of {len(value)} numbers"
    return f"{value!r:.80}"
