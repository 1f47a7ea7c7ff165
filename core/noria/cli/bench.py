"""`noria bench`: tokens per second, and where the time went.

Times are those of the host's clock around `Session.forward`, reading the logits included. On a simulated device that
clock is the virtual one, so the figures are predictions and do not depend on the machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
import numpy.typing as npt

from noria.api import Device, DeviceKind
from noria.api.errors import ConfigError, NoriaError
from noria.cli.arguments import count, file_path
from noria.cli.engine import Engine
from noria.cli.facts import ModelFacts, amount_text, model_facts
from noria.cli.flags import add_model_argument
from noria.cli.output import add_format_argument, plural, print_error, size_text
from noria.cli.routing import Routing, add_routing_arguments
from noria.cli.rows import FORMS, Column, RowPrinter
from noria.cli.run import read_prompt
from noria.cli.sweep import Sweep, add_sweep_arguments, configurations
from noria.runtime import Counters, Session
from noria.runtime.link import LinkRates

HELP = "measure tokens per second, and where the time goes"
DESCRIPTION = """\
Measure prompt processing (pp) and text generation (tg): tokens per second, mean and standard deviation, with what the
link and the compute queue did meanwhile. Rows have llama-bench's keys, plus backend, device, policy and counters.

  noria bench -m model.gguf                             pp512 and tg128, five times each
  noria bench -m model.gguf -p 512,2048 -n 0 -r 3       two prompt lengths, no generation
  noria bench -m model.gguf --prefetch off,whole,auto   the same without the ring, with it, and as chosen by cost
  noria bench -m model.gguf -ub 512,2048 -ncmoe 20,28   every combination of both lists
  noria bench -m model.gguf --backend sim -p 2048       what a simulated device would do, in virtual time

