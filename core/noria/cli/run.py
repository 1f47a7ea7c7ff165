"""`noria run`: text from a prompt."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

from noria.api.errors import ConfigError
from noria.cli.engine import Engine, add_engine_arguments, add_model_argument, count, engine_config
from noria.cli.output import print_note
from noria.cli.routing import Ids, add_routing_arguments, forced_part, load_routing
from noria.runtime import Counters, Session
from noria.text import Detokenizer, Sampler, SamplerParams, Tokenizer

HELP = "generate text from a prompt"
DESCRIPTION = """\
Generate text from a prompt, streamed to stdout; figures of the run go to stderr.

  noria run -p "In the beginning" -cmoe            the built-in demo model, experts streamed through the ring
  noria run -m model.gguf -f prompt.txt -n 200     your own model, a prompt from a file
  noria run -m model.gguf -p "Hello" --temp 0      greedy: the same text every time
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    d = SamplerParams()
    add_model_argument(parser)
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("-p", "--prompt", metavar="TEXT", help="the prompt")
    prompt.add_argument("-f", "--file", type=Path, metavar="FILE", help="read the prompt from a file (- = stdin)")
    parser.add_argument(
        "-n", "--predict", type=count, default=128, metavar="N", help="tokens to generate (default: 128)"
    )
    group = parser.add_argument_group("sampling")
    group.add_argument("--temp", type=float, default=d.temperature, metavar="T", help=f"0 = greedy ({d.temperature})")
    group.add_argument("--top-k", type=count, default=d.top_k, metavar="K", help=f"0 = all ({d.top_k})")
    group.add_argument("--top-p", type=float, default=d.top_p, metavar="P", help=f"1 = all ({d.top_p})")
    group.add_argument("--min-p", type=float, default=d.min_p, metavar="P", help=f"0 = all ({d.min_p})")
    group.add_argument("-s", "--seed", type=count, default=None, metavar="N", help="the same text every time")
    group.add_argument("--ignore-eos", action="store_true", help="go on after an end-of-text token")
    add_routing_arguments(parser)
    add_engine_arguments(parser)


def main(args: argparse.Namespace) -> int:
    if args.predict < 1:
        raise ConfigError(f"-n is {args.predict}; it must be at least 1.")
    sampler = Sampler(
        SamplerParams(temperature=args.temp, top_k=args.top_k, top_p=args.top_p, min_p=args.min_p, seed=args.seed)
    )
    prompt = args.prompt if args.prompt is not None else read_prompt(args.file)
    routing = load_routing(args.routing)
    with Engine(args) as engine:
        tokenizer = Tokenizer.from_metadata(engine.file.metadata)
        tokens = tokenizer.encode(prompt)
        if not tokens:
            raise ConfigError("the prompt is empty; give some text with -p or -f.")
        n_ctx = args.ctx_size
        if n_ctx is None:
            n_ctx = min(max(4096, len(tokens) + args.predict), engine.model.hparams.n_ctx_train)
        config = engine_config(args, engine.defaults, n_ctx=n_ctx, n_prompt=len(tokens))
        session = engine.session(config)
        figures = generate(
            session,
            tokenizer,
            sampler,
            tokens,
            args.predict,
            routing=routing,
            ignore_eos=args.ignore_eos,
            progress=engine.progress.of("prefill"),
        )
        print_note(figures)
        engine.write_timeline()
    return 0


def generate(
    session: Session,
    tokenizer: Tokenizer,
    sampler: Sampler,
    tokens: list[int],
    n_predict: int,
    *,
    routing: Ids | None,
    ignore_eos: bool,
    progress: Callable[[int, int], None],
) -> str:
    """Stream the prompt and what follows it; returns one line of figures."""
    write(tokenizer.decode(tokens))
    begin = time.perf_counter()
    logits, _ = session.forward(tokens, forced=forced_part(routing, 0, len(tokens)), progress=progress)
    prefill_s, prefill = time.perf_counter() - begin, session.take_counters()
    detokenizer = Detokenizer(tokenizer)
    n_decoded, stopped = 0, ""
    begin = time.perf_counter()
    for i in range(n_predict):
        token = sampler.sample(logits[-1])
        if token in tokenizer.eog_ids and not ignore_eos:
            stopped = " (end of text)"
            break
        write(detokenizer.push(token))
        if session.n_past == session.n_ctx:
            stopped = f" (the context of {session.n_ctx} tokens is full; raise -c)"
            break
        if i + 1 < n_predict:
            logits, _ = session.forward([token], forced=forced_part(routing, session.n_past, 1))
            n_decoded += 1
    decode_s, decode = time.perf_counter() - begin, session.take_counters()
    write(detokenizer.flush() + "\n")
    line = f"prefill {len(tokens)} tokens, {len(tokens) / prefill_s:.1f} tok/s{describe(prefill)}"
    if n_decoded:
        line += f" | decode {n_decoded} tokens, {n_decoded / decode_s:.1f} tok/s{describe(decode)}"
    return f"{line}{stopped} | peak device memory {session.vram_peak_nbytes / 2**20:.0f} MiB"


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
    """The text of a file, or of stdin for `-`.

    Raises:
        ConfigError: it cannot be read, or is not UTF-8.
    """
    try:
        if str(path) == "-":
            return sys.stdin.read()
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"-f {path}: cannot read the prompt: {error}.") from error
