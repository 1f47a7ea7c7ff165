"""Engine flags, the same for every command that computes, and the session they lead to."""

from __future__ import annotations

import argparse
import re
from contextlib import ExitStack
from importlib.resources import files
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from noria.api import Device
from noria.api.errors import ConfigError, UnsupportedArchitecture
from noria.cli.output import ProgressBar, print_note
from noria.experts import POLICIES, Policy
from noria.gguf import ModelFile, open_model
from noria.models import Model
from noria.plugins import BackendRegistry, PluginManager, load_config
from noria.runtime import AUTO, EngineConfig, LoadMode, MemoryPlan, Session, Timeline, plan_memory
from noria.runtime.timeline import WRITERS, TimelineWriter, find_writer

KV_TYPES = ("f32", "f16", "q8_0", "q4_0")
ALL_LAYERS = 9999


def demo_model() -> Path:
    """The small trained model that comes with the package."""
    return Path(str(files("noria"))) / "data" / "demo-q4_k_m.gguf"


# --- flags ------------------------------------------------------------------------------------------------------------


def count(text: str) -> int:
    """A whole number, for argparse."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number") from None


def count_or_auto(text: str) -> int | str:
    if text == AUTO:
        return AUTO
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is neither a whole number nor 'auto'") from None


def kv_type(text: str) -> str:
    if text.lower() not in KV_TYPES:
        raise argparse.ArgumentTypeError(f"'{text}' is no KV type; there are {', '.join(KV_TYPES)}")
    return text.upper()


def size(text: str) -> int:
    """Bytes: a number of MiB, or with a unit (`12GiB`, `8000MB`)."""
    units = {"": 2**20, "mib": 2**20, "gib": 2**30, "mb": 10**6, "gb": 10**9, "m": 2**20, "g": 2**30}
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text.strip())
    if not match or match[2].lower() not in units:
        raise argparse.ArgumentTypeError(f"'{text}' is no size; write for example 8192 (MiB) or 12GiB")
    return int(float(match[1]) * units[match[2].lower()])


def override(text: str) -> tuple[str, str]:
    pattern, equals, target = text.rpartition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"'{text}' is not PATTERN=CPU or PATTERN=GPU")
    return pattern, target.upper()


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-m", "--model", type=Path, default=None, metavar="FILE", help="GGUF model (default: the built-in demo model)"
    )


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `EngineConfig`, with llama.cpp's names where it has them."""
    group = parser.add_argument_group("devices and placement")
    group.add_argument("--backend", default=AUTO, metavar="NAME", help="auto, or a name from `noria devices`")
    group.add_argument("-dev", "--device", metavar="ID[,ID]", help="devices by id, e.g. cuda0 or vulkan0,vulkan1")
    group.add_argument("-ngl", "--n-gpu-layers", type=count, metavar="N", help="layers on the devices (default: all)")
    group.add_argument(
        "-ncmoe",
        "--n-cpu-moe",
        type=count_or_auto,
        default=AUTO,
        metavar="N",
        help="layers whose experts stay in host RAM, spread evenly (default: auto, as few as fit)",
    )
    group.add_argument(
        "-cmoe",
        "--cpu-moe",
        dest="n_cpu_moe",
        action="store_const",
        const=ALL_LAYERS,
        help="all experts stay in host RAM",
    )
    group.add_argument(
        "-ot",
        "--override-tensor",
        type=override,
        action="append",
        default=[],
        metavar="REGEX=CPU|GPU",
        help="place the experts whose tensor names match; the first match wins",
    )
    group.add_argument("-c", "--ctx-size", type=count, metavar="N", help="context length (default: 4096 at most)")
    group.add_argument("-ctk", "--cache-type-k", type=kv_type, default="F16", metavar="TYPE", help="KV type of K: f16")
    group.add_argument("-ctv", "--cache-type-v", type=kv_type, default="F16", metavar="TYPE", help="KV type of V: f16")
    group.add_argument("--memory", type=size, metavar="SIZE", help="plan for this much device memory, e.g. 12GiB")
    group = parser.add_argument_group("moving experts")
    group.add_argument(
        "-b",
        "--batch-size",
        type=count_or_auto,
        default=AUTO,
        metavar="N",
        help="tokens for which experts cross the bus once (default: auto, the whole prompt if it fits)",
    )
    group.add_argument(
        "-ub",
        "--ubatch-size",
        type=count_or_auto,
        default=AUTO,
        metavar="N",
        help="tokens computed at once (default: auto, 2048 if they fit)",
    )
    group.add_argument(
        "--prefetch", default=None, metavar="POLICY", help=f"{', '.join(POLICIES)} or a plugin's (default: auto)"
    )
    group.add_argument("--prefetch-slots", type=count, metavar="N", help="slots of the prefetch ring (default: 4)")
    group.add_argument(
        "--load-mode",
        choices=[mode.value for mode in LoadMode],
        default=LoadMode.AUTO.value,
        help="experts in RAM: page-lock the mapped file, or read into page-locked memory",
    )
    group.add_argument(
        "--no-fallback", dest="fallback", action="store_false", help="an op that the device lacks is an error"
    )
    group.add_argument("--chaos", type=count, metavar="SEED", help="poison slots and delay queues at random (testing)")
    group.add_argument("--timeline", type=Path, metavar="FILE", help="write a trace for ui.perfetto.dev")


