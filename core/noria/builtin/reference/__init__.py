"""The reference backend: NumPy on the CPU, with every op and every type. What it computes is what the ops mean."""

from noria.builtin.reference.backend import OPTIONS, ReferenceBackend, ReferenceDevice, check_options

__all__ = ["OPTIONS", "ReferenceBackend", "ReferenceDevice", "check_options"]
