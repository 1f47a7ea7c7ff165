"""The contract between the core and its backends: what a backend author codes against."""

from noria.api.backend import Backend, Device, DeviceInfo, DeviceKind, OptionSpec, ProbeResult
from noria.api.caps import DeviceCaps
from noria.api.kernels import Kernels
from noria.api.memory import Buffer, BufferUsage, CopyRegion, DeviceBuffer, HostBuffer, Span, align_up
from noria.api.ops import Gating, Glu, Op, OpQuery, RopeParams, RouterParams, Support
from noria.api.queue import Event, Observer, Program, Queue, QueueKind, merge_regions
from noria.api.tensor import (
    ELEMENT_TYPES,
    ExpertRows,
    ExpertTable,
    KVView,
    RowWindow,
    Tensor,
    tensor_nbytes,
    where_entry,
)
from noria.api.version import API_VERSION

__all__ = [
    "API_VERSION",
    "ELEMENT_TYPES",
    "Backend",
    "Buffer",
    "BufferUsage",
    "CopyRegion",
    "Device",
    "DeviceBuffer",
    "DeviceCaps",
    "DeviceInfo",
    "DeviceKind",
    "Event",
    "ExpertRows",
    "ExpertTable",
    "Gating",
    "Glu",
    "HostBuffer",
    "KVView",
    "Kernels",
    "Observer",
    "Op",
    "OpQuery",
    "OptionSpec",
    "ProbeResult",
    "Program",
    "Queue",
    "QueueKind",
    "RopeParams",
    "RouterParams",
    "RowWindow",
    "Span",
    "Support",
    "Tensor",
    "align_up",
    "merge_regions",
    "tensor_nbytes",
    "where_entry",
]
