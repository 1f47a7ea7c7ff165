"""Tensors as NumPy arrays: views of their elements, and activations of any type as f32."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from noria.api import ELEMENT_TYPES, Tensor
from noria.builtin.reference.memory import span_view

F32Array = npt.NDArray[np.float32]

ACTIVATION_TYPES = ("F32", "F16", "BF16")


def elements(tensor: Tensor) -> npt.NDArray[Any]:
    """A tensor of one of `ELEMENT_TYPES` in its own shape and type, without a copy."""
    return span_view(tensor.span, ELEMENT_TYPES[tensor.type]).reshape(tensor.shape)


def load(tensor: Tensor) -> F32Array:
    """Activations as f32: the memory itself where it is f32, otherwise a copy."""
    return to_f32(elements(tensor), tensor.type)


def store(tensor: Tensor, values: F32Array) -> None:
    """Write f32 values as activations, rounded to nearest even."""
    store_f32(elements(tensor), tensor.type, values)


def to_f32(array: npt.NDArray[Any], type: str) -> F32Array:
    """An array of an element type as contiguous f32, without a copy where it is that."""
    if type == "BF16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return np.ascontiguousarray(array, np.float32)


def store_f32(array: npt.NDArray[Any], type: str, values: F32Array) -> None:
    """The opposite of `to_f32`: write `values` into `array`."""
    if type == "BF16":
        bits = np.ascontiguousarray(values).view(np.uint32)
        rounded = bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))
        array[...] = np.where(np.isnan(values), bits | np.uint32(0x400000), rounded) >> 16
    else:
        array[...] = values
