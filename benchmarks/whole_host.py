"""The whole system on the GPUs of one host: extraction and training side by side, and alone.

    python benchmarks/whole_host.py prepare WORK [--shape wide|qwen3-8b|small|tiny]
        [--target-layers 64] [--distinct-layers 4] [--sequences 3000] [--stored 120]
    python benchmarks/whole_host.py side-by-side WORK --extract-gpus 0,1,2,3,4 --train-gpus 5,6,7
        [--windows together,extract,train,kill] [--seconds 10]
    python benchmarks/whole_host.py one-drafter WORK --gpus 5,6,7 [--parallel ddp|fsdp]
    python benchmarks/whole_host.py one-target WORK --gpus 0,1
    python benchmarks/whole_host.py record WORK

`prepare` writes a target of random weights and conversations of random tokens (or takes `--target`,
`--conversations`), extracts a few of them with one worker, and compiles a drafter meanwhile.
The others run the product's own commands on them, as a user would, and say what its processes log:

- `side-by-side`: all workers and all drafters are started; then some are halted (SIGSTOP) and woken
  again, so that each runs alone, with its like and with all the others, without a new start.
  `kill` ends a drafter with SIGKILL, whose GPU a queued one takes, and then a worker, whose units
  the others take over; a worker that was the only one is started again.
- `one-drafter`, `one-target`: several GPUs for one drafter, for one target.

What is measured is printed and kept at once, for a run that is cut off. `record` appends all of it
to the results and draws it into WORK. `benchmarks/simulate_host.py` predicts these tables.
"""

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from host_figures import Figures, keep_figures, kept_figures
from host_plots import draw_run
from host_runs import Host, one_drafter, one_target, prepare
from host_side_by_side import WINDOWS, side_by_side
from host_watch import start_sampling
from results import record
from shapes import SHAPES

PACKAGES = ("torch", "triton", "transformers")


def gpu_list(text: str) -> list[int]:
    """GPU indices from `0,1,2`; on a machine without, so many processes."""
    return [int(part) for part in text.split(",")]


def open_host(arguments: argparse.Namespace) -> Host:
    """Makes what all runs read, or finds it made."""
    work: Path = arguments.work.resolve()
    (work / "notes").mkdir(parents=True, exist_ok=True)
    common = work / "common.json"
    if arguments.step == "prepare":
        common.write_text(json.dumps(common_table(work, arguments), indent=1))
    elif not common.is_file():
        raise ValueError(f"{work} holds nothing yet: run `prepare` first")
    return Host(work=work, table=json.loads(common.read_text()))


