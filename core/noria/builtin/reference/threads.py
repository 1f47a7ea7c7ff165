"""Threads that compute: a pool of our own, each of whose threads calls a single-threaded BLAS.

BLAS's own threads wait for each other by spinning. Small products then take longer with them than without, and many
times longer when the cores have something else to do, as the ring's copies. They also split a product by their number,
so its bits would depend on the machine's cores.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from threadpoolctl import threadpool_limits

_N_CORE = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
N_THREAD = min(_N_CORE, 32)
_WORTH_SHARING = 32_000_000  # multiply-adds, about a millisecond; handing work over takes some ten microseconds

_is_pool = threading.local()


def _enter_pool() -> None:
    _is_pool.here = True
    np.seterr(all="ignore")


_pool = ThreadPoolExecutor(N_THREAD, "noria-compute", initializer=_enter_pool)


def run_all(tasks: Sequence[Callable[[], None]], n_madd: int) -> None:
    """Run tasks that do not depend on each other, about `n_madd` multiply-adds in all; on all cores if worth it."""
    if len(tasks) == 1 or N_THREAD == 1 or n_madd < _WORTH_SHARING or hasattr(_is_pool, "here"):
        for task in tasks:
            task()
    else:
        for future in [_pool.submit(task) for task in tasks]:
            future.result()


class SingleThreadedBlas:
    """Holds BLAS to one thread while anyone wants it so. The limit is the process's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._n_user = 0
        self._limits: threadpool_limits | None = None

    def acquire(self) -> None:
        with self._lock:
            self._n_user += 1
            if self._limits is None:
                self._limits = threadpool_limits(1, user_api="blas")

    def release(self) -> None:
        with self._lock:
            self._n_user -= 1
            if self._n_user == 0 and self._limits is not None:
                self._limits.restore_original_limits()
                self._limits = None


single_threaded_blas = SingleThreadedBlas()
