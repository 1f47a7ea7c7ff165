"""The pages tell the truth: what exists is documented, and what they show exists."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import cast

import pytest

import noria
from noria.api import Backend, Device, DeviceCaps, Event, HostBuffer, Kernels, Op, Queue
from noria.cli.bench import counters_record
from noria.cli.commands import make_parser
from noria.models import Model
from noria.plugins import ArchitectureSpec, BackendSpec, ConfigDefault, PluginManager, PolicySpec, WriterSpec, hookspecs
from noria.plugins.config import BackendTable, PluginsTable, PolicyTable, parse_config
from noria.runtime import Counters, Session

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"])
ACME = ROOT / "tests/plugins/acme"


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def codes(page: str) -> set[str]:
    """Everything in backticks in the text and tables of a page of docs."""
    return set(re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", read(DOCS / page), flags=re.M | re.S)))


def blocks(path: Path, language: str) -> list[tuple[str, str]]:
    """(title, content) of a page's fenced blocks of one language."""
    fence = rf'^```{language}(?: title="([^"]*)")?\n(.*?)^```$'
    return re.findall(fence, read(path), flags=re.M | re.S)


# --- what exists is documented ----------------------------------------------------------------------------------------


def test_every_capability_is_documented() -> None:
    assert {field.name for field in dataclasses.fields(DeviceCaps)} <= codes("write-a-backend.md")


def test_every_op_is_documented() -> None:
    assert set(map(str, Op)) <= codes("write-a-backend.md")


@pytest.mark.parametrize("cls", [Backend, Device, HostBuffer, Event, Queue])
def test_every_method_a_backend_must_write_is_documented(cls: type) -> None:
    assert inspect.isabstract(cls)
    assert set(cls.__abstractmethods__) <= codes("contract.md")  # type: ignore[attr-defined]


def test_every_method_a_backend_may_write_is_documented() -> None:
    listed = codes("contract.md")
    for cls in (Device, Queue, Kernels):
        for name, member in vars(cls).items():
            replaceable = callable(member) and not getattr(member, "__final__", False)
            if replaceable and re.match(r"_[a-z]", name) and name not in INTERNAL:
                assert name in listed, f"{cls.__name__}.{name}"


INTERNAL = {"_check", "_check_copy", "_check_open", "_report"}  # of the public methods themselves


def test_every_method_of_an_architecture_is_documented() -> None:
    shown = " ".join(codes("write-a-backend.md"))
    methods = [name for name, _ in inspect.getmembers(Model, inspect.isfunction) if not name.startswith("_")]
    assert methods
    assert [name for name in methods if f"{name}(" not in shown] == []


def test_every_hook_is_documented() -> None:
    listed = codes("plugins.md")
    for name, hook in inspect.getmembers(hookspecs, inspect.isfunction):
        if name.startswith("noria_"):
            assert f"{name}({', '.join(inspect.signature(hook).parameters)})" in listed
            assert f"\n### {name}\n" in read(DOCS / "plugins.md")


@pytest.mark.parametrize("spec", [BackendSpec, ArchitectureSpec, PolicySpec, WriterSpec, ConfigDefault])
def test_every_field_that_a_hook_yields_is_documented(spec: type) -> None:
    section = read(DOCS / "plugins.md").partition(f"| Field of `{spec.__name__}` |")[2].partition("\n\n")[0]
    assert [f"`{field.name}`" for field in dataclasses.fields(spec)] == re.findall(r"^\| (`\w+`) \|", section, re.M)


def test_every_key_of_plugins_toml_is_documented() -> None:
    tables = {"plugins": PluginsTable, "backends.NAME": BackendTable, "policy": PolicyTable}
    keys = {f"{table}.{field.name}" for table, cls in tables.items() for field in dataclasses.fields(cls)}
    section = read(DOCS / "plugins.md").partition("\n## plugins.toml\n")[2]
    assert keys | {"schema"} == set(
        re.findall(r"^\| `([a-zA-Z_.]+)` \|", section.partition("\nAn unknown key")[0], re.M)
    )


@pytest.mark.parametrize(("backend", "page"), [("reference", "plugins.md"), ("sim", "simulator.md")])
def test_every_option_of_a_builtin_backend_is_documented(backend: str, page: str) -> None:
    section = read(DOCS / page).partition(f"| Option of `[backends.{backend}.options]` |")[2].partition("\n\n")[0]
    options = PluginManager(external=False).backends[backend].options
    assert list(options) == re.findall(r"^\| `(\w+)` \|", section, re.M)


def test_every_counter_is_documented() -> None:
    idle = SimpleNamespace(rates=[], vram_peak_nbytes=0)
    assert set(counters_record(Counters(), cast(Session, idle))) <= codes("timeline-and-counters.md")


def commands() -> dict[str, argparse.ArgumentParser]:
    actions = make_parser()._subparsers._group_actions  # type: ignore[union-attr]  # argparse has no public way
    return dict(actions[0].choices)  # type: ignore[arg-type]


