"""What a device can do. The scheduler reads capabilities and never a backend's name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCaps:
    """Capabilities of one open device. Defaults describe the least able device that can run at all.

    Attributes:
        async_copy: a copy enqueued on a COPY queue returns to the host before it is complete.
        copy_queues: copy queues that run beside the compute queue; 0 = copies share the compute queue.
        device_wait: `Queue.wait` is enforced by the device; otherwise it blocks the host until the event is done.
        blocking_submit: submitting compute or copying may block the host until the work is done, so the order of
            submissions decides what overlaps.
        event_timing: `Event.timestamp_ns` is not None once the event is done.
        pinned_host: `Device.alloc_host` gives page-locked memory.
        host_register: `Device.register_host` can page-lock memory that already exists, such as a mapped file.
        host_gather: a kernel may read pinned or registered host memory, so `ExpertTable.spans` may be host spans.
        region_copy: a copy may start inside a buffer; otherwise only whole buffers are copied.
        unified_memory: host and device share one RAM; moving experts is pointless.
        programs: `Queue.program` is replayed by the device or driver (not merely call by call).
        activation_type: type in which intermediate activations are fastest ("F32", "F16", "BF16").
        kv_types: types in which attention can read the KV cache.
        table_unit: bytes that one step of an `ExpertTable` offset stands for (>= 16).
        copy_alignment: offsets in device memory and sizes of copies are multiples of this many bytes; host memory may
            be copied from and to any offset, and a copy that ends with one of its two buffers may have any size. It
            divides `table_unit` and `buffer_alignment`, so what is copied beyond an end is padding.
        buffer_alignment: offsets of tensors inside a buffer are multiples of this many bytes.
        max_buffer_nbytes: largest single allocation.
        max_buffers: how many allocations may live at once; None = no limit.
    """

    async_copy: bool = False
    copy_queues: int = 0
    device_wait: bool = False
    blocking_submit: bool = False
    event_timing: bool = False
    pinned_host: bool = False
    host_register: bool = False
    host_gather: bool = False
    region_copy: bool = True
    unified_memory: bool = False
    programs: bool = False
    activation_type: str = "F32"
    kv_types: tuple[str, ...] = ("F16",)
    table_unit: int = 16
    copy_alignment: int = 4
    buffer_alignment: int = 256
    max_buffer_nbytes: int = 2**63 - 1
    max_buffers: int | None = None
