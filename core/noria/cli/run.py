"""`noria run`: text from a prompt."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count as numbers
from pathlib import Path

from noria.api.errors import ConfigError
from noria.cli.arguments import count, file_path, number
from noria.cli.engine import Engine
from noria.cli.flags import add_engine_arguments, add_model_argument
from noria.cli.output import plural, print_note
from noria.cli.routing import Routing, add_routing_arguments
from noria.runtime import Counters, Session
from noria.text import Detokenizer, Sampler, SamplerParams, Tokenizer

HELP = "generate text from a prompt"
DESCRIPTION = """\
Generate text from a prompt, streamed to stdout; figures of the run go to stderr.

  noria run -p "In the beginning" -cmoe            the built-in demo model, experts streamed through the ring
  noria run -m model.gguf -f prompt.txt -n 200     your own model, a prompt from a file
  noria run -m model.gguf -p "Hello" --temp 0      greedy: the same text every time
"""
ENDLESS = -1
INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    d = SamplerParams()
    add_model_argument(parser)
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("-p", "--prompt", metavar="TEXT", help="the prompt")
    prompt.add_argument("-f", "--file", type=file_path, metavar="FILE", help="read the prompt from a file (- = stdin)")
    parser.add_argument(
        "-n",
        "--predict",
        type=count,
        default=128,
        metavar="N",
        help="tokens to generate, -1 = until the text or the context ends (default: 128)",
    )
    group = parser.add_argument_group("sampling")
    for flag, convert, metavar, value, text in (
        ("--temp", number, "T", d.temperature, "temperature, 0 = greedy"),
        ("--top-k", count, "K", d.top_k, "the K most likely tokens, 0 or less = all"),
        ("--top-p", number, "P", d.top_p, "the most likely tokens of this probability together, 1 = all"),
        ("--min-p", number, "P", d.min_p, "tokens at least so likely as this share of the most likely one, 0 = all"),
    ):
        group.add_argument(flag, type=convert, default=value, metavar=metavar, help=f"{text} (default: {value})")
    group.add_argument("-s", "--seed", type=count, metavar="N", help="the same text every time (default: drawn)")
    group.add_argument("--ignore-eos", action="store_true", help="go on after an end-of-text token")
    add_routing_arguments(parser)
    add_engine_arguments(parser)


def main(args: argparse.Namespace) -> int:
    if args.predict < 1 and args.predict != ENDLESS:
        raise ConfigError(f"-n is {args.predict}; it must be at least 1, or {ENDLESS} to go on until the text ends.")
    sampler = Sampler(
        SamplerParams(temperature=args.temp, top_k=args.top_k, top_p=args.top_p, min_p=args.min_p, seed=args.seed)
    )
    prompt = args.prompt if args.prompt is not None else read_prompt(args.file)
    routing = Routing(args.routing)
    with Engine(args, numbers=True) as engine:
        tokenizer = engine.tokenizer()
        tokens = tokenizer.encode(prompt)
        if not tokens:
            raise ConfigError("the prompt is empty; give some text with -p or -f.")
        n_ctx = context_size(args, len(tokens), engine.model.hparams.n_ctx_train)
        n_most = n_ctx if args.predict == ENDLESS else min(len(tokens) + args.predict - 1, n_ctx)
        routing.check(n_most)
        session = engine.session(engine.config(n_ctx=n_ctx, n_prompt=len(tokens)))
        generation = Generation(session, tokenizer, sampler, routing)
        try:
            generation.run(tokens, args.predict, args.ignore_eos, engine.progress.of("prefill"))
        except KeyboardInterrupt:
            generation.end = "interrupted"
        print_note(generation.figures())
        engine.write_timeline()
    return INTERRUPTED if generation.end == "interrupted" else 0


def context_size(args: argparse.Namespace, n_prompt: int, n_ctx_train: int) -> int:
    """What -c says, or else what prompt and answer need, as far as the model was trained for it.

    Raises:
        ConfigError: the prompt does not fit.
    """
    n_ctx: int = min(max(4096, n_prompt + max(args.predict, 1)), n_ctx_train)
    n_ctx = n_ctx if args.ctx_size is None else args.ctx_size
    if n_prompt > n_ctx:
        raise ConfigError(
            f"the prompt has {plural(n_prompt, 'token')}, the context is {n_ctx} (-c); "
            f"the model was trained for {n_ctx_train}."
        )
    return n_ctx


@dataclass(slots=True)
class Phase:
    """One kind of work: how many tokens it computed, and what that took."""

    n_tokens: int = 0
    seconds: float = 0.0
    counters: Counters = field(default_factory=Counters)


class Generation:
    """Streams a prompt and what follows it, and keeps the figures, which an interrupted one has, too.

    Attributes:
        end: why it ended before its last token; empty if it did not.
    """

    def __init__(self, session: Session, tokenizer: Tokenizer, sampler: Sampler, routing: Routing) -> None:
        self.session, self.tokenizer, self.sampler, self.routing = session, tokenizer, sampler, routing
        self.end = ""
        self._phases: dict[str, Phase] = {}

    def run(self, tokens: list[int], n_predict: int, ignore_eos: bool, progress: Callable[[int, int], None]) -> None:
        session, detokenizer = self.session, Detokenizer(self.tokenizer, after=tokens[-1] if tokens else None)
        write(self.tokenizer.decode(tokens))
        try:
            with self._phase("prefill") as phase:
                logits, _ = session.forward(tokens, forced=self.routing.part(0, len(tokens)), progress=progress)
                phase.n_tokens = len(tokens)
            with self._phase("decode") as phase:
                for i in numbers(1):
                    token = self.sampler.sample(logits[-1])
                    if token in self.tokenizer.eog_ids and not ignore_eos:
                        self.end = "end of text"
                        break
                    write(detokenizer.push(token))
                    if i == n_predict:
                        break
                    if session.n_past == session.n_ctx:
                        self.end = f"the context of {session.n_ctx} tokens is full"
                        break
                    logits, _ = session.forward([token], forced=self.routing.part(session.n_past, 1))
                    phase.n_tokens += 1
        finally:
            write(detokenizer.flush() + "\n")

    @contextmanager
    def _phase(self, name: str) -> Iterator[Phase]:
        phase = self._phases[name] = Phase()
        begin = time.perf_counter()
        try:
            yield phase
        finally:
            phase.seconds, phase.counters = time.perf_counter() - begin, self.session.take_counters()

    def figures(self) -> str:
        """One line."""
        parts = [
            f"{name} {plural(phase.n_tokens, 'token')}, {phase.n_tokens / phase.seconds:.1f} tok/s"
            f"{describe(phase.counters)}"
            for name, phase in self._phases.items()
            if phase.n_tokens
        ]
        if self.end:
            parts.append(self.end)
        if not self.sampler.params.greedy:
            parts.append(f"seed {self.sampler.seed}")
        return " | ".join([*parts, f"peak device memory {self.session.vram_peak_nbytes / 2**20:.0f} MiB"])


def describe(counters: Counters) -> str:
    """How experts reached the kernels in these passes, in brackets; nothing in a dense model."""
    if not counters.movements:
        return ""
    parts = [f"experts {'/'.join(str(m) for m in sorted(counters.movements))}"]
    if counters.h2d_nbytes:
        parts.append(f"{counters.h2d_nbytes / 2**20:.0f} MiB at {counters.h2d_gbps:.1f} GB/s")
        parts.append(f"compute idle {counters.compute_idle_pct:.0f} %")
    if counters.gather_nbytes:
        parts.append(f"{counters.gather_nbytes / 2**20:.0f} MiB read in place")
    parts.append(f"{counters.expert_coverage_pct:.0f} % of experts used")
    return f" ({', '.join(parts)})"


def write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def read_prompt(path: Path) -> str:
    """The text of a file, or of stdin for `-`, without a byte order mark and without one newline at its end.

    Raises:
        ConfigError: it cannot be read, or is not UTF-8.
    """
    try:
        text = (sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()).decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"-f {path}: cannot read the prompt: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"-f {path}: the prompt is not UTF-8: see byte {error.start}.") from error
    return text.removesuffix("\n")