def engine_config(args: argparse.Namespace, defaults: EngineDefaults, **changes: Any) -> EngineConfig:
    """The configuration the flags describe; `changes` are the command's own."""
    values: dict[str, Any] = {
        "n_gpu_layers": args.n_gpu_layers,
        "n_cpu_moe": args.n_cpu_moe,
        "override_tensors": tuple(args.override_tensor),
        "n_ctx": args.ctx_size,
        "n_batch": args.batch_size,
        "n_ubatch": args.ubatch_size,
        "type_k": args.cache_type_k,
        "type_v": args.cache_type_v,
        "prefetch": args.prefetch or defaults.prefetch,
        "prefetch_slots": defaults.prefetch_slots if args.prefetch_slots is None else args.prefetch_slots,
        "keep_slots": args.prefetch_slots is not None,
        "load_mode": LoadMode(args.load_mode),
        "fallback": args.fallback,
        "chaos_seed": args.chaos,
        "memory_nbytes": args.memory,
    }
    return EngineConfig(**(values | changes))


class EngineDefaults:
    """Defaults that plugins.toml sets."""

    def __init__(self, manager: PluginManager) -> None:
        self.prefetch = manager.config.policy.prefetch
        self.prefetch_slots = manager.config.policy.prefetch_slots


# --- opening ----------------------------------------------------------------------------------------------------------


class Engine:
    """What a command opens for one model: plugins, file, devices. A context manager; closes in reverse order."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.progress = ProgressBar()
        self.timeline = Timeline() if getattr(args, "timeline", None) else None
        self._stack = ExitStack()
        try:
            self.plugins = PluginManager(load_config(args.plugins))
            if self.timeline is not None:
                find_writer(args.timeline, self._writers())  # a name nobody can write is an error before the run
            self.registry = BackendRegistry(self.plugins)
            self.defaults = EngineDefaults(self.plugins)
            path = args.model or demo_model()
            self.file: ModelFile = self._stack.enter_context(open_model(path))
            self.model = self._build(str(path))
            self.devices = self._open_devices()
        except BaseException:
            self._stack.close()
            raise

    def _build(self, path: str) -> Model:
        known = self.plugins.architectures
        if self.file.architecture not in known:
            raise UnsupportedArchitecture(path, self.file.architecture, list(known))
        model: Model = known[self.file.architecture].build(self.file)
        return model

    def _open_devices(self) -> list[Device]:
        if self.args.device and self.args.backend != AUTO:
            raise ConfigError(f"--backend {self.args.backend} and -dev {self.args.device} say the same; give one.")
        infos = self.registry.resolve(self.args.device or self.args.backend)
        return [self._stack.enter_context(self.registry.open(info.id)) for info in infos]

    def open_host(self) -> Device:
        """The reference device, for layers on the host and for ops a device lacks."""
        for device in self.devices:
            if device.info.backend == "reference" and self.args.n_gpu_layers is None:
                return device
        return self._stack.enter_context(self.registry.open("reference0"))

    def policies(self) -> dict[str, Policy]:
        return POLICIES | {name: spec.factory() for name, spec in self.plugins.policies.items()}

    def plan(self, config: EngineConfig) -> MemoryPlan:
        return plan_memory(self.file, self.model, self.devices, self.open_host, config)

    def session(self, config: EngineConfig) -> Session:
        """Load the model; says what went another way than asked."""
        session = self._stack.enter_context(
            Session(
                self.file,
                self.model,
                self.devices,
                self.open_host,
                config,
                policies=self.policies(),
                progress=self.progress,
                timeline=self.timeline,
            )
        )
        self.progress.close()
        for note in session.notes:
            print_note(note)
        if session.unused:
            print_note(f"{len(session.unused)} tensors of the file are not used: {', '.join(session.unused[:5])} ...")
        return session

    def _writers(self) -> dict[str, TimelineWriter]:
        return WRITERS | {suffix: spec.write for suffix, spec in self.plugins.timeline_writers.items()}

    def write_timeline(self) -> None:
        if self.timeline is not None:
            self.timeline.write(self.args.timeline, self._writers())
            print_note(f"timeline written to {self.args.timeline}; open it at https://ui.perfetto.dev")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.close()
        self._stack.close()
