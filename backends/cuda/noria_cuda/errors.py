"""CUDA's errors as noria's."""

from __future__ import annotations

from cupy.cuda import driver, runtime

from noria.api.errors import DeviceError, DeviceLost, KernelLaunchError
from noria_cuda.cublas import CublasError

CUDA_ERRORS = (runtime.CUDARuntimeError, driver.CUDADriverError, CublasError)

OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
NOT_READY = 600  # cudaErrorNotReady
ALREADY_REGISTERED = 712  # cudaErrorHostMemoryAlreadyRegistered

# What a kernel did wrong while it ran: illegal address or instruction, misaligned address, assertion, ...
_KERNEL_FAULTS = frozenset((700, 710, *range(713, 720)))
# The GPU or its driver is gone: no or another device, ECC or NVLink errors, system not ready, unknown error.
_LOST = frozenset((46, 100, 101, 214, 220, 226, 802, 999))


def translate(device_id: str, error: Exception, what: str) -> DeviceError:
    """The error to raise for one of CuPy's; `what` failed.

    A fault of a kernel and a lost device stay: every later call on this process's context gets the same status.
    """
    status = getattr(error, "status", None)
    if status in _LOST:
        return DeviceLost(device_id, f"{what}: the device is lost ({error}). Restart the process; see dmesg for Xid.")
    if status in _KERNEL_FAULTS:
        return KernelLaunchError(
            device_id, f"{what}: a kernel failed while running ({error}). Nothing on the device can be used any more."
        )
    return KernelLaunchError(device_id, f"{what}: {error}")