Engine flags take comma lists: each combination loads the model once and runs all tests. Without -c the context is as
long as the longest test. Tokens are random unless --prompt-file gives text. An op that a device lacks is an error,
unless --fallback says otherwise. `counters` are those of the repetition with the median time.
"""

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Test:
    """`n_prompt` tokens at once, or `n_gen` one by one; the other is 0."""

    n_prompt: int = 0
    n_gen: int = 0

    @property
    def name(self) -> str:
        return f"pp{self.n_prompt}" if self.n_prompt else f"tg{self.n_gen}"

    @property
    def n_tokens(self) -> int:
        return self.n_prompt + self.n_gen


@dataclass(frozen=True, slots=True)
class Sample:
    """One repetition of a test."""

    ns: int
    counters: Counters


def counts(text: str) -> list[int]:
    return [count(part) for part in text.split(",")]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    add_test_arguments(parser)
    parser.add_argument(
        "-f", "--prompt-file", type=file_path, metavar="FILE", help="use the tokens of this text instead of random ones"
    )
    add_format_argument(parser, FORMS)
    add_routing_arguments(parser)
    add_sweep_arguments(parser)


def add_test_arguments(parser: argparse.ArgumentParser) -> None:
    """What is measured and how often."""
    parser.add_argument(
        "-p", "--n-prompt", type=counts, default=[512], metavar="N[,N]", help="prompt lengths, 0 = none (default: 512)"
    )
    parser.add_argument(
        "-n", "--n-gen", type=counts, default=[128], metavar="N[,N]", help="tokens to generate, 0 = none (default: 128)"
    )
    parser.add_argument(
        "-r", "--repetitions", type=count, default=5, metavar="N", help="how often each test runs (default: 5)"
    )
    parser.add_argument("--no-warmup", dest="warmup", action="store_false", help="count the first pass of a test too")


def main(args: argparse.Namespace) -> int:
    tests = make_tests(args)
    routing = Routing(args.routing)
    routing.check(max(test.n_tokens for test in tests))
    text = read_prompt(args.prompt_file) if args.prompt_file else None
    configs = list(configurations(args))
    if args.timeline and len(configs) > 1:
        raise ConfigError("--timeline shows one configuration; give every flag a single value.")
    code = 0
    with RowPrinter(args.output, columns(args)) as print_row:
        for config in configs:
            try:
                for row in run_tests(config.args, tests, text, routing):
                    print_row(row)
            except NoriaError as error:
                code = max(code, error.exit_code)
                print_error(f"{config.label}: {error}" if config.label else str(error))
    return code


def make_tests(args: argparse.Namespace) -> list[Test]:
    """The tests that -p and -n name.

    Raises:
        ConfigError: there are none, or a number makes no sense.
    """
    if min(args.n_prompt + args.n_gen) < 0:
        raise ConfigError("-p and -n must not be negative; 0 leaves out the test.")
    if args.repetitions < 1:
        raise ConfigError(f"-r is {args.repetitions}; it must be at least 1.")
    tests = [Test(n_prompt=n) for n in args.n_prompt if n] + [Test(n_gen=n) for n in args.n_gen if n]
    if not tests:
        raise ConfigError("there is nothing to measure: -p and -n are both 0.")
    return tests


# --- measuring --------------------------------------------------------------------------------------------------------


def run_tests(
    args: argparse.Namespace, tests: list[Test], text: str | None, routing: Routing
) -> Iterator[dict[str, Any]]:
    """Load the model once and run every test; a record each."""
    n_longest = max(test.n_tokens for test in tests)
    n_ctx = n_longest if args.ctx_size is None else args.ctx_size
    if n_ctx < n_longest:
        raise ConfigError(f"the context of {n_ctx} tokens is too short for a test of {plural(n_longest, 'token')}.")
    with Engine(args) as engine:
        tokens = make_tokens(engine, n_longest, text)
        n_prompt = max(test.n_prompt for test in tests) or 1
        session = engine.session(engine.config(n_ctx=n_ctx, n_prompt=n_prompt))
        facts = model_facts(engine.file, engine.model.hparams)
        clock = host_clock(engine.devices, devices_of(session))
        for test in tests:
            started = datetime.now(UTC)
            if args.warmup:
                warmup = test if test.n_prompt else Test(n_gen=1)
                measure(session, warmup, tokens, routing, clock)
            samples: list[Sample] = []
            for i in range(args.repetitions):
                engine.progress(test.name, i, args.repetitions, "run")
                samples.append(measure(session, test, tokens, routing, clock))
            engine.progress.close()
            yield record(test, samples, started, session, facts)
        engine.write_timeline()


def make_tokens(engine: Engine, n: int, text: str | None) -> Tokens:
    """`n` ids: random ones, the same every time, or those of `text`.

    Raises:
        ConfigError: the text is too short.
    """
    if text is None:
        return np.random.default_rng(0).integers(0, engine.model.hparams.n_vocab, n, np.int32)
    ids = engine.tokenizer().encode(text)
    if len(ids) < n:
        raise ConfigError(f"the text of --prompt-file has {plural(len(ids), 'token')}; the tests need {n}.")
    return np.array(ids[:n], np.int32)


def devices_of(session: Session) -> list[Device]:
    return list({id(stage.device): stage.device for stage in session.stages}.values())


def host_clock(chosen: list[Device], used: list[Device]) -> Callable[[], int]:
    """Host time in ns, as the devices see it: virtual where they are simulated.

    Raises:
        ConfigError: some are and some are not, so that no clock is right.
    """
    devices = list({device.info.id: device for device in [*used, *chosen]}.values())
    simulated = [device for device in devices if device.info.kind is DeviceKind.SIMULATED]
    if not simulated:
        return time.perf_counter_ns
    if len(simulated) < len(devices):
        names = " and ".join(device.info.id for device in devices)
        raise ConfigError(
            f"{names} cannot be measured together: a simulated device has a clock of its own. Leave out -ngl, "
            f"or name devices of one kind."
        )
    return lambda: simulated[0].clock_sync()[0]


def measure(session: Session, test: Test, tokens: Tokens, routing: Routing, clock: Callable[[], int]) -> Sample:
    """Run a test once, in an empty context."""
    session.reset()
    session.take_counters()
    step = test.n_prompt or 1
    begin = clock()
    for first in range(0, test.n_tokens, step):
        session.forward(tokens[first : first + step], forced=routing.part(first, step))
    return Sample(clock() - begin, session.take_counters())


# --- records ----------------------------------------------------------------------------------------------------------


def record(test: Test, samples: list[Sample], started: datetime, session: Session, facts: ModelFacts) -> dict[str, Any]:
    """A row, with the keys of llama-bench where it has them."""
    choice, config, n_layer = session.plan.choice, session.config, session.model.hparams.n_layer
    infos = [device.info for device in devices_of(session)]
    modes = {str(stage.store.mode) for stage in session.stages if stage.store is not None}
    ns = [sample.ns for sample in samples]
    ts = [test.n_tokens * 1e9 / n for n in ns]
    median = sorted(samples, key=lambda sample: sample.ns)[len(samples) // 2]
    return {
        "model_filename": session.model.file.path,
        "model_type": facts.type,
        "model_size": facts.nbytes,
        "model_n_params": facts.n_params,
        "backend": ",".join(dict.fromkeys(info.backend for info in infos)),
        "device": "/".join(info.id for info in infos),
        "gpu_info": ", ".join(info.name for info in infos),
        "n_ctx": choice.n_ctx,
        "n_batch": choice.n_batch,
        "n_ubatch": choice.n_ubatch,
        "n_gpu_layers": n_layer + 1 if config.n_gpu_layers is None else min(config.n_gpu_layers, n_layer + 1),
        "n_cpu_moe": choice.n_cpu_moe,
        "cpu_moe_size": session.plan.host_nbytes,
        "type_k": choice.type_k.lower(),
        "type_v": choice.type_v.lower(),
        "policy": config.prefetch,
        "prefetch_slots": choice.n_slots,
        "load_mode": ",".join(sorted(modes)) or str(config.load_mode),
        "memory": config.memory_nbytes,
        "chaos": config.chaos_seed,
        "n_prompt": test.n_prompt,
        "n_gen": test.n_gen,
        "n_depth": 0,
        "test_time": started.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "avg_ns": round(statistics.mean(ns)),
        "stddev_ns": round(statistics.stdev(ns)) if len(ns) > 1 else 0,
        "avg_ts": statistics.mean(ts),
        "stddev_ts": statistics.stdev(ts) if len(ts) > 1 else 0.0,
        "samples_ns": ns,
        "samples_ts": ts,
        "counters": counters_record(median.counters, session),
        "notes": session.notes,
    }


def counters_record(counters: Counters, session: Session) -> dict[str, Any]:
    """The counters, with the share of the link's measured peak and the memory that was needed."""
    peaks = [rates.h2d_gbps for rates in session.rates if isinstance(rates, LinkRates)]
    peak = statistics.mean(peaks) if peaks else 0.0
    return counters.record() | {
        "link_peak_gbps": round(peak, 3),
        "link_peak_pct": round(100 * counters.h2d_gbps / peak, 2) if peak else 0.0,
        "vram_peak_bytes": session.vram_peak_nbytes,
    }


