"""How fast stage 1 fills a store, from token ids to committed shards, at the shape of Qwen3-8B.

    python benchmarks/stage1_store.py [--shape qwen3-8b|tiny] [--target FOLDER|embedded:NAME]
        [--places /dev/shm,runs] [--sequences 128] [--batch-sequences 4] [--encoding fp8]
        [--ragged] [--sweep 2,4,8] [--peers] [--no-forward-alone] [--profile] [--no-record]

Weights and tokens are random unless `--target` names a real model. Everything between is what
`dflash-offline extract` runs: packing, parity proof, compiled layers, encode kernels, pinned
copies, writer threads, commits. Time counts from the first batch to the last commit, its flush to
disk included. In the same run transformers' own forward pass (all layers, no states kept, nothing
written) is timed, eager and compiled. What was stored is compared with a plain forward pass.
"""

import argparse
import re
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int32
from results import record
from transformers import AutoModelForCausalLM, Qwen3Config

from stage1_extract.batches import batches_for, row_sizes
from stage1_extract.config import DataConfig, ExtractConfig, ExtractRun, StoreConfig, TargetConfig
from stage1_extract.layers import captured_layers
from stage1_extract.parity import choose_batching, relative_differences
from stage1_extract.sequences import TokenSequence
from stage1_extract.signals import StopRequest
from stage1_extract.target import load_target
from stage1_extract.target_transformers import TransformersTarget
from stage1_extract.worker import UnitContent, Worker, pipeline_of
from stage1_extract.worker_metrics import WorkerMetrics
from storage.encodings import ENCODINGS, encoded_bytes_per_token
from storage.reader import open_store
from storage.schema import LayerRecord, StoreIdentity, UnitId
from storage.writer import create_store

PACKAGES = ("torch", "triton", "transformers")
ENCODING_ERRORS = {"bf16": 0.01, "fp8": 0.05, "int8": 0.02, "int4": 0.2, "int3": 0.3, "int2": 0.5}
Figures = dict[str, tuple[float, str, str]]

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_936,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 10,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 512,
    },
}


@dataclass
class BenchmarkWorker(Worker):
    """A worker whose sequences are in memory already."""

    sequences: dict[str, TokenSequence] = field(default_factory=dict)

    def read_unit(self, unit: UnitId) -> UnitContent:
        """The unit's sequences, of which all are usable."""
        return UnitContent(sequences=[self.sequences[n] for n in self.store.sequences_of(unit)])


def make_target(arguments: argparse.Namespace, device: str) -> TransformersTarget:
    """The target asked for, or one with random weights."""
    dtype = "bfloat16" if device.startswith("cuda") else "float32"
    if arguments.target:
        return load_target(TargetConfig(model=arguments.target, dtype=dtype), device=device)
    config = Qwen3Config(**SHAPES[arguments.shape], tie_word_embeddings=False)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model = model.eval().requires_grad_(False)
    return TransformersTarget(model, None, device=device)


def make_sequences(arguments: argparse.Namespace, vocab_size: int) -> dict[str, TokenSequence]:
    """Random sequences, all of one length or log-normal with median 700."""
    rng = np.random.default_rng(0)
    lengths = np.full(arguments.sequences, arguments.sequence_tokens)
    if arguments.ragged:
        count = arguments.sequences * 3
        drawn = rng.lognormal(np.log(700), 1.0, count).astype(int)
        lengths = drawn.clip(16, min(4096, arguments.sequence_tokens))
    return {
        f"s{number}": TokenSequence(
            id=f"s{number}",
            token_ids=rng.integers(0, vocab_size, length, dtype=np.int32),
            loss_mask=np.arange(length) >= length // 8,
            greedy=False,
            is_truncated=False,
        )
        for number, length in enumerate(lengths)
    }


def make_run(arguments: argparse.Namespace, folder: Path) -> ExtractRun:
    """Settings of a run on random tokens."""
    return ExtractRun(
        target=TargetConfig(model=arguments.target or "random"),
        data=DataConfig(conversations=(), max_sequence_tokens=arguments.sequence_tokens),
        store=StoreConfig(encoding=arguments.encoding),
        extract=ExtractConfig(
            batch_tokens=arguments.batch_sequences * arguments.sequence_tokens,
            compile=None if arguments.compile == "auto" else arguments.compile == "yes",
        ),
        store_dir=folder / "store",
        run_dir=folder,
    )


