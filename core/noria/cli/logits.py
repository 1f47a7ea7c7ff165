"""`noria logits`: the model's numbers for given tokens, for comparing engines, backends and settings."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import numpy.typing as npt

from noria.api.errors import ConfigError
from noria.cli.engine import Engine, add_engine_arguments, add_model_argument, count, engine_config
from noria.cli.output import print_note
from noria.cli.routing import add_routing_arguments, forced_part, load_routing

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
    parser.add_argument("--greedy", type=count, default=0, metavar="N", help="continue greedily for N tokens")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="OUT.npz", help="file to write")
    parser.add_argument("--routing-out", type=Path, metavar="FILE", help="write the chosen experts to this file (.npz)")
    add_routing_arguments(parser)
    add_engine_arguments(parser)


def main(args: argparse.Namespace) -> int:
    tokens = read_tokens(args.tokens)
    if args.greedy < 0:
        raise ConfigError(f"--greedy is {args.greedy}; it must not be negative.")
    routing = load_routing(args.routing)
    check_writable(args.output)
    with Engine(args) as engine:
        n_all = len(tokens) + max(args.greedy - 1, 0)
        n_ctx = args.ctx_size if args.ctx_size is not None else max(n_all, 1)
        config = engine_config(args, engine.defaults, n_ctx=n_ctx, n_prompt=len(tokens), logits_all=True)
        session = engine.session(config)
        capture = args.routing_out is not None
        logits, ids = session.forward(
            tokens, logits_all=True, forced=forced_part(routing, 0, len(tokens)), capture=capture
        )
        captured = [ids]
        greedy: list[int] = []
        last = logits[-1]
        for i in range(args.greedy):
            greedy.append(int(np.argmax(last)))
            if i + 1 < args.greedy:
                forced = forced_part(routing, session.n_past, 1)
                step, ids = session.forward(greedy[-1:], forced=forced, capture=capture)
                captured.append(ids)
                last = step[-1]
        np.savez(args.output, logits=logits, greedy=np.array(greedy, np.int32))
        if capture:
            all_ids = np.concatenate([c for c in captured if c is not None], axis=1)
            np.savez(args.routing_out, ids=all_ids)
        engine.write_timeline()
    print_note(f"logits of {len(tokens)} tokens written to {args.output}")
    return 0


def read_tokens(text: str) -> npt.NDArray[np.int32]:
    """Ids from a list (`1,2,3`) or a file.

    Raises:
        ConfigError: there are none, or they are not numbers.
    """
    path = Path(text)
    try:
        if path.suffix == ".npz":
            with np.load(path) as archive:
                values = archive["tokens"]
        elif path.suffix == ".npy":
            values = np.load(path)
        else:
            words = path.read_text() if path.is_file() else text
            values = np.array([int(word) for word in words.replace(",", " ").split()], np.int64)
    except (OSError, KeyError, ValueError) as error:
        raise ConfigError(f"--tokens {text}: neither ids like 1,2,3 nor a file that holds them: {error}.") from error
    if values.ndim != 1 or not len(values) or not np.issubdtype(values.dtype, np.integer):
        raise ConfigError(f"--tokens {text}: expected a list of whole numbers, found {values.dtype} {values.shape}.")
    if values.min() < -(2**31) or values.max() >= 2**31:
        raise ConfigError(f"--tokens {text}: ids must fit 32 bits.")
    return np.asarray(values, np.int32)


def check_writable(path: Path) -> None:
    """Fail before computing if the result could not be written.

    Raises:
        ConfigError: the folder is missing or the file cannot be opened.
    """
    try:
        with open(path, "ab"):
            pass
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}.") from error
