"""noria: a wheel that lifts experts from system RAM to a GPU without ever stopping."""


def __getattr__(name: str) -> str:
    if name == "__version__":  # found when asked for: reading metadata would slow every start
        from importlib.metadata import version

        return version("noria")
    raise AttributeError(f"module 'noria' has no attribute '{name}'")
