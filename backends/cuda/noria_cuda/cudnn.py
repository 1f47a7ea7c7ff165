"""Attention of many rows by cuDNN, through torch: the fastest there is for f16 caches.

Torch allocates the outputs: 2 (n_head * d + 2 n_head) bytes a row twice over, which its pool keeps for the next call.
"""

from __future__ import annotations

import logging
from functools import cache, lru_cache
from typing import Any

from noria.api import Queue
from noria.api.errors import KernelLaunchError

log = logging.getLogger(__name__)


@cache
def _torch() -> Any:
    """torch, or None where it or cuDNN is missing."""
    try:
        import torch

        return torch if torch.backends.cudnn.is_available() else None
    except (ImportError, OSError) as error:
        log.info("attention runs without cuDNN: %s", error)
        return None


def is_available() -> bool:
    """Whether `attend` can be called. The first answer takes seconds: it imports torch."""
    return _torch() is not None


class _View:
    """Device memory as torch takes it from others."""

    def __init__(self, ptr: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        self.__cuda_array_interface__ = {
            "data": (ptr, False),
            "shape": shape,
            "strides": tuple(2 * stride for stride in strides),
            "typestr": "<f2",
            "version": 3,
        }


@lru_cache(maxsize=4096)
def f16_tensor(device: int, ptr: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    """f16 numbers at an address, without a copy; strides in numbers."""
    return _torch().as_tensor(_View(ptr, shape, strides), device=f"cuda:{device}")


@lru_cache(maxsize=16)
def _stream(device: int, ptr: int) -> Any:
    return _torch().cuda.ExternalStream(ptr, device=device)


def attend(queue: Queue, q: Any, k: Any, v: Any, scale: float, *, is_causal: bool) -> tuple[Any, Any]:
    """Attention [1, n_head, n, d] of f16 tensors of torch, on a queue's stream.

    Args:
        q: [1, n_head, n, d], strided; k, v: [1, n_head_kv, n_kv, d].
        is_causal: row i sees keys up to i; otherwise all rows see all keys.

    Returns:
        Values in memory as [n, n_head, d], and the logarithms of the sums of their weights, F32 [n_head, n].

    Raises:
        KernelLaunchError: cuDNN refused, or there is no memory for the output.
    """
    torch = _torch()
    device = queue.device.ordinal  # type: ignore[attr-defined]
    try:
        with torch.cuda.stream(_stream(device, queue.stream_ptr)):  # type: ignore[attr-defined]
            out, log_sum = torch.ops.aten._scaled_dot_product_cudnn_attention(
                q, k, v, None, True, 0.0, is_causal, False, scale=scale
            )[:2]
            return out.transpose(1, 2).contiguous(), log_sum.contiguous()
    except RuntimeError as error:
        raise KernelLaunchError(queue.device.info.id, f"{queue.name}: attention by cuDNN: {error}") from error