def columns(args: argparse.Namespace) -> list[Column]:
    """Of the Markdown table: what always matters, and the flags that were given."""

    def field(title: str, key: str, width: int = 0) -> Column:
        return Column(title, lambda row: str(row[key]), width)

    def counter(title: str, key: str) -> Column:
        return Column(title, lambda row: f"{row['counters'][key]:.1f}", 5)

    def speed(row: Mapping[str, Any]) -> str:
        return f"{row['avg_ts']:.2f} ± {row['stddev_ts']:.2f}"

    given = {dest for dest, value in vars(args).items() if isinstance(value, Sweep) and value.given}
    return [
        Column("model", lambda row: row["model_type"], left=True),
        Column("size", lambda row: size_text(row["model_size"])),
        Column("params", lambda row: amount_text(row["model_n_params"])),
        Column("backend", lambda row: row["backend"], 10, left=True),
        *([field("dev", "device")] if "device" in given else []),
        *([field("ngl", "n_gpu_layers")] if "n_gpu_layers" in given else []),
        field("ncmoe", "n_cpu_moe"),
        field("b", "n_batch", 5),
        field("ub", "n_ubatch", 5),
        *([field("c", "n_ctx")] if "ctx_size" in given else []),
        *([field("ctk", "type_k", 4)] if "cache_type_k" in given else []),
        *([field("ctv", "type_v", 4)] if "cache_type_v" in given else []),
        *([field("prefetch", "policy", 9)] if "prefetch" in given else []),
        *([field("slots", "prefetch_slots")] if "prefetch_slots" in given else []),
        *([field("load", "load_mode")] if "load_mode" in given else []),
        *([Column("memory", lambda row: size_text(row["memory"]), 10)] if "memory" in given else []),
        *([field("chaos", "chaos")] if "chaos" in given else []),
        Column("test", lambda row: Test(n_prompt=row["n_prompt"], n_gen=row["n_gen"]).name, 6),
        Column("t/s", speed, 18),
        counter("h2d GB/s", "h2d_gbps"),
        counter("idle %", "compute_idle_pct"),
        counter("experts %", "expert_coverage_pct"),
    ]
