"""`noria synth`: full-size models with random weights."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from noria.api.errors import ConfigError
from noria.cli.arguments import count, file_path
from noria.cli.output import ProgressBar, print_note, size_text
from noria.gguf.presets import PRESETS, Preset
from noria.gguf.quant_mix import QUANTS
from noria.gguf.shards import shard_name
from noria.gguf.synth import synthesize


def _shapes(preset: Preset) -> str:
    return (
        f"{preset.architecture}, {preset.n_layer} layers, width {preset.n_embd}, "
        f"{preset.n_expert} experts of {preset.n_ff_exp}, {preset.n_expert_used} used"
    )


HELP = "write a full-size model with random weights"
DESCRIPTION = f"""\
Write a model with the shapes and types of a real one and random weights: for measuring speed and planning memory
without a download. Routing spreads over the experts; the text it generates means nothing. llama.cpp loads it, too.

  noria synth tiny tiny.gguf                                      a few MiB, for a first try
  noria synth qwen3-30b-a3b model.gguf --quant Q4_K_M             17 GiB
  noria synth qwen3-40x256 model.gguf --layers 4                  four of its layers
  noria synth qwen3-30b-a3b model.gguf --split 3                  model-00001-of-00003.gguf and so on
  noria synth qwen3-30b-a3b model.gguf --sparse                   no disk space: for noria plan, not for running
  noria synth qwen3-30b-a3b model.gguf --vocab other.gguf         with a tokenizer, so that noria run takes text

presets:
{chr(10).join(f"  {name:<15} {_shapes(preset)}" for name, preset in PRESETS.items())}

quants: {", ".join(QUANTS)}
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("preset", metavar="PRESET", help="whose shapes; see above")
    parser.add_argument("output", type=file_path, metavar="OUT.gguf", help="file to write")
    parser.add_argument("--layers", type=count, metavar="N", help="number of layers (default: the preset's)")
    parser.add_argument(
        "--quant", type=str.upper, default="Q4_K_M", metavar="MIX", help="quantization mix (default: Q4_K_M)"
    )
    parser.add_argument("--vocab", type=file_path, metavar="FILE.gguf", help="copy the tokenizer of this model")
    parser.add_argument("-s", "--seed", type=count, default=0, metavar="N", help="seed of the weights (default: 0)")
    parser.add_argument(
        "--split", type=count, default=1, metavar="N", help="write N files, OUT-00001-of-0000N.gguf and so on"
    )
    parser.add_argument("--sparse", action="store_true", help="a hole in place of the weights")
    parser.add_argument("--force", action="store_true", help="overwrite files that exist")


def main(args: argparse.Namespace) -> int:
    if args.output.is_dir():
        raise ConfigError(f"{args.output} is a folder; name a file in it.")
    outputs = [args.output]
    if args.split > 1:
        outputs = [Path(shard_name(str(args.output), no, args.split)) for no in range(args.split)]
    if not args.force and (there := [str(path) for path in outputs if path.exists()]):
        raise ConfigError(f"{there[0]} exists; --force overwrites it.")
    progress = ProgressBar()
    begin = time.perf_counter()
    try:
        nbytes = synthesize(
            args.preset,
            args.output,
            n_layer=args.layers,
            quant=args.quant,
            vocab=args.vocab,
            seed=args.seed,
            sparse=args.sparse,
            n_shards=args.split,
            progress=progress.of("writing", "B"),
        )
    finally:
        progress.close()
    written = f"{outputs[0]}{' and so on' if args.split > 1 else ''}"
    print_note(f"{written}: {size_text(nbytes)} in {time.perf_counter() - begin:.1f} s")
    return 0
