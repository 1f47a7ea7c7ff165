"""What a command opens for one model, by the engine flags: plugins, file, devices, session."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from importlib.resources import files
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from noria.api import Device, DeviceKind
from noria.api.errors import ConfigError, ModelError, UnsupportedArchitecture
from noria.cli.files import check_outputs
from noria.cli.output import ProgressBar, plural, print_note
from noria.experts import Policy
from noria.gguf import ModelFile, open_model
from noria.models import HParams, Model
from noria.plugins import BackendRegistry, PluginManager, load_config
from noria.plugins.config import did_you_mean
from noria.runtime import EngineConfig, LoadMode, MemoryPlan, Session, Timeline, plan_memory
from noria.runtime.plan import Choice
from noria.runtime.timeline import WRITERS, TimelineWriter, find_writer
from noria.text import Tokenizer


def demo_model() -> Path:
    """The small trained model that comes with the package."""
    return Path(str(files("noria"))) / "data" / "demo-q4_k_m.gguf"


def flag_notes(hparams: HParams, config: EngineConfig, choice: Choice) -> list[str]:
    """Flags that do nothing here, or something else than they say."""
    notes = []
    if not hparams.n_expert and isinstance(config.n_cpu_moe, int) and config.n_cpu_moe:
        notes.append("-ncmoe and -cmoe do nothing: this model has no experts")
    if choice.n_ctx > hparams.n_ctx_train:
        notes.append(f"the context of {choice.n_ctx} tokens is longer than the {hparams.n_ctx_train} of the training")
    for flag, asked, n, whole in (
        ("-b", config.n_batch, choice.n_batch, "context"),
        ("-ub", config.n_ubatch, choice.n_ubatch, "batch"),
    ):
        if isinstance(asked, int) and asked > n:
            notes.append(f"{flag} {asked} means {n} here: the {whole} has no more tokens")
    return notes


class Engine:
    """What a command opens for one model. A context manager; closes in reverse order.

    Args:
        args: the engine flags.
        numbers: whether results are wanted and not only times, so that simulated devices are refused.
    """

    def __init__(self, args: argparse.Namespace, *, numbers: bool = False) -> None:
        self.args = args
        self.progress = ProgressBar()
        self.timeline = Timeline() if args.timeline else None
        self._stack = ExitStack()
        try:
            self.plugins = PluginManager(load_config(args.plugins))
            if self.timeline is not None:
                find_writer(args.timeline, self._writers())  # a name nobody can write is an error before the run
                check_outputs(args.timeline)
            self.registry = BackendRegistry(self.plugins)
            path = args.model or demo_model()
            self.file: ModelFile = self._stack.enter_context(open_model(path))
            self.model = self._build(str(path))
            self.devices = self._open_devices()
            if numbers:
                self._refuse_simulated()
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
        selection = self.args.backend if self.args.device is None else self.args.device
        infos = self.registry.resolve(selection, self.file.nbytes)
        return [self._stack.enter_context(self.registry.open(info.id)) for info in infos]

    def _refuse_simulated(self) -> None:
        for device in self.devices:
            if device.info.kind is DeviceKind.SIMULATED:
                raise ConfigError(
                    f"{device.info.id} is simulated and computes no numbers; use noria bench, noria plan "
                    f"or noria compare --no-logits."
                )

    def open_host(self) -> Device:
        """The reference device, for layers on the host and for ops a device lacks."""
        for device in self.devices:
            if device.info.backend == "reference" and self.args.n_gpu_layers is None:
                return device
        return self._stack.enter_context(self.registry.open("reference0"))

    def policies(self) -> dict[str, Policy]:
        return {name: spec.factory() for name, spec in self.plugins.policies.items()}

    def config(self, **changes: Any) -> EngineConfig:
        """The configuration that the flags describe; `changes` are the command's own.

        Raises:
            ConfigError: a value makes no sense.
        """
        args, defaults = self.args, self.plugins.config.policy
        prefetch = defaults.prefetch if args.prefetch is None else args.prefetch
        if prefetch not in (known := self.policies()):
            hint = did_you_mean(prefetch, known)
            raise ConfigError(f"no policy '{prefetch}' (--prefetch); there are {', '.join(known)}. {hint}".rstrip())
        values: dict[str, Any] = {
            "n_gpu_layers": args.n_gpu_layers,
            "n_cpu_moe": args.n_cpu_moe,
            "override_tensors": tuple(chain.from_iterable(args.override_tensor)),
            "n_ctx": args.ctx_size,
            "n_batch": args.batch_size,
            "n_ubatch": args.ubatch_size,
            "type_k": args.cache_type_k,
            "type_v": args.cache_type_v,
            "prefetch": prefetch,
            "prefetch_slots": defaults.prefetch_slots if args.prefetch_slots is None else args.prefetch_slots,
            "keep_slots": args.prefetch_slots is not None,
            "load_mode": LoadMode(args.load_mode),
            "fallback": args.fallback,
            "chaos_seed": args.chaos,
            "memory_nbytes": args.memory,
        }
        return EngineConfig(**(values | changes))

    def plan(self, config: EngineConfig) -> MemoryPlan:
        plan = plan_memory(self.file, self.model, self.devices, self.open_host, config)
        self._print_notes(flag_notes(self.model.hparams, config, plan.choice))
        return plan

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
        self._print_notes(
            [*session.notes, *flag_notes(self.model.hparams, config, session.plan.choice), *self._file_notes(session)]
        )
        return session

    @staticmethod
    def _print_notes(notes: list[str]) -> None:
        for note in notes:
            print_note(note)

    def _file_notes(self, session: Session) -> list[str]:
        """What is odd about the model file."""
        notes = []
        if session.unused:
            more = " ..." if len(session.unused) > 5 else ""
            notes.append(
                f"{plural(len(session.unused), 'tensor')} of the file not used: {', '.join(session.unused[:5])}{more}"
            )
        stats = [Path(path).stat() for path in self.file.paths]
        n_stored, nbytes = sum(stat.st_blocks for stat in stats) * 512, sum(stat.st_size for stat in stats)
        real = any(stage.device.info.kind is not DeviceKind.SIMULATED for stage in session.stages)
        if real and n_stored < nbytes // 2:
            notes.append(f"{self.file.path} is mostly a hole (a sparse file); weights read from it are zeros")
        return notes

    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            ModelError: it has none that can be used.
        """
        try:
            return Tokenizer.from_metadata(self.file.metadata)
        except ModelError as error:
            raise ModelError(
                f"{self.file.path}: {error} Without text, use noria logits --tokens or noria bench."
            ) from error

    def _writers(self) -> dict[str, TimelineWriter]:
        return WRITERS | {suffix: spec.write for suffix, spec in self.plugins.timeline_writers.items()}

    def write_timeline(self) -> None:
        if self.timeline is not None:
            path = self.args.timeline
            self.timeline.write(path, self._writers())
            hint = "; open it at https://ui.perfetto.dev" if path.name.endswith((".json", ".json.gz")) else ""
            print_note(f"timeline written to {path}{hint}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.close()
        self._stack.close()
