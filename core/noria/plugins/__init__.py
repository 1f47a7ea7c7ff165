"""Plugins: hooks and the records they yield, for authors; the manager and the backends it found, for the core."""

from noria.plugins.backends import AUTO, BackendRegistry, BackendReport, BackendStatus
from noria.plugins.config import Config, load_config
from noria.plugins.hookspecs import hookimpl
from noria.plugins.manager import Catalog, PluginManager, PluginRecord, PluginStatus
from noria.plugins.types import ArchitectureSpec, BackendSpec, ConfigDefault, PolicySpec, WriterSpec

__all__ = [
    "AUTO",
    "ArchitectureSpec",
    "BackendRegistry",
    "BackendReport",
    "BackendSpec",
    "BackendStatus",
    "Catalog",
    "Config",
    "ConfigDefault",
    "PluginManager",
    "PluginRecord",
    "PluginStatus",
    "PolicySpec",
    "WriterSpec",
    "hookimpl",
    "load_config",
]
