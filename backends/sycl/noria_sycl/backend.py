"""The SYCL backend: the contract and the plugin; it has no device yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from noria.api import API_VERSION, Backend, Device, ProbeResult
from noria.api.errors import BackendUnavailable

REASON = "not built yet: noria 0.1 has the contract and the plugin only"
HINT = "Use --backend reference; this backend will need PyOpenCL (pip install 'noria[sycl]')."


class SyclBackend(Backend):
    """Will run on GPUs of any vendor through OpenCL."""

    name = "sycl"
    api_version = API_VERSION

    def probe(self, options: Mapping[str, Any]) -> ProbeResult:
        return ProbeResult(reason=REASON, hint=HINT)

    def open(self, index: int, options: Mapping[str, Any]) -> Device:
        raise BackendUnavailable(self.name, REASON, HINT)
