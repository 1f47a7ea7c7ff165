"""`noria logits`: the model's numbers for given tokens, for comparing engines, backends and settings."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

import numpy as np

from noria.api.errors import ConfigError
from noria.cli.arguments import count, file_path
from noria.cli.engine import Engine
from noria.cli.files import check_outputs, load_array, written
from noria.cli.flags import add_engine_arguments, add_model_argument
from noria.cli.output import plural, print_note
from noria.cli.routing import Ids, Routing, add_routing_arguments

HELP = "write the logits of given tokens to a file"
DESCRIPTION = """\
Compute the logits of every given token and write them to an .npz file:
  logits  float32 [n_tokens, n_vocab]
  greedy  int32 [N], the greedy continuation (with --greedy N)

  noria logits -m model.gguf --tokens 1,2,3 -o out.npz
  noria logits -m model.gguf --tokens reference.npz --greedy 32 -ctk f32 -ctv f32 -o out.npz

To compare a 16-bit backend fairly, let both runs use the same experts: --routing-out on one, --routing on the other.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument(
        "--tokens",
        required=True,
        metavar="FILE_OR_IDS",
        help="ids as 1,2,3; or a file: .npz with 'tokens', .npy, or text with ids",
    )
    parser.add_argument(
        "--greedy", type=count, default=0, metavar="N", help="continue greedily for N tokens (default: 0)"
    )
    parser.add_argument("-o", "--output", type=file_path, required=True, metavar="OUT.npz", help="file to write")
    parser.add_argument(
        "--routing-out", type=file_path, metavar="FILE", help="write the chosen experts to this file (.npz)"
    )
    add_routing_arguments(parser)
    add_engine_arguments(parser)


def main(args: argparse.Namespace) -> int:
    tokens = read_tokens(args.tokens)
    if args.greedy < 0:
        raise ConfigError(f"--greedy is {args.greedy}; it must not be negative.")
    n_all = len(tokens) + max(args.greedy - 1, 0)  # the last greedy token is not computed
    routing = Routing(args.routing)
    routing.check(n_all)
    check_outputs(args.output, args.routing_out, args.timeline)
    with Engine(args, numbers=True) as engine:
        n_ctx = n_all if args.ctx_size is None else args.ctx_size
        session = engine.session(engine.config(n_ctx=n_ctx, n_prompt=len(tokens), logits_all=True))
        capture = args.routing_out is not None
        logits, ids = session.forward(tokens, logits_all=True, forced=routing.part(0, len(tokens)), capture=capture)
        captured = [ids]
        greedy: list[int] = []
        last = logits[-1]
        for i in range(args.greedy):
            greedy.append(int(np.argmax(last)))
            if i + 1 < args.greedy:
                step, ids = session.forward(greedy[-1:], forced=routing.part(session.n_past, 1), capture=capture)
                captured.append(ids)
                last = step[-1]
        with written(args.output) as file:
            np.savez(file, logits=logits, greedy=np.array(greedy, np.int32))
        if capture:
            with written(args.routing_out) as file:
                np.savez(file, ids=np.concatenate([c for c in captured if c is not None], axis=1))
        engine.write_timeline()
    print_note(f"logits of {plural(len(tokens), 'token')} written to {args.output}")
    return 0


def read_tokens(text: str) -> Ids:
    """Ids from a list (`1,2,3`) or a file.

    Raises:
        ConfigError: there are none, or they are not numbers.
    """
    path = Path(text)
    if path.suffix in (".npz", ".npy"):
        values = load_array("--tokens", path, "tokens")
    else:
        try:
            words = path.read_text(encoding="utf-8") if os.path.isfile(path) else text
            ids = re.split(r"\s*,\s*|\s+", words.strip()) if words.strip() else []
            values = np.array([int(word) for word in ids], np.int64)
        except (OSError, ValueError, OverflowError) as error:
            raise ConfigError(f"--tokens {text}: neither ids like 1,2,3 nor a file that holds them.") from error
    if values.ndim != 1 or not np.issubdtype(values.dtype, np.integer):
        raise ConfigError(f"--tokens {text}: expected a list of whole numbers, found {values.dtype} {values.shape}.")
    if not len(values):
        raise ConfigError(f"--tokens '{text}' is empty; give ids like 1,2,3 or a file that holds them.")
    if values.min() < 0 or values.max() >= 2**31:
        raise ConfigError(f"--tokens {text}: an id is negative or too large; ids are those of the model's vocabulary.")
    return values.astype(np.int32)
