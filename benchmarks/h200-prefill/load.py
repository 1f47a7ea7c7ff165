"""How long a process takes from its start to the logits of a first short prompt, by load mode; writes `raw/load.json`.

The file is in the page cache and kernels are compiled: a run that is not counted sees to both.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import PRESET, QUANT, TIMEOUT_S, machine_of

from noria.cli.child import run_noria

MODES = ("auto", "mmap", "none")
N_RUNS = 3


def seconds(model: Path, device: str, mode: str, out: Path) -> float:
    argv = ["logits", "-m", str(model), "-dev", device, "-ncmoe", "99", "--load-mode", mode]
    finished = run_noria([*argv, "--tokens", "1,2,3,4", "-o", str(out)], TIMEOUT_S)
    if finished.error:
        raise SystemExit(f"noria {' '.join(argv)}: {finished.error}")
    return finished.seconds


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    default = Path(tempfile.gettempdir()) / f"noria-{PRESET}-{QUANT}.gguf"
    parser.add_argument("-m", "--model", type=Path, default=default, help=f"({default})")
    parser.add_argument("-dev", "--device", default="cuda0", help="(cuda0)")
    parser.add_argument("--raw", type=Path, default=Path(__file__).parent / "raw", help="where the raw file goes")
    args = parser.parse_args()
    args.raw.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "logits.npz"
        seconds(args.model, args.device, "auto", out)
        samples = {mode: [seconds(args.model, args.device, mode, out) for _ in range(N_RUNS)] for mode in MODES}
    record = {"model_size": args.model.stat().st_size, "samples_s": samples, "machine": machine_of(args.device)}
    (args.raw / "load.json").write_text(json.dumps(record, indent=1) + "\n")
    for mode, times in samples.items():
        print(f"--load-mode {mode}: {median(times):.2f} s")