def make_worker(
    arguments: argparse.Namespace,
    target: TransformersTarget,
    sequences: dict[str, TokenSequence],
    folder: Path,
) -> BenchmarkWorker:
    """A worker over a new store of random sequences."""
    config = target.config
    run = make_run(arguments, folder)
    store = create_store(run.store_dir, identity_of(run, config))
    names = captured_layers(
        None, num_layers=5, lm_head_input=False, num_target_layers=config.num_hidden_layers
    )
    is_calibrated = ENCODINGS[arguments.encoding].calibrated
    store.add_layers(
        LayerRecord(
            name=name,
            encoding=arguments.encoding,
            hidden_size=config.hidden_size,
            # Random states have channels of like size: a calibration would find this.
            channel_scales=(1.0,) * config.hidden_size if is_calibrated else None,
        )
        for name in names
    )
    token_bytes = len(names) * encoded_bytes_per_token(arguments.encoding, config.hidden_size)
    num_bytes = sum(each.num_tokens for each in sequences.values()) * token_bytes
    num_units = max(1, round(num_bytes / run.store.shard_bytes))
    store.plan_generation(list(sequences), num_units=num_units)
    path = folder / "extract" / "worker-00000.metrics.jsonl"
    return BenchmarkWorker(
        run=run,
        store=store,
        target=target,
        conversations=None,  # type: ignore[arg-type]
        layers=store.layers,
        metrics=WorkerMetrics(path, worker_index=0, num_workers=1),
        stop=StopRequest(),
        sequences=sequences,
    )


def identity_of(run: ExtractRun, config: Any) -> StoreIdentity:
    """An identity for weights that are random."""
    return StoreIdentity(
        target_name="random",
        target_revision=None,
        target_weights_sha256="",
        tokenizer_sha256="",
        chat_template_sha256="",
        template_arguments={},
        mask_rule_version=1,
        max_sequence_tokens=run.data.max_sequence_tokens,
        long_conversations="truncate",
        compute_dtype=run.target.dtype,
        attention_backend="default",
        hidden_size=config.hidden_size,
        num_target_layers=config.num_hidden_layers,
        vocab_size=config.vocab_size,
        held_out_fraction=0.0,
    )


