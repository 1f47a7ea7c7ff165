"""noria: a wheel that lifts experts from system RAM to a GPU without ever stopping."""

from importlib.metadata import version

__version__ = version("noria")
