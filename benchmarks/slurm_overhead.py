"""What Slurm jobs cost beside the work itself: the demo's chain with empty jobs, over its compute.

python benchmarks/slurm_overhead.py [--compute-s SECONDS] [--no-record]

The empty chain is submitted as ever and starts the same job steps, which end at once: what is
measured is submission, queueing and starting, in a Slurm on this machine. The compute time is that
of plain `extract demo` and `train demo` here, unless given.
"""

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from results import record

ROOT = Path(__file__).parent.parent
START_SLURM = ROOT / "tests" / "slurm" / "start_slurm.sh"
RUNS = 3


def call(*arguments: str, environment: dict[str, str]) -> str:
    """Runs a command of `dflash-offline` on the demo."""
    command = [sys.executable, "-m", "dflash_offline.cli", *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    if result.returncode != 0:
        sys.exit(f"{' '.join(arguments)}: {result.stderr[-2000:]}")
    return result.stdout


def empty_chain_s(folder: Path, environment: dict[str, str]) -> float:
    """Seconds from the command to the end of the last job, when no job has anything to do."""
    settings = [
        f"run_dir={folder}",
        'slurm.command=["true"]',
        "slurm.extract.tasks=2",
        f"slurm.local_dir={folder}",
    ]
    options = [part for setting in settings for part in ("--set", setting)]
    start_s = time.monotonic()
    call("slurm", "submit", "demo", *options, environment=environment)
    squeue = ["squeue", "--noheader", "--me"]
    while subprocess.run(squeue, env=environment, capture_output=True, check=True).stdout.strip():
        time.sleep(0.05)
    return time.monotonic() - start_s


def compute_s(folder: Path, environment: dict[str, str]) -> float:
    """Seconds of both stages of the demo, run plainly."""
    start_s = time.monotonic()
    for stage in ("extract", "train"):
        call(stage, "demo", "--set", f"run_dir={folder}", environment=environment)
    return time.monotonic() - start_s


def main() -> None:
    """Measures, prints and records."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compute-s", type=float, help="the demo's compute time, if known")
    parser.add_argument("--no-record", action="store_true", help="print only")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        environment = {
            **os.environ,
            "SLURM_SANDBOX": str(folder / "slurm"),
            "SLURM_CONF": str(folder / "slurm" / "etc" / "slurm.conf"),
            "PORT_BASE": "17600",
        }
        try:
            subprocess.run([START_SLURM, "start"], env=environment, check=True)
            runs_s = [empty_chain_s(folder / f"empty-{i}", environment) for i in range(RUNS)]
        finally:
            subprocess.run([START_SLURM, "stop"], env=environment, check=True)
        work_s = options.compute_s or compute_s(folder / "plain", dict(os.environ))
    empty_s = sorted(runs_s)[RUNS // 2]
    print(f"empty chain {runs_s}, compute {work_s:.1f} s, overhead {empty_s / work_s:.1%}")
    if not options.no_record:
        figures = {
            "slurm_empty_chain_s": (empty_s, "s", "2 extraction tasks, 2 drafters, finalize"),
            "slurm_overhead_fraction": (
                empty_s / work_s,
                "",
                f"over {work_s:.0f} s of the demo's own work",
            ),
        }
        record("Slurm overhead", figures, device=platform.processor() or platform.machine())


if __name__ == "__main__":
    main()
