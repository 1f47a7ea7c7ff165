"""`noria ops`: which op runs where, with which types."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

from noria.api import DeviceKind, Kernels, Op, OpQuery, Support
from noria.api.errors import NoriaError
from noria.cli.devices import print_paragraph, problem
from noria.cli.flags import KV_TYPES
from noria.cli.output import add_format_argument, print_json, print_table
from noria.gguf import SUPPORTED_TYPES
from noria.plugins import BackendRegistry, BackendStatus, PluginManager, load_config

HELP = "show which ops each backend has, with which types"
DESCRIPTION = """\
Show the table of ops, types and backends, as each device answers for itself:
  native      a kernel reads these types as they are
  converted   works, after converting the weights into scratch
  parts       this fused op runs as the ops it is made of
  missing     nobody has written it: it runs on the reference, slowly, or is an error with --no-fallback
  impossible  this hardware cannot do it

  noria ops                       every backend that can be used here
  noria ops --backend cuda        one backend
  noria ops > ops.md              the table of the docs

The type is that of the weights or of the KV cache; `act` is the device's activation type. An answer holds for one
token and for many. Simulated devices are shown by name only: they compute nothing.
"""

ACTIVATIONS = "act"
PARTS = "parts"
N_TOKENS = (1, 512)
N_VOCAB, N_EMBD, N_FF, N_HEAD, N_HEAD_KV, HEAD_DIM, N_KV = 151_936, 2048, 768, 32, 4, 128, 4096
N_EXPERT, N_EXPERT_USED = 128, 8

DIMS: dict[Op, tuple[int, ...]] = {
    Op.GET_ROWS: (N_VOCAB, N_EMBD),
    Op.RMS_NORM: (N_EMBD,),
    Op.ADD: (N_EMBD,),
    Op.SCALE: (N_EMBD,),
    Op.MATMUL: (N_EMBD, N_EMBD),
    Op.ROPE: (N_HEAD, HEAD_DIM),
    Op.KV_STORE: (N_HEAD_KV, N_HEAD_KV, HEAD_DIM, HEAD_DIM, N_KV),
    Op.ATTENTION: (N_HEAD, N_HEAD_KV, HEAD_DIM, HEAD_DIM, N_KV),
    Op.ROUTE_TOPK: (N_EXPERT, N_EXPERT_USED),
    Op.SORT_ROWS: (N_EXPERT, N_EXPERT_USED),
    Op.MUL_MAT_ID: (N_EXPERT, N_FF, N_EMBD),
    Op.GLU: (N_FF,),
    Op.COMBINE: (N_EMBD,),
    Op.TOP_K: (N_VOCAB, 64),
    Op.MATMULS: (N_EMBD, N_EMBD),
    Op.ROPE_STORE: (N_HEAD, N_HEAD_KV, HEAD_DIM, HEAD_DIM, HEAD_DIM),
    Op.EXPERT_FFN: (N_EXPERT, N_FF, N_EMBD),
}
TYPES: dict[Op, tuple[str, ...]] = {
    **dict.fromkeys((Op.GET_ROWS, Op.MATMUL, Op.MATMULS, Op.MUL_MAT_ID, Op.EXPERT_FFN), SUPPORTED_TYPES),
    **dict.fromkeys((Op.KV_STORE, Op.ATTENTION, Op.ROPE_STORE), tuple(t.upper() for t in KV_TYPES)),
    **dict.fromkeys((Op.ROUTE_TOPK, Op.TOP_K), ("F32",)),
    Op.SORT_ROWS: ("I32",),
    Op.RMS_NORM: ("F32", ACTIVATIONS),
}  # the others work on activations
FUSED = {
    Op.MATMULS: (Op.MATMUL,),
    Op.ROPE_STORE: (Op.RMS_NORM, Op.ROPE, Op.KV_STORE),
    Op.EXPERT_FFN: (Op.MUL_MAT_ID, Op.GLU, Op.COMBINE),
}
WORST_FIRST = (Support.IMPOSSIBLE, Support.MISSING, Support.CONVERTED, Support.NATIVE)


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the table."""

    op: Op
    type: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backend", metavar="NAME[,NAME]", help="backends or devices, as in `noria devices` (default: all)"
    )
    add_format_argument(parser)


def main(args: argparse.Namespace) -> int:
    registry = BackendRegistry(PluginManager(load_config(args.plugins)))
    ids, unusable = choose(registry, args.backend)
    answers: dict[str, dict[Entry, str]] = {}
    for id in ids:
        try:
            with registry.open(id) as device:
                answers[id] = {entry: answer(device.kernels, entry) for entry in entries()}
        except NoriaError as error:
            unusable[id] = str(error)
    if args.output == "json":
        ops = [{"op": str(e.op), "type": e.type, "support": {id: answers[id][e] for id in answers}} for e in entries()]
        print_json({"ops": ops, "unusable": unusable})
        return 0
    print_table([{"op": str(e.op), "type": e.type, **{id: answers[id][e] for id in answers}} for e in entries()])
    for name, reason in unusable.items():
        print_paragraph(f"{name} is not shown: {reason}")
    return 0


def choose(registry: BackendRegistry, selection: str | None) -> tuple[list[str], dict[str, str]]:
    """The devices to ask, one a backend unless they were named, and the backends that cannot be asked, with the reason.

    Raises:
        BackendNotFound, BackendUnavailable, ConfigError: a name is wrong or cannot be used.
    """
    if selection is not None:
        return [info.id for info in registry.resolve(selection)], {}
    ids: list[str] = []
    unusable: dict[str, str] = {}
    for report in registry.probe_all():
        if report.status is not BackendStatus.USABLE:
            unusable[report.name] = problem(report)
        elif report.spec.kind is not DeviceKind.SIMULATED:
            ids.append(registry.resolve(report.name)[0].id)
    return ids, unusable


def entries() -> Iterator[Entry]:
    for op in Op:
        for type in TYPES.get(op, (ACTIVATIONS,)):
            yield Entry(op, type)


def answer(kernels: Kernels, entry: Entry) -> str:
    """The least of the answers to all queries of this entry."""
    support = least(kernels, entry)
    if entry.op in FUSED and support is Support.MISSING:
        parts = [Entry(op, entry.type if entry.type in TYPES.get(op, ()) else ACTIVATIONS) for op in FUSED[entry.op]]
        if all(least(kernels, part).usable for part in parts):
            return PARTS
    return str(support)


def least(kernels: Kernels, entry: Entry) -> Support:
    answers = {kernels.supports(query) for query in queries(entry, kernels.device.caps.activation_type)}
    return next(support for support in WORST_FIRST if support in answers)


def queries(entry: Entry, activation: str) -> Iterator[OpQuery]:
    """What a model would ask, for one token and for many."""
    op, type = entry.op, activation if entry.type == ACTIVATIONS else entry.type
    in_out = op in (Op.GET_ROWS, Op.ROUTE_TOPK, Op.SORT_ROWS, Op.TOP_K)  # whose inputs are no activations
    for n_rows in N_TOKENS:
        yield OpQuery(
            op=op,
            type=type,
            type2=type if op in (Op.KV_STORE, Op.ATTENTION, Op.ROPE_STORE, Op.EXPERT_FFN) else "",
            activation="F32" if in_out else activation,
            n_rows=n_rows,
            dims=DIMS[op],
        )
