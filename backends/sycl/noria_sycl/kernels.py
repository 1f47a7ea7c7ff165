"""The ops of a SYCL device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from noria.api import Kernels, OpQuery, Support

if TYPE_CHECKING:
    from noria_sycl.device import SyclDevice

TABLE_UNIT = 16  # bytes, as in cl/
KV_TYPES = ("F16", "Q8_0", "Q4_0")


class SyclKernels(Kernels):
    """Every op runs on the reference until it has a kernel."""

    device: SyclDevice

    def __init__(self, device: SyclDevice) -> None:
        super().__init__(device)

    def supports(self, query: OpQuery) -> Support:
        return Support.MISSING
