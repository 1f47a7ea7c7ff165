"""cuBLAS: the five functions that are needed, through ctypes.

Source: NVIDIA, "cuBLAS" (cublas_v2.h).
"""

from __future__ import annotations

import ctypes
from weakref import WeakKeyDictionary

from noria.api import Queue
from noria_cuda.libraries import load_library

WORKSPACE_NBYTES = 32 * 2**20  # what NVIDIA advises for sm_90; less makes some products slower

_N, _T = 0, 1  # CUBLAS_OP_N, CUBLAS_OP_T
_TYPES = {"F32": 0, "F16": 2, "BF16": 14}  # cudaDataType
_COMPUTE_F32 = 68  # CUBLAS_COMPUTE_32F
_DEFAULT = -1  # CUBLAS_GEMM_DEFAULT


class CublasError(Exception):
    """A call failed; the text says which and how."""


def _library() -> ctypes.CDLL:
    return load_library("cublas")


class Cublas:
    """A handle on one stream. It allocates no workspace of its own: each call is given one."""

    def __init__(self, stream: int) -> None:
        self._handle = ctypes.c_void_p()
        self._workspace = 0
        self._alpha, self._zero, self._one = ctypes.c_float(1), ctypes.c_float(0), ctypes.c_float(1)
        _check("create", _library().cublasCreate_v2(ctypes.byref(self._handle)))
        _check("set stream", _library().cublasSetStream_v2(self._handle, ctypes.c_void_p(stream)))

    def matmul(
        self,
        out: int,
        out_type: str,
        w: int,
        x: int,
        type: str,
        shape: tuple[int, int, int],
        out_stride: int,
        *,
        accumulate: bool,
        workspace: int,
    ) -> None:
        """out (+)= x @ w.T, f32 accumulation; `out`, `w`, `x` and `workspace` are addresses.

        Args:
            shape: (n, n_out, n_in): x is [n, n_in], w [n_out, n_in], out [n, n_out].
            out_stride: numbers from one row of `out` to the next.
            workspace: WORKSPACE_NBYTES bytes.
        """
        n, n_out, n_in = shape
        library = _library()
        if workspace != self._workspace:
            status = library.cublasSetWorkspace_v2(
                self._handle, ctypes.c_void_p(workspace), ctypes.c_size_t(WORKSPACE_NBYTES)
            )
            _check("set workspace", status)
            self._workspace = workspace
        beta = self._one if accumulate else self._zero
        status = library.cublasGemmEx(
            self._handle,
            *(_T, _N, n_out, n, n_in),
            ctypes.byref(self._alpha),
            *(ctypes.c_void_p(w), _TYPES[type], n_in),
            *(ctypes.c_void_p(x), _TYPES[type], n_in),
            ctypes.byref(beta),
            *(ctypes.c_void_p(out), _TYPES[out_type], out_stride),
            *(_COMPUTE_F32, _DEFAULT),
        )
        _check("gemm", status)

    def __del__(self) -> None:
        _library().cublasDestroy_v2(self._handle)


_of_queues: WeakKeyDictionary[Queue, Cublas] = WeakKeyDictionary()


def cublas_of(queue: Queue) -> Cublas:
    """The handle on a queue's stream; made when it is first needed, which takes a while."""
    cublas = _of_queues.get(queue)
    if cublas is None:
        cublas = _of_queues[queue] = Cublas(queue.stream_ptr)  # type: ignore[attr-defined]
    return cublas


def _check(what: str, status: int) -> None:
    if status:
        raise CublasError(f"cuBLAS, {what}: status {status}")
