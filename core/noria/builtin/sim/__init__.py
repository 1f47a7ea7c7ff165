"""A device on a virtual clock: it computes no numbers, only when everything would happen."""

from noria.builtin.sim.backend import OPTIONS, SimBackend, SimDevice, check_options, open_sim
from noria.builtin.sim.clock import Lane, VirtualClock
from noria.builtin.sim.profiles import Profile, load_profiles
from noria.builtin.sim.queue import SimQueue, Work

__all__ = [
    "OPTIONS",
    "Lane",
    "Profile",
    "SimBackend",
    "SimDevice",
    "SimQueue",
    "VirtualClock",
    "Work",
    "check_options",
    "load_profiles",
    "open_sim",
]
