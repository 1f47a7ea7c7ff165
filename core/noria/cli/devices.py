"""`noria devices`: what this machine can run on, and why not on the rest."""

from __future__ import annotations

import argparse
import textwrap
from dataclasses import asdict
from typing import Any

from noria.api import DeviceCaps, DeviceInfo, DeviceKind
from noria.api.errors import BackendUnavailable, NoriaError
from noria.cli.output import add_format_argument, print_json, print_table, size_text
from noria.plugins import BackendRegistry, BackendReport, BackendStatus, PluginManager, PluginStatus, load_config

HELP = "list backends and devices, and why some cannot be used"
DESCRIPTION = """\
List every backend that a plugin offers and its devices. For one that cannot be used: why, and what to do about it.
Names of the first column are what -dev takes; a name without its number is what --backend takes.

  noria devices                   what can be used here
  noria devices --caps            what each device can do as well
  noria devices -o json           everything, for scripts

plugins.toml orders, disables and configures backends; the last lines say which one was read.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--caps", action="store_true", help="open each device and list its capabilities (md)")
    add_format_argument(parser)


def main(args: argparse.Namespace) -> int:
    plugins = PluginManager(load_config(args.plugins))
    registry = BackendRegistry(plugins)
    reports = registry.probe_all()
    if args.output == "json":
        print_json(describe(plugins, registry, reports))
        return 0
    print_table([row for report in reports for row in device_rows(report)], right=("memory",))
    for report in reports:
        if report.status is not BackendStatus.USABLE:
            print_paragraph(f"{report.name} ({report.spec.summary}), {report.status}: {problem(report)}")
    if args.caps:
        print()
        print_caps(registry, [info for report in reports for info in report.probe.devices])
    for record in plugins.records:
        if record.status is not PluginStatus.LOADED:
            print_paragraph(f"plugin '{record.name}' of {record.dist}, {record.status}: {record.reason}")
    found = f"{plugins.config.path} ({plugins.config.found_by})" if plugins.config.path else "none; these are defaults"
    print(f"\n--backend auto: {auto_words(registry)}\nplugins.toml: {found}")
    return 0


AUTO_BECAUSE = {
    DeviceKind.GPU: "the first GPU",
    DeviceKind.INTEGRATED: "the first GPU; it shares the host's RAM",
    DeviceKind.CPU: "no GPU can be used",
}


def auto_device(registry: BackendRegistry) -> DeviceInfo | None:
    """The device that `--backend auto` means."""
    try:
        return registry.resolve()[0]
    except BackendUnavailable:
        return None


def auto_words(registry: BackendRegistry) -> str:
    """The device that `--backend auto` means, and why."""
    auto = auto_device(registry)
    if auto is None:
        return "nothing can be used"
    words = f"{auto.id} ({AUTO_BECAUSE[auto.kind]})"
    least = registry.plugins.backends[auto.backend].cpu_from_nbytes
    if auto.kind is DeviceKind.CPU and least:
        small = registry.resolve(model_nbytes=least - 1)[0]
        words += f"; {small.id} for models of less than {size_text(least)}"
    return words


def problem(report: BackendReport) -> str:
    """Why a backend cannot be used, and what to do about it."""
    return f"{report.probe.reason}. {report.probe.hint}".rstrip()


def print_paragraph(text: str) -> None:
    print("\n" + textwrap.fill(text, 110, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False))


# --- tables -----------------------------------------------------------------------------------------------------------


def device_rows(report: BackendReport) -> list[dict[str, str]]:
    """A row a device, or one for a backend without any."""
    if not report.probe.devices:
        return [_row(report.name, "", str(report.spec.kind), "", "", "", report.status)]
    return [
        _row(i.id, i.name, str(i.kind), size_text(i.memory_nbytes), i.arch, i.driver, report.status)
        for i in report.probe.devices
    ]


def _row(id: str, name: str, kind: str, memory: str, arch: str, driver: str, status: BackendStatus) -> dict[str, str]:
    return {
        "device": id,
        "name": name,
        "kind": kind,
        "memory": memory,
        "arch": arch,
        "driver": driver,
        "status": str(status),
    }


def print_caps(registry: BackendRegistry, infos: list[DeviceInfo]) -> None:
    rows, failed = [], []
    for info in infos:
        try:
            with registry.open(info.id) as device:
                rows.append(caps_row(info.id, device.caps))
        except NoriaError as error:
            failed.append(str(error))
    print_table(rows)
    for text in failed:
        print_paragraph(text)


def caps_row(id: str, caps: DeviceCaps) -> dict[str, str]:
    """`act`: type of activations; `queues`: copy queues beside the compute queue."""
    words = {
        "async copy": caps.async_copy,
        "device wait": caps.device_wait,
        "blocking submit": caps.blocking_submit,
        "pinned": caps.pinned_host,
        "register": caps.host_register,
        "gather": caps.host_gather,
        "programs": caps.programs,
        "unified": caps.unified_memory,
    }
    return {
        "device": id,
        "act": caps.activation_type,
        "KV types": " ".join(caps.kv_types),
        "queues": str(caps.copy_queues),
        "capabilities": ", ".join(word for word, has in words.items() if has),
    }


# --- json -------------------------------------------------------------------------------------------------------------


def describe(plugins: PluginManager, registry: BackendRegistry, reports: list[BackendReport]) -> dict[str, Any]:
    """Everything that is known, for scripts."""
    config, auto = plugins.config, auto_device(registry)
    return {
        "plugins_toml": str(config.path) if config.path else None,
        "found_by": config.found_by,
        "auto": auto.id if auto else None,
        "backends": [
            {
                "name": report.name,
                "summary": report.spec.summary,
                "dist": report.dist,
                "status": str(report.status),
                "reason": report.probe.reason,
                "remedy": report.probe.hint,
                "devices": [describe_device(registry, info) for info in report.probe.devices],
            }
            for report in reports
        ],
        "plugins": [asdict(record) for record in plugins.records],
    }


def describe_device(registry: BackendRegistry, info: DeviceInfo) -> dict[str, Any]:
    """A device with its capabilities, or with the error that opening it gave."""
    caps: dict[str, Any] | None = None
    error = ""
    try:
        with registry.open(info.id) as device:
            caps = asdict(device.caps)
    except NoriaError as failure:
        error = str(failure)
    return {"id": info.id, **asdict(info), "caps": caps, "error": error}
