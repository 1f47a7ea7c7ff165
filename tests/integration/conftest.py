"""Commands, run in this process as a user would run them in an empty folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from noria.cli.main import main


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def noria(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """`noria("plan", "-c", 512)`, without the plugins.toml and the installed plugins of this machine."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NORIA_PLUGINS", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr("noria.plugins.manager.entry_points", lambda group: [])

    def run(*argv: object) -> Result:
        capsys.readouterr()
        try:
            code = main([str(word) for word in argv])
        except SystemExit as exit:  # argparse's own errors
            code = int(exit.code or 0)
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return run