def synchronize(device: str) -> None:
    """Waits until the device has done all it was given."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def median_s(call: Callable[[], Any], device: str, *, repetitions: int = 5) -> float:
    """Median time of a call after two that warm up."""
    times = []
    for number in range(repetitions + 2):
        synchronize(device)
        start_s = time.perf_counter()
        call()
        synchronize(device)
        if number >= 2:
            times.append(time.perf_counter() - start_s)
    return statistics.median(times)


def run_store(
    worker: BenchmarkWorker, place: str, arguments: argparse.Namespace, forward_s: float | None
) -> Figures:
    """Fills the store, checks it, and gives the figures."""
    with pipeline_of(worker) as worker.pipeline:
        worker.metrics.restart_clock()
        start_s = time.perf_counter()
        worker.extract_units(worker.store.units())
        synchronize(worker.target.device)
        computed_s = time.perf_counter() - start_s
    elapsed_s = time.perf_counter() - start_s
    summary = worker.metrics.summary()
    print(summary, flush=True)
    counts, shares = worker.metrics.counts, worker.metrics.fraction
    lost = (shares("encode") + shares("wait") + shares("idle")) / max(shares("forward"), 1e-9)
    worker.metrics.close()
    assert counts.num_sequences == len(worker.sequences)
    error = stored_error(worker, arguments)
    token_bytes = sum(
        encoded_bytes_per_token(each.encoding, each.hidden_size) for each in worker.layers.values()
    )
    store_dir = Path(worker.run.store_dir)
    written = sum(path.stat().st_size for path in store_dir.rglob("*") if path.is_file())
    where = "memory" if place.startswith("/dev/shm") else "disk"
    kind = (arguments.target or arguments.shape).split("/")[-1].split(":")[-1]
    # A converted GGUF file's folder also names its size, time and version.
    kind = re.sub(r"(-\d{5,})+-v\d+$", "", kind)
    prefix = "stage1_" + (f"{kind}_" if arguments.target else "")
    prefix += "ragged_" if arguments.ragged else ""
    prefix += "" if arguments.encoding == "fp8" else f"{arguments.encoding}_"
    note = (
        f"{kind}, {counts.num_tokens} tokens, batches of"
        f" {arguments.batch_sequences} x {arguments.sequence_tokens}, 5 layers,"
        f" {arguments.encoding}, store in {where}; {summary.split(' | ')[1]}"
    )
    figures = {
        f"{prefix}store_tok_s": (counts.num_tokens / elapsed_s, "tokens/s", note),
        f"{prefix}store_{where}_rate": (counts.num_bytes / elapsed_s / 1e6, "MB/s", ""),
        f"{prefix}overhead_fraction": (
            lost,
            "fraction",
            f"GPU time not in forward passes, over that in them ({where}): encode, waiting for a"
            " buffer, nothing handed over; copies and writing go on beside",
        ),
        f"{prefix}last_flush": (
            elapsed_s - computed_s,
            "s",
            f"from the last batch to the last commit ({where}), part of the time above",
        ),
        f"{prefix}bytes_ratio": (
            written / (counts.num_tokens * token_bytes),
            "ratio",
            "all files of the store over the bytes of encoded states",
        ),
        f"{prefix}stored_error": (error, "fraction", "stored states against a plain forward pass"),
    }
    if arguments.ragged:
        figures[f"{prefix}fill_fraction"] = (
            counts.num_tokens / sum(rows_of(worker)),
            "fraction",
            "real tokens over those computed",
        )
    if forward_s is not None:
        figures[f"{prefix}forward_tok_s"] = (
            counts.num_tokens / forward_s,
            "tokens/s",
            "the same forward passes alone, nothing kept",
        )
        figures[f"{prefix}slowdown_fraction"] = (
            computed_s / forward_s - 1,
            "fraction",
            f"time to the last batch over that of the same forward passes alone ({where})",
        )
    return figures


def stored_error(worker: BenchmarkWorker, arguments: argparse.Namespace) -> float:
    """Largest mean relative error, over layers, of some stored sequences.

    Raises:
        ValueError: It is more than the encoding and rounding explain.
    """
    store = open_store(worker.run.store_dir)
    names = list(worker.layers)
    worst = 0.0
    for name in list(worker.sequences)[:3]:
        token_ids = worker.sequences[name].token_ids
        expected = worker.target.plain_hidden_states(token_ids, layers=names)
        found = store.sequence(name).hidden_states(layers=names)
        for column, layer in enumerate(names):
            states = torch.from_numpy(found[:, column]).to(worker.target.device)
            worst = max(worst, float(relative_differences(states, expected[layer]).mean()))
    if worst > ENCODING_ERRORS[arguments.encoding] + 0.08:
        raise ValueError(f"stored states are off by {worst:.3f}")
    return worst


def batches_of(worker: BenchmarkWorker) -> list[list[Int32[np.ndarray, "_"]]]:
    """Token ids of all batches of all units."""
    batches = []
    for unit in worker.store.units():
        sequences = worker.read_unit(unit).sequences
        lengths = [each.num_tokens for each in sequences]
        for batch in batches_for(worker.target.batching, lengths, batch_tokens=worker.batch_tokens):
            batches.append([sequences[index].token_ids for index in batch])
    return batches


def rows_of(worker: BenchmarkWorker) -> list[int]:
    """Tokens that each forward pass computes, those that fill a compiled row up included."""
    lengths = [sum(map(len, batch)) for batch in batches_of(worker)]
    if worker.target.compiled is None:
        return lengths
    rows = row_sizes(worker.batch_tokens)
    return [next(row for row in rows if row >= length) for length in lengths]


def forward_only_s(worker: BenchmarkWorker) -> float:
    """Time of our forward passes alone, over the same batches."""
    layers = list(worker.layers)
    batches = batches_of(worker)
    for warm_up in (True, False):
        synchronize(worker.target.device)
        start_s = time.perf_counter()
        for number, batch in enumerate(batches[: 3 if warm_up else None]):
            worker.target.hidden_states(batch, layers=layers)
            # About as many batches in flight as the pipeline has.
            if number % 8 == 7:
                synchronize(worker.target.device)
        synchronize(worker.target.device)
    return time.perf_counter() - start_s


def run_sweep(
    target: TransformersTarget, arguments: argparse.Namespace, layers: Sequence[str]
) -> Iterator[Figures]:
    """Our forward pass at several batch sizes, compiled."""
    tokens = arguments.sequence_tokens
    rng = np.random.default_rng(1)
    for count in (int(each) for each in arguments.sweep.split(",")):
        batch = [rng.integers(0, 500, tokens, dtype=np.int32) for _ in range(count)]
        with default_stance():
            target.compiled = None
            rows = (count * tokens,)
            choose_batching(target, batch[:2], layers=layers, compiled_rows=rows)
            seconds = median_s(
                lambda batch=batch: target.hidden_states(batch, layers=layers), target.device
            )
        note = f"{count} sequences, {seconds * 1e3:.1f} ms"
        note += "" if target.compiled else ", NOT COMPILED"
        yield {
            f"stage1_forward_packed_compiled_{count}": (count * tokens / seconds, "tokens/s", note)
        }
    target.compiled = None
    target.forget_recorded()


@contextmanager
def default_stance() -> Iterator[None]:
    """Allows compiling inside the block, whatever was forbidden before."""
    with torch.compiler.set_stance("default"):
        yield


def run_peers(target: TransformersTarget, arguments: argparse.Namespace) -> Iterator[Figures]:
    """The forward pass of transformers itself: all layers, no states kept, nothing written."""
    shape = (arguments.batch_sequences, arguments.sequence_tokens)
    token_ids = torch.randint(0, 500, shape, device=target.device)
    eager = target.decoder.module
    for name, module in (("eager", eager), ("compiled", torch.compile(eager, dynamic=False))):
        with torch.inference_mode(), default_stance():
            seconds = median_s(
                lambda module=module: module(input_ids=token_ids, use_cache=False), target.device
            )
        note = (
            f"forward pass of all layers, {shape[0]} x {shape[1]} tokens, {seconds * 1e3:.1f} ms,"
            f" attention {target.config._attn_implementation}"
        )
        figure = f"stage1_transformers_{name}_tok_s"
        yield {figure: (token_ids.numel() / seconds, "tokens/s", note)}


def print_profile(worker: BenchmarkWorker) -> None:
    """Prints where a forward pass's time goes, kernel by kernel."""
    from torch.profiler import ProfilerActivity, profile

    sequences = list(worker.sequences.values())[: worker.run.extract.batch_tokens // 4096 + 1]
    batch = [each.token_ids for each in sequences]
    activities = [ProfilerActivity.CPU]
    is_gpu = worker.target.device.startswith("cuda")
    activities += [ProfilerActivity.CUDA] if is_gpu else []
    with profile(activities=activities) as profiler:
        worker.target.hidden_states(batch, layers=list(worker.layers))
        synchronize(worker.target.device)
    key = "self_device_time_total" if is_gpu else "self_cpu_time_total"
    print(profiler.key_averages().table(sort_by=key, row_limit=14, max_name_column_width=60))


def main() -> None:
    """Runs what was asked for and records the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--target", help="a real model instead of random weights")
    parser.add_argument("--places", default="/dev/shm,runs", help="folders for the stores")
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--sequence-tokens", type=int, default=3072)
    parser.add_argument("--batch-sequences", type=int, default=4)
    parser.add_argument("--encoding", choices=ENCODING_ERRORS, default="fp8")
    parser.add_argument("--compile", choices=("auto", "yes", "no"), default="auto")
    parser.add_argument("--ragged", action="store_true", help="log-normal lengths")
    parser.add_argument("--sweep", default="", help="batch sizes of forward passes to time first")
    parser.add_argument("--peers", action="store_true", help="time transformers itself, too")
    parser.add_argument(
        "--no-forward-alone", action="store_true", help="skip timing forward passes alone"
    )
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--no-record", action="store_true")
    arguments = parser.parse_args()
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    figures: Figures = {}
    # Told to stop, as by `timeout`, it records what it has so far.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        for found in measure(arguments, device):
            for figure, (value, unit, note) in found.items():
                print(f"{figure:<44} {value:>12.5g} {unit:<9} {note}", flush=True)
            figures |= found
    finally:
        if figures and not arguments.no_record:
            name = torch.cuda.get_device_name(0) if device == "cuda:0" else "CPU"
            title = "Stage 1: from token ids to a committed store"
            record(title, figures, device=name, packages=PACKAGES)


def measure(arguments: argparse.Namespace, device: str) -> Iterator[Figures]:
    """Everything that was asked for, part by part."""
    target = make_target(arguments, device)
    if arguments.peers:
        yield from run_peers(target, arguments)
    if arguments.sweep:
        layers = captured_layers(
            None,
            num_layers=5,
            lm_head_input=False,
            num_target_layers=target.config.num_hidden_layers,
        )
        yield from run_sweep(target, arguments, layers)
    sequences = make_sequences(arguments, target.config.vocab_size)
    forward_s: float | None = None
    for number, place in enumerate(filter(None, arguments.places.split(","))):
        folder = Path(place) / "stage1-benchmark"
        shutil.rmtree(folder, ignore_errors=True)
        worker = make_worker(arguments, target, sequences, folder)
        if number == 0:
            prepare(worker)
            forward_s = None if arguments.no_forward_alone else forward_only_s(worker)
            if arguments.profile:
                print_profile(worker)
        elif target.compiled is not None:
            worker.metrics.evidence = target.compiled.evidence
        suffix = "" if place.startswith("/dev/shm") else "_disk"
        found = run_store(worker, place, arguments, forward_s)
        yield {figure + suffix: value for figure, value in found.items()}
        shutil.rmtree(folder)


def prepare(worker: BenchmarkWorker) -> None:
    """Proof and warm-up, as a worker does them."""
    start_s = time.perf_counter()
    by_length = sorted(worker.sequences.values(), key=lambda each: each.num_tokens)
    worker.choose_way([each.token_ids for each in (by_length[0], by_length[-1])])
    ready_s = time.perf_counter() - start_s
    rows = row_sizes(worker.batch_tokens)
    print(f"proved and warm after {ready_s:.1f} s, rows {rows}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