def common_table(work: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """The part of the run file that all runs share; its inputs are written."""
    # Here only: the other steps start faster without transformers.
    from host_inputs import make_conversations, make_target
    from transformers import AutoConfig

    shape = SHAPES[arguments.shape]
    if arguments.target is None:
        target = make_target(
            work / "target",
            shape,
            num_layers=arguments.target_layers,
            num_distinct_layers=arguments.distinct_layers,
        )
        vocab_size = shape.vocab_size
    else:
        target = arguments.target
        vocab_size = AutoConfig.from_pretrained(target).get_text_config().vocab_size
    tokens = arguments.tokens or shape.sequence_tokens
    eager = {"compile": False} if arguments.eager else {}
    conversations = arguments.conversations or make_conversations(
        work / "conversations.jsonl",
        count=arguments.sequences,
        length=tokens,
        vocab_size=vocab_size,
    )
    return {
        "target": {"model": str(target)},
        "data": {"conversations": [str(conversations)], "max_sequence_tokens": tokens},
        "store": {"dir": str(work / "store"), "encoding": "fp8", "held_out_fraction": 0.02},
        "extract": {
            "batch_tokens": arguments.batch_sequences * tokens,
            # The run is stopped long before the store is full.
            "force": True,
        }
        | eager,
        "train": {
            "batch_tokens": tokens,
            "num_anchors": arguments.anchors,
            "epochs": 1000,
            "log_steps": arguments.log_steps,
            "checkpoint_steps": 1_000_000,
            "validation_steps": 1_000_000,
            "validation_sequences": 1,
            "wait_for_store_s": 300.0,
        }
        | eager,
    }


def arguments_of(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    steps = parser.add_subparsers(dest="step", required=True)
    names = ("prepare", "side-by-side", "one-drafter", "one-target", "record")
    parsers = {name: steps.add_parser(name) for name in names}
    for each in parsers.values():
        each.add_argument("work", type=Path, help="folder for inputs, store, runs and notes")
    inputs = parsers["prepare"]
    inputs.add_argument("--shape", choices=SHAPES, default="wide")
    inputs.add_argument("--target-layers", type=int, default=64)
    inputs.add_argument("--distinct-layers", type=int, default=None)
    inputs.add_argument("--target", help="a real target instead of a random one")
    inputs.add_argument("--conversations", type=Path, help="its conversations")
    inputs.add_argument("--tokens", type=int, help="of a sequence; default: the shape's")
    inputs.add_argument("--sequences", type=int, default=3000, help="that could be extracted")
    inputs.add_argument("--stored", type=int, default=120, help="extracted before drafters start")
    inputs.add_argument("--batch-sequences", type=int, default=2, help="of a forward pass")
    inputs.add_argument("--eager", action="store_true", help="compile nothing, to try a run out")
    inputs.add_argument("--anchors", type=int, default=512)
    inputs.add_argument("--log-steps", type=int, default=4)
    parsers["side-by-side"].add_argument("--extract-gpus", type=gpu_list, required=True)
    parsers["side-by-side"].add_argument("--train-gpus", type=gpu_list, required=True)
    parsers["side-by-side"].add_argument("--windows", default=",".join(WINDOWS))
    parsers["one-drafter"].add_argument("--parallel", choices=("ddp", "fsdp"), default="ddp")
    parsers["one-target"].add_argument("--stored", type=int, default=24)
    for name in ("one-drafter", "one-target"):
        parsers[name].add_argument("--gpus", type=gpu_list, required=True)
    for name in ("side-by-side", "one-drafter"):
        parsers[name].add_argument("--seconds", type=float, default=10.0, help="of a window, about")
    return parser.parse_args(argv)


def main() -> None:
    """Runs one step."""
    # Told to stop, as by `timeout`, it ends what it has started, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    arguments = arguments_of()
    host = open_host(arguments)

    def show(figures: Figures) -> None:
        keep_figures(host.notes, figures)
        for name, (value, unit, about) in figures.items():
            print(f"{name:<40} {value:>10.4g} {unit:<9} {about}", flush=True)

    if arguments.step == "record":
        record_all(host)
        return
    sampling = start_sampling(host.notes / "gpus.csv")
    try:
        if arguments.step == "prepare":
            prepare(host, num_stored=arguments.stored, show=show)
        elif arguments.step == "side-by-side":
            side_by_side(
                host,
                extract_gpus=arguments.extract_gpus,
                train_gpus=arguments.train_gpus,
                windows=arguments.windows.split(","),
                seconds=arguments.seconds,
                show=show,
            )
        elif arguments.step == "one-drafter":
            one_drafter(
                host,
                gpus=arguments.gpus,
                parallel=arguments.parallel,
                seconds=arguments.seconds,
                show=show,
            )
        else:
            one_target(host, gpus=arguments.gpus, num_stored=arguments.stored, show=show)
    finally:
        if sampling is not None:
            sampling.terminate()
            sampling.wait()


def record_all(host: Host) -> None:
    """Appends everything that was measured to the results, and draws it."""
    device = "CPU"
    if torch.cuda.is_available():
        device = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    figures = kept_figures(host.notes)
    record("The whole system on one host", figures, device=device, packages=PACKAGES)
    for notes in sorted(host.notes.glob("*-*.jsonl")):
        for path in draw_run(host.notes, notes.stem, out_dir=host.work):
            print(path)


if __name__ == "__main__":
    main()
