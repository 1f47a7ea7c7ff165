"""`noria plan`: what a run would need, without loading the model."""

from __future__ import annotations

import argparse
from typing import Any

from noria.cli.engine import Engine
from noria.cli.facts import model_facts
from noria.cli.flags import add_engine_arguments, add_model_argument
from noria.cli.output import add_format_argument, plural, print_json, print_table, size_text
from noria.experts import split_range
from noria.gguf import ModelFile
from noria.models import Model
from noria.runtime import MemoryPlan
from noria.runtime.placement import moe_layers
from noria.runtime.plan import MIB, StagePlan

HELP = "show the memory plan of a run, without loading anything"
DESCRIPTION = """\
Show every buffer that a run would allocate, the numbers chosen for it, and what would cross the bus. Nothing is loaded.
A plan that does not fit is an error that says by how much, and which single change would make it fit.

  noria plan -m model.gguf                                  on the device that would be used
  noria plan -m model.gguf -c 32768 -ctk q8_0 -ctv q8_0     with a longer context
  noria plan -m model.gguf --memory 12GiB                   as if the device had so much memory
  noria plan -m model.gguf --backend sim --memory 8GiB      for a GPU that is not here
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    add_format_argument(parser)
    add_engine_arguments(parser)


def main(args: argparse.Namespace) -> int:
    with Engine(args) as engine:
        plan = engine.plan(engine.config())
        described = describe(engine.file, engine.model, plan)
    if args.output == "json":
        print_json(described)
    else:
        print_plan(described)
    return 0


def describe(file: ModelFile, model: Model, plan: MemoryPlan) -> dict[str, Any]:
    """The plan as plain values; `units` are the numbers of experts that fill a slot in turn, by layer."""
    p, c, facts = model.hparams, plan.choice, model_facts(file, model.hparams)
    streamed = {
        layer: sum(file.tensors[name].nbytes for name in (moe.gate, moe.up, moe.down))
        for stage in plan.stages
        if stage.streamed
        for layer, moe in moe_layers(model, sorted(stage.offloaded)).items()
    }
    all_nbytes = sum(streamed.values())
    return {
        "model": {"filename": file.path, "type": facts.type, "nbytes": facts.nbytes, "n_params": facts.n_params},
        "choice": {
            "n_ctx": c.n_ctx,
            "n_batch": c.n_batch,
            "n_ubatch": c.n_ubatch,
            "n_cpu_moe": c.n_cpu_moe,
            "type_k": c.type_k.lower(),
            "type_v": c.type_v.lower(),
            "prefetch_slots": c.n_slots,
            "prefetch_flag": c.prefetch_flag,
        },
        "stages": [
            describe_stage(stage, capacity, p.n_expert)
            for stage, capacity in zip(plan.stages, plan.capacity, strict=True)
        ],
        "host_nbytes": plan.host_nbytes,
        "host_usable_nbytes": plan.host_capacity,
        "bus": {
            "n_layer": len(streamed),
            "batch_nbytes": all_nbytes,
            "token_nbytes": all_nbytes * p.n_expert_used // p.n_expert if p.n_expert else 0,
        },
        "notes": plan.notes,
    }


def describe_stage(stage: StagePlan, capacity: int, n_expert: int) -> dict[str, Any]:
    spec = stage.spec
    units = {
        layer: split_range(n_expert, stage.layouts[layer].capacity(stage.slot_nbytes))
        for layer in (sorted(stage.offloaded) if stage.streamed else ())
    }
    return {
        "device": spec.device.info.id,
        "name": spec.device.info.name,
        "first_layer": spec.layers.start,
        "n_layer": len(spec.layers),
        "embed": spec.embed,
        "output": spec.output,
        "buffers": [{"label": buffer.label, "nbytes": buffer.nbytes} for buffer in stage.buffers.values()],
        "nbytes": stage.nbytes,
        "usable_nbytes": capacity,
        "slot_nbytes": stage.slot_nbytes,
        "units": {layer: [len(experts) for experts in ranges] for layer, ranges in units.items()},
    }


def print_plan(plan: dict[str, Any]) -> None:
    model, choice, bus = plan["model"], plan["choice"], plan["bus"]
    print(f"{model['filename']}: {model['type']}, {size_text(model['nbytes'])}\n")
    rows: list[dict[str, str]] = []
    for stage in plan["stages"]:
        head = f"{stage['device']}, {layers_text(stage)}"
        for buffer in stage["buffers"]:
            rows.append(row(head, buffer["label"], buffer["nbytes"]))
            head = ""
        rows.append(row("", "sum", stage["nbytes"]))
        rows.append(row("", "usable", stage["usable_nbytes"]))
    if plan["host_nbytes"]:
        rows.append(row("host RAM", "experts", plan["host_nbytes"]))
        if plan["host_usable_nbytes"] is not None:
            rows.append(row("", "usable", plan["host_usable_nbytes"]))
    print_table(rows, right=("MiB",))
    print(
        f"\nchosen: -c {choice['n_ctx']} -b {choice['n_batch']} -ub {choice['n_ubatch']} "
        f"-ncmoe {choice['n_cpu_moe']} -ctk {choice['type_k']} -ctv {choice['type_v']} "
        f"{choice['prefetch_flag']}"
    )
    for stage in plan["stages"]:
        if stage["units"]:
            n_units = sorted({len(units) for units in stage["units"].values()})
            units = " or ".join(plural(n, "unit") for n in n_units)
            n_experts = max(n for experts in stage["units"].values() for n in experts)
            slots = f"{plural(choice['prefetch_slots'], 'slot')} of {stage['slot_nbytes'] / MIB:.1f} MiB"
            print(
                f"ring of {stage['device']}: {slots}; "
                f"a layer's experts pass in {units} of up to {plural(n_experts, 'expert')}"
            )
    if bus["n_layer"]:
        print(
            f"bus: {bus['batch_nbytes'] / MIB:.1f} MiB for each {choice['n_batch']} tokens of a prompt (all experts of "
            f"{plural(bus['n_layer'], 'layer')}, once); "
            f"{bus['token_nbytes'] / MIB:.1f} MiB for a generated token (the used ones)"
        )
    for note in plan["notes"]:
        print(f"note: {note}")


def row(device: str, buffer: str, nbytes: int) -> dict[str, str]:
    return {"device": device, "buffer": buffer, "MiB": f"{nbytes / MIB:.1f}"}


def layers_text(stage: dict[str, Any]) -> str:
    """What of the model a stage holds."""
    first, n = stage["first_layer"], stage["n_layer"]
    parts = [f"layers {first}-{first + n - 1}"] if n else []
    if stage["output"]:
        parts.append("output")
    return " and ".join(parts) or "embedding"