@pytest.mark.parametrize("command", list(commands()))
def test_every_flag_is_documented(command: str) -> None:
    page = read(DOCS / "commands.md")
    general, _, rest = page.partition(f"\n## noria {command}\n")
    section = rest.partition("\n## ")[0]
    assert section, "the command has no section"
    shown = set(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", general.partition("\n## noria ")[0] + section))
    flags = {flag for action in commands()[command]._actions for flag in action.option_strings}
    assert flags - {"-h", "--help"} - shown == set()


def test_the_page_of_ops_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    """Compared by the column of the reference, which is the same on every machine."""
    from noria.cli.main import main

    assert main(["ops", "--backend", "reference"]) == 0
    now, page = rows(capsys.readouterr().out), rows(read(DOCS / "ops.md"))
    assert len(now) > 50
    columns = ("op", "type", "reference0")
    assert [{c: row[c] for c in columns} for row in page] == now, "run: noria ops > docs/ops.md"


def rows(table: str) -> list[dict[str, str]]:
    """A Markdown table as records."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]


# --- what is shown exists ---------------------------------------------------------------------------------------------


def shown_commands() -> Iterator[tuple[str, str]]:
    """(page, command line) of every call of noria in the shell blocks of all pages."""
    for path in PAGES:
        for _, content in blocks(path, "sh"):
            for line in content.replace("\\\n", " ").splitlines():
                for part in re.split(r"&&|;|\|", line):
                    words = shlex.split(part, comments=True)
                    if words and words[0].rpartition("/")[2] == "noria":
                        yield path.name, shlex.join(words[1 : words.index(">")] if ">" in words else words[1:])


@pytest.mark.parametrize(("page", "command"), list(shown_commands()))
def test_every_command_shown_is_understood(page: str, command: str) -> None:
    make_parser().parse_args(shlex.split(command))


@pytest.mark.parametrize("path", [DOCS / "write-a-backend.md"], ids=lambda path: path.name)
def test_code_shown_is_the_code(path: Path) -> None:
    titled = [(title, code) for language in ("python", "toml") for title, code in blocks(path, language) if title]
    assert len(titled) > 5
    for title, code in titled:
        source = ROOT / "core" / title if title.startswith("noria/") else ACME / title
        assert code.rstrip("\n") in read(source), title


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_python_shown_compiles(path: Path) -> None:
    for title, code in blocks(path, "python"):
        compile(dedent(code), title or path.name, "exec")


def test_the_plugins_toml_shown_is_valid() -> None:
    examples = [code for _, code in blocks(DOCS / "plugins.md", "toml") if "schema" in code]
    assert examples
    for code in examples:
        parse_config(tomllib.loads(code))


def test_the_policy_shown_can_be_loaded() -> None:
    (code,) = [code for _, code in blocks(DOCS / "plugins.md", "python") if "noria_policies" in code]
    module: dict[str, object] = {"__name__": "example"}
    exec(compile(code, "plugins.md", "exec"), module)
    (spec,) = module["noria_policies"]()  # type: ignore[operator]
    assert isinstance(spec, PolicySpec)
    assert callable(spec.factory())


# --- the README, CI and the changelog ---------------------------------------------------------------------------------


def test_ci_runs_the_commands_of_the_readme() -> None:
    first_screen = [code.strip() for _, code in blocks(ROOT / "README.md", "sh")[:2]]
    lines = read(ROOT / ".ci/run").splitlines()
    assert [command for command in first_screen if command not in lines] == []
    for command in first_screen:
        assert "\n" not in command


def test_changelog_has_this_version() -> None:
    assert f"\n## [{noria.__version__}]" in read(ROOT / "CHANGELOG.md")


# --- links ------------------------------------------------------------------------------------------------------------


def anchors(path: Path) -> set[str]:
    """The anchors that headings of a page get, on GitHub and in the built pages alike."""
    text = re.sub(r"^```.*?^```", "", read(path), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_resolve(path: Path) -> None:
    text = re.sub(r"^```.*?^```", "", read(path), flags=re.M | re.S)
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?://", target):
            continue
        name, _, anchor = target.partition("#")
        page = (path.parent / name).resolve() if name else path
        if not page.is_file() or (anchor and anchor not in anchors(page)):
            broken.append(target)
    assert broken == []


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r"^ +- [^:\n]+: (\S+\.md)$", read(ROOT / "mkdocs.yml"), re.M)
    assert sorted(listed) == sorted(path.name for path in DOCS.glob("*.md"))


def test_pages_named_in_the_sources_exist() -> None:
    """Error texts send readers to docs."""
    named = [
        (source.name, *found)
        for source in (ROOT / "core").rglob("*.py")
        for found in re.findall(r"see (docs/[\w-]+\.md)(?:, '([\w ]+)')?", read(source))
    ]
    assert named
    for source, page, section in named:
        assert (ROOT / page).is_file(), f"{source}: {page}"
        assert not section or section in anchors(ROOT / page), f"{source}: {page} has no section '{section}'"
