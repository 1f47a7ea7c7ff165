"""Every hook is explained by an example that works, and importing plugins is cheap."""

from __future__ import annotations

import re
import subprocess
import sys
from inspect import getdoc
from types import ModuleType

import pluggy
import pytest

from noria.plugins import Config, ConfigDefault, hookspecs
from noria.plugins.manager import YIELDS

GPU_LIBRARIES = {"cupy", "torch", "vulkan", "kp", "pyopencl", "dpctl"}


def hooks() -> list[str]:
    return [name for name, value in vars(hookspecs).items() if hasattr(value, "noria_spec")]


def test_every_hook_has_a_record() -> None:
    assert hooks()
    assert set(hooks()) == set(YIELDS)


@pytest.mark.parametrize("hook", hooks())
def test_the_example_of_a_hook_is_a_plugin(hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    [code] = re.findall(r"```python\n(.*?)```", getdoc(getattr(hookspecs, hook)) or "", re.DOTALL)
    example = ModuleType("example")
    exec(re.sub(r"^    ", "", code, flags=re.MULTILINE), vars(example))
    manager = pluggy.PluginManager("noria")
    manager.add_hookspecs(hookspecs)
    manager.register(example)
    manager.check_pending()
    [result] = getattr(manager.hook, hook)(**({"config": Config()} if hook == "noria_configure" else {}))
    [record] = result
    assert type(record) is YIELDS[hook]
    if isinstance(record, ConfigDefault):
        assert Config().with_default(record.key, record.value, "example").policy.prefetch_slots == record.value


def test_plugin_modules_import_no_gpu_library() -> None:
    code = (
        "import sys, noria.plugins, noria.builtin.plugin, noria_cuda.plugin, noria_vulkan.plugin, noria_sycl.plugin;"
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    imported = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "noria_cuda" in imported
    assert not GPU_LIBRARIES & set(imported)
