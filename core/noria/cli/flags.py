"""Engine flags, the same for every command that computes or plans: llama.cpp's names where it has them."""

from __future__ import annotations

import argparse
import re

from noria.cli.arguments import count, count_or_auto, file_path, size
from noria.experts import POLICIES
from noria.runtime import AUTO, LoadMode

KV_TYPES = ("f32", "f16", "q8_0", "q4_0")
ALL_LAYERS = 9999

Overrides = tuple[tuple[str, str], ...]


def kv_type(text: str) -> str:
    if text.lower() not in KV_TYPES:
        raise argparse.ArgumentTypeError(f"'{text}' is no KV type; there are {', '.join(KV_TYPES)}")
    return text.upper()


def overrides(text: str) -> Overrides:
    """`REGEX=CPU` or `REGEX=GPU`, several separated by commas."""
    parts = [part.rpartition("=") for part in re.split(r"(?<==[CG]PU),", text, flags=re.IGNORECASE)]
    for pattern, _, target in parts:
        if not pattern or target.upper() not in ("CPU", "GPU"):
            raise argparse.ArgumentTypeError(f"'{text}' is not REGEX=CPU or REGEX=GPU")
    return tuple((pattern, target.upper()) for pattern, _, target in parts)


def flash_attention(text: str) -> str:
    if text not in ("on", "auto", "1"):
        raise argparse.ArgumentTypeError(f"'{text}' is not on or auto; there is no other attention than the flash one")
    return text


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-m", "--model", type=file_path, metavar="FILE", help="GGUF model (default: the built-in demo model)"
    )


def add_engine_arguments(parser: argparse.ArgumentParser, *, fallback: bool = True) -> None:
    """Flags of `EngineConfig`; `fallback` is what happens unless --fallback or --no-fallback says otherwise."""
    _add_placement(parser.add_argument_group("devices and placement"))
    _add_moving(parser.add_argument_group("moving experts"))
    group = parser.add_argument_group("how it runs")
    group.add_argument(
        "-fa",
        "--flash-attn",
        nargs="?",
        type=flash_attention,
        metavar="on|auto",
        help="attention is always the flash one; taken because llama.cpp has this flag",
    )
    either = group.add_mutually_exclusive_group()
    for flag, value, text in (
        ("--fallback", True, "ops that the device lacks run on the reference, slowly"),
        ("--no-fallback", False, "an op that the device lacks is an error"),
    ):
        either.add_argument(
            flag,
            dest="fallback",
            action="store_const",
            const=value,
            default=fallback,
            help=f"{text} (default)" if value is fallback else text,
        )
    group.add_argument("--chaos", type=count, metavar="SEED", help="poison slots and delay queues at random (testing)")
    group.add_argument("--timeline", type=file_path, metavar="FILE", help="write a trace: .json, .json.gz or .csv")


def _add_placement(group: argparse._ArgumentGroup) -> None:
    either = group.add_mutually_exclusive_group()
    either.add_argument("--backend", default=AUTO, metavar="NAME", help="as `noria devices` lists them (default: auto)")
    either.add_argument("-dev", "--device", metavar="ID[,ID]", help="devices by id, e.g. cuda0 or vulkan0,vulkan1")
    group.add_argument("-ngl", "--n-gpu-layers", type=count, metavar="N", help="layers on the devices (default: all)")
    either = group.add_mutually_exclusive_group()
    either.add_argument(
        "-ncmoe",
        "--n-cpu-moe",
        type=count_or_auto,
        default=AUTO,
        metavar="N",
        help="layers whose experts stay in host RAM, spread evenly (default: auto, as few as fit)",
    )
    either.add_argument(
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
        type=overrides,
        action="append",
        default=[],
        metavar="REGEX=CPU|GPU",
        help="place the experts whose tensor names match; the first match wins",
    )
    group.add_argument("-c", "--ctx-size", type=count, metavar="N", help="context length (default: 4096 at most)")
    for flag, name, what in (("-ctk", "--cache-type-k", "K"), ("-ctv", "--cache-type-v", "V")):
        group.add_argument(
            flag,
            name,
            type=kv_type,
            default="F16",
            metavar="TYPE",
            help=f"type of {what} in the KV cache: {', '.join(KV_TYPES)} (default: f16)",
        )
    group.add_argument("--memory", type=size, metavar="SIZE", help="plan for this much device memory, e.g. 12GiB")


def _add_moving(group: argparse._ArgumentGroup) -> None:
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
    group.add_argument("--prefetch", metavar="POLICY", help=f"{', '.join(POLICIES)} or a plugin's (default: auto)")
    group.add_argument("--prefetch-slots", type=count, metavar="N", help="slots of the prefetch ring (default: 4)")
    group.add_argument(
        "--load-mode",
        choices=[mode.value for mode in LoadMode],
        default=LoadMode.AUTO.value,
        help="experts in RAM: page-lock the mapped file, or read into page-locked memory (default: auto)",
    )
