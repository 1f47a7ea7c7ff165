"""`noria compare`: the same tests with different flags, run in turn, and whether the results agree."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from noria.api.errors import ConfigError
from noria.cli.arguments import count, number
from noria.cli.arms import Arm, add_arm_arguments, flags_of, parse_arms
from noria.cli.bench import add_test_arguments, make_tests
from noria.cli.comparison import Comparison
from noria.cli.files import check_outputs, written
from noria.cli.logits import read_tokens
from noria.cli.output import print_json, print_note, print_table, size_text
from noria.cli.routing import Ids
from noria.gguf import open_model

HELP = "run the same tests with different flags in turn: speed, counters, and whether results agree"
DESCRIPTION = """\
Compare two or more arms: tokens per second with the ratio to the first arm, what link and GPU did meanwhile, and
whether logits and greedy tokens agree. An arm is a set of engine flags, with a name or without; engine flags outside
of --arm are for all arms.

  noria compare -cmoe -p 256 -n 0 --arm "off: --prefetch off" --arm "ring: --prefetch whole"
  noria compare -m model.gguf -ncmoe 99 -p 2048 --arm "ub 512: -ub 512" --arm "ub 2048: -ub 2048"
  noria compare -m model.gguf --force-routing --arm "cpu: --backend reference" --arm "gpu: -dev cuda0"
  noria compare --arm "f16: -ctk f16" --arm "q8_0: -ctk q8_0 -ctv q8_0" --output kv.json

Each round runs every arm once, in an order that is rotated from round to round: A B C, B C A, C A B. A run is a
noria bench in a process of its own: it loads the model, warms up and repeats every test -r times; its figure is their
median. An arm's figure is the median over rounds. Ratios are taken within a round; shown are their median, smallest
and largest. Where that range holds 1, no difference was found. An arm that fails is reported and the others go on.
"""

N_TOKENS = 128  # whose logits are compared: enough that all experts of most models are used


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--arm", action="append", default=[], metavar='"[NAME:] FLAGS"', help="engine flags of one arm; two or more"
    )
    add_test_arguments(parser)
    group = parser.add_argument_group("rounds")
    group.add_argument("--rounds", type=count, default=3, metavar="N", help="how often each arm runs (default: 3)")
    group.add_argument(
        "--warmup-rounds", type=count, default=1, metavar="N", help="rounds before that do not count (default: 1)"
    )
    group.add_argument("--timeout", type=number, default=900, metavar="S", help="seconds for one run (default: 900)")
    group = parser.add_argument_group("results")
    group.add_argument(
        "--tokens",
        metavar="FILE_OR_IDS",
        help=f"compare logits of these, as in noria logits (default: {N_TOKENS} random)",
    )
    group.add_argument("--greedy", type=count, default=32, metavar="N", help="and N greedy tokens after (default: 32)")
    group.add_argument(
        "--force-routing", action="store_true", help="the others use the experts that the first arm chose"
    )
    group.add_argument("--no-logits", dest="logits", action="store_false", help="compare speed alone")
    parser.add_argument(
        "-o",
        "--output",
        type=output,
        default="md",
        metavar="FORMAT|FILE.json",
        help="md, json, or a file for the JSON beside the tables (default: md)",
    )
    add_arm_arguments(parser)


def output(text: str) -> str:
    if text not in ("md", "json") and not text.endswith(".json"):
        raise argparse.ArgumentTypeError(f"'{text}' is neither md nor json, nor a file whose name ends in .json")
    return text


def main(args: argparse.Namespace) -> int:
    tests = make_tests(args)
    arms = parse_arms(args.arm, tuple(flags_of(args)))
    if args.rounds < 1 or args.warmup_rounds < 0 or args.greedy < 0 or args.timeout <= 0:
        raise ConfigError("--rounds must be at least 1, --timeout above 0, --warmup-rounds and --greedy not negative.")
    tokens = make_tokens(args.tokens, arms[0]) if args.logits else None
    if args.output.endswith(".json"):
        check_outputs(Path(args.output))
    comparison = Comparison(arms, tests, args)
    comparison.run(tokens)
    result = comparison.record()
    if args.output == "json":
        print_json(result)
        return comparison.exit_code
    print_tables(result)
    if args.output != "md":
        with written(Path(args.output)) as file:
            file.write(json.dumps(result, indent=2).encode() + b"\n")
        print_note(f"all samples written to {args.output}")
    return comparison.exit_code


def make_tokens(text: str | None, arm: Arm) -> Ids:
    """The ids whose logits are compared: those of --tokens, or random ones of the arm's vocabulary."""
    if text is not None:
        return read_tokens(text)
    with open_model(arm.model) as file:
        n_vocab = file.tensors["token_embd.weight"].shape[0]
    return np.random.default_rng(0).integers(0, n_vocab, N_TOKENS, np.int32)


# --- tables -----------------------------------------------------------------------------------------------------------


def print_tables(result: dict[str, Any]) -> None:
    """A row a test and arm, then a row an arm: its flags and how its logits differ from the first arm's."""
    measured = [arm for arm in result["arms"] if arm["tests"]]
    by_test = zip(*(arm["tests"] for arm in measured), strict=True)
    rows = [speed_row(arm["name"], test) for tests in by_test for arm, test in zip(measured, tests, strict=True)]
    print_table(rows, right=[key for key in rows[0] if key not in ("test", "arm")] if rows else ())
    print()
    print_table([arm_row(arm) for arm in result["arms"]])
    for arm in measured:
        for note in arm["notes"]:
            print_note(f"arm '{arm['name']}': {note}")


def speed_row(arm: str, test: dict[str, Any]) -> dict[str, str]:
    c, ratio = test["counters"], test["ratio"]
    interval = "" if ratio is None else f"{test['ratio_min']:.3f} to {test['ratio_max']:.3f}"
    return {
        "test": test["test"],
        "arm": arm,
        "t/s": f"{test['median_ts']:.2f}",
        "ratio": "" if ratio is None else f"{ratio:.3f}",
        "min to max": interval,
        "h2d GB/s": f"{c['h2d_gbps']:.1f}",
        "idle %": f"{c['compute_idle_pct']:.1f}",
        "stall ms": f"{c['stall_ms']:.1f}",
        "experts %": f"{c['expert_coverage_pct']:.1f}",
        "VRAM": size_text(c["vram_peak_bytes"]),
    }


def arm_row(arm: dict[str, Any]) -> dict[str, str]:
    row = {"arm": arm["name"], "flags": arm["flags"]}
    if arm["error"] is not None:
        return row | {"logits": "failed", "greedy": ""}
    if (d := arm["logits"]) is None:
        return row | {"logits": "not compared", "greedy": ""}
    same = d["n_greedy_same"]
    greedy = f"{same} of {d['n_greedy']} the same" if same == d["n_greedy"] else f"differ from token {same + 1} on"
    if d["same_bits"]:
        return row | {"logits": "same bits", "greedy": greedy}
    return row | {"logits": "other shape" if d["nmse"] is None else f"NMSE {d['nmse']:.1e}", "greedy": greedy}
