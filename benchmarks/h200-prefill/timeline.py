"""What the host did during a prompt: writes a trace and `raw/timeline.json`, the waits and the lead in figures."""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import PRESET, QUANT, TIMEOUT_S, machine_of

from noria.cli.child import run_noria

N_PROMPT = 8192


def summary(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the last pass of a trace: the host's waits, and when host and device were done, in ms of its start."""
    spans = [event for event in events if event["ph"] == "X"]
    threads = {event["tid"]: event["args"]["name"] for event in events if event.get("name") == "thread_name"}
    host = [span for span in spans if threads[span["tid"]] == "scheduler"]
    compute = [span for span in spans if threads[span["tid"]] == "compute"]
    start = max(span["ts"] for span in host if span["name"] == "enqueue layer 0")
    host = [span for span in host if span["ts"] >= start]
    end = lambda of: (max(span["ts"] + span["dur"] for span in of) - start) / 1e3  # noqa: E731
    return {
        "waits": [span["name"] for span in host if span["name"].startswith("wait")],
        "enqueued_ms": end([span for span in host if span["name"].startswith("enqueue")]),
        "computed_ms": end([span for span in compute if span["ts"] >= start]),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    default = Path(tempfile.gettempdir()) / f"noria-{PRESET}-{QUANT}.gguf"
    parser.add_argument("-m", "--model", type=Path, default=default, help=f"({default})")
    parser.add_argument("-dev", "--device", default="cuda0", help="(cuda0)")
    parser.add_argument("-p", "--n-prompt", type=int, default=N_PROMPT, help=f"({N_PROMPT})")
    parser.add_argument("--raw", type=Path, default=Path(__file__).parent / "raw", help="where files go")
    args = parser.parse_args()
    args.raw.mkdir(parents=True, exist_ok=True)
    flags = ["-ncmoe", "99", "-p", str(args.n_prompt), "-n", "0", "-r", "1"]
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        argv = ["bench", "-m", str(args.model), "-dev", args.device, *flags, "--timeline", str(trace)]
        finished = run_noria(argv, TIMEOUT_S)
        if finished.error:
            raise SystemExit(f"noria {' '.join(argv)}: {finished.error}")
        text = trace.read_text()
    (args.raw / "timeline.json.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
    record = summary(json.loads(text)["traceEvents"]) | {"n_prompt": args.n_prompt, "machine": machine_of(args.device)}
    (args.raw / "timeline.json").write_text(json.dumps(record, indent=1) + "\n")
    print(f"enqueued after {record['enqueued_ms']:.1f} ms, computed after {record['computed_ms']:.1f} ms")
    print(f"waits: {', '.join(record['waits'])}")
