"""What lives where: layers on devices, experts on the device or in host RAM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from noria.api import Device, Kernels
from noria.api.errors import ConfigError, GGUFError, UnsupportedQuantType
from noria.gguf import SUPPORTED_TYPES, ModelFile
from noria.models import Model, MoeSpec
from noria.runtime.config import AUTO, EngineConfig


@dataclass(frozen=True, kw_only=True)
class StageSpec:
    """A run of layers on one device. Stages follow each other; the hidden state passes between them by way of the host.

    Attributes:
        host: this is the host device: its kernels read experts where they are, nothing is streamed.
        embed, output: whether the token embedding and the output head are here.
    """

    device: Device
    kernels: Kernels
    layers: range
    host: bool
    embed: bool
    output: bool


def check_tensors(file: ModelFile, model: Model) -> list[str]:
    """Check the file's tensors against what the model wants; return the names of those it will not use.

    Raises:
        GGUFError: one is missing or has another shape.
        UnsupportedQuantType: one has a type that nothing here can read.
    """
    wanted = {spec.name: spec for spec in model.weights()}
    for spec in wanted.values():
        info = file.tensors.get(spec.name)
        if info is None:
            if not spec.optional:
                raise GGUFError(file.path, spec.name, "this tensor is missing")
            continue
        if info.shape != spec.shape:
            raise GGUFError(file.path, spec.name, f"has shape {list(info.shape)}, expected {list(spec.shape)}")
        if info.type not in SUPPORTED_TYPES:
            raise UnsupportedQuantType(file.path, spec.name, info.type, list(SUPPORTED_TYPES))
    return [name for name in file.tensors if name not in wanted]


def stage_specs(
    model: Model,
    devices: Sequence[tuple[Device, Kernels]],
    host: tuple[Device, Kernels] | None,
    n_gpu_layers: int | None,
) -> list[StageSpec]:
    """Share the layers out: the last `n_gpu_layers - 1` layers and the output go to `devices`, in proportion to their
    memory; what comes before goes to the host device.

    Raises:
        ConfigError: there are more devices than layers for them.
    """
    n_layer = model.hparams.n_layer
    n_device = n_layer + 1 if n_gpu_layers is None else min(n_gpu_layers, n_layer + 1)
    first = n_layer + 1 - n_device if n_device else n_layer
    parts: list[tuple[tuple[Device, Kernels], range, bool]] = []
    if first > 0 or not n_device:
        assert host is not None, "layers on the host need the host device"
        parts.append((host, range(first), True))
    if n_device:
        if n_layer - first < len(devices) and len(devices) > 1:
            raise ConfigError(
                f"-dev names {len(devices)} devices for {n_layer - first} layers. Name fewer devices, or raise -ngl."
            )
        memory = [max(device.memory_free(), 1) for device, _ in devices]
        ends = [first + round((n_layer - first) * sum(memory[: i + 1]) / sum(memory)) for i in range(len(devices))]
        begin = first
        for i, entry in enumerate(devices):
            end = max(begin + 1, min(ends[i], n_layer - (len(devices) - 1 - i))) if first < n_layer else n_layer
            parts.append((entry, range(begin, end), False))
            begin = end
    return [
        StageSpec(
            device=device,
            kernels=kernels,
            layers=layers,
            host=is_host,
            embed=i == 0,
            output=i == len(parts) - 1,
        )
        for i, ((device, kernels), layers, is_host) in enumerate(parts)
    ]


def moe_layers(model: Model, layers: Sequence[int]) -> dict[int, MoeSpec]:
    """Those of `layers` that have routed experts."""
    return {layer: moe for layer in layers if (moe := model.moe(layer)) is not None}


def spread(layers: Sequence[int], n: int) -> list[int]:
    """`n` of `layers`, spread evenly."""
    n = min(n, len(layers))
    return [layers[(2 * i + 1) * len(layers) // (2 * n)] for i in range(n)]


def offloaded_layers(model: Model, stages: Sequence[StageSpec], config: EngineConfig, n_cpu_moe: int) -> frozenset[int]:
    """Layers whose experts stay in host RAM: all of a host stage, those named by -ot, `n_cpu_moe` of the others."""
    on_host, free, fixed = [], [], []
    for stage in stages:
        for layer, moe in moe_layers(model, stage.layers).items():
            wish = config.override((moe.gate, moe.up, moe.down))
            if stage.host:
                on_host.append(layer)
            elif wish is None:
                free.append(layer)
            elif wish:
                fixed.append(layer)
    return frozenset(on_host + fixed + spread(free, n_cpu_moe))


def most_cpu_moe(model: Model, stages: Sequence[StageSpec], config: EngineConfig) -> int:
    """The largest -ncmoe that means something: device layers with experts that -ot says nothing about."""
    return sum(
        config.override((moe.gate, moe.up, moe.down)) is None
        for stage in stages
        if not stage.host
        for moe in moe_layers(model, stage.layers).values()
    )


def is_auto(value: int | str) -> bool:
    return value == AUTO
