"""What each encoding does to real hidden states: bytes and errors, from stores kept in bf16.

    python benchmarks/encoding_errors.py STORE... [--tokens 6000] [--encodings ...] [--no-record]

A STORE is what `extract` makes of a target's own answers with `store.encoding = "bf16"` and a
`held_out_fraction` above 0, for example of the lines that `encoding_acceptance.py lines` writes.
Whatever an encoding calibrates (channel scales, bases, predictors) comes from the training split,
errors from the held-out split. Errors are relative: the root mean square of (decoded - exact) over
that of exact; a few massive channels hold most of the energy, so the figure over all hides ruined
channels, and each channel is judged by itself, sink tokens (position 0) left out. Median over the
layers. "packed" is what blosc (zstd level 1, byte shuffle) makes of the encoded bytes, in chunks of
256 tokens, in bytes by bytes of bf16. Candidates that the product does not have are described in
`encoding_round_trips`.
"""

import argparse
import os
from collections.abc import Iterable

import numpy as np
import torch
from encoding_round_trips import ROUND_TRIPS, bytes_per_token, check_round_trips
from numcodecs import Blosc
from results import record

from storage.encodings import ENCODINGS, bf16_to_float32, calibrate_channels, encode
from storage.reader import Snapshot, open_store
from storage.schema import CHUNK_TOKENS

RECORDED = ("token_median", "channel_median", "channel_worst")
DEFAULT = "fp8,int8,int4,int3,klt2p,lloyd2,e8,klt2,int2,klt1.5p,klt1p"


def take_states(
    snapshot: Snapshot, indices: Iterable[int], layers: list[str], num_tokens: int
) -> tuple[list[torch.Tensor], np.ndarray]:
    """(float32 [tokens, hidden] by layer, whether each token is a sequence's first)."""
    parts: list[list[np.ndarray]] = [[] for _ in layers]
    firsts: list[np.ndarray] = []
    for index in indices:
        read = snapshot.read(int(index), layers=layers)
        for part, name in zip(parts, layers, strict=True):
            part.append(bf16_to_float32(read.states[name].data))
        firsts.append(np.arange(len(read.token_ids)) == 0)
        if sum(map(len, firsts)) >= num_tokens:
            break
    states = [torch.from_numpy(np.concatenate(part)[:num_tokens]) for part in parts]
    return states, np.concatenate(firsts)[:num_tokens]


def size_of(values: np.ndarray, axis: int | None = None) -> np.ndarray:
    """Root mean square."""
    return np.asarray(np.sqrt(np.mean(values.astype(np.float64) ** 2, axis=axis)))


def errors_of(exact: np.ndarray, decoded: np.ndarray, first: np.ndarray) -> dict[str, float]:
    """Relative errors, seen in several ways."""
    error = decoded - exact
    by_token = size_of(error, 1) / np.maximum(size_of(exact, 1), 1e-30)
    rest = ~first
    by_channel = size_of(error[rest], 0) / np.maximum(size_of(exact[rest], 0), 1e-30)
    return {
        "all": float(size_of(error) / size_of(exact)),
        "token_median": float(np.median(by_token)),
        "token_p99": float(np.quantile(by_token, 0.99)),
        "channel_median": float(np.median(by_channel)),
        "channel_worst": float(by_channel.max()),
        "sink_tokens": float(np.median(by_token[first])),
    }


def packed_share(name: str, exact: np.ndarray, calibration: np.ndarray) -> float:
    """Bytes of a layer, encoded and packed, by those of bf16; scales are not packed."""
    codec = Blosc(cname="zstd", clevel=1, shuffle=Blosc.SHUFFLE, blocksize=512 * 1024)
    scales = calibrate_channels(calibration) if ENCODINGS[name].calibrated else None
    encoded = encode(name, exact, channel_scales=scales)
    chunks = np.split(encoded.data, range(CHUNK_TOKENS, len(exact), CHUNK_TOKENS))
    packed = sum(len(codec.encode(np.ascontiguousarray(chunk))) for chunk in chunks)
    packed += 0 if encoded.scales is None else encoded.scales.nbytes
    return packed / (2 * exact.size)


def judge(store_dir: str, names: list[str], num_tokens: int) -> tuple[str, dict[str, float]]:
    """(target's name, figures) of one store; prints its table."""
    store = open_store(store_dir)
    snapshot = store.snapshot()
    layers = [name for name, layer in store.layers.items() if layer.encoding == "bf16"]
    if not layers:
        raise SystemExit(f"{store_dir} has no layer in bf16; extract one with that encoding")
    samples, _ = take_states(snapshot, np.flatnonzero(~snapshot.held_out), layers, 65_536)
    exact, first = take_states(snapshot, np.flatnonzero(snapshot.held_out), layers, num_tokens)
    hidden_size = store.identity.hidden_size
    print(
        f"\n{store.identity.target_name}: layers {', '.join(layers)}, hidden size {hidden_size}, "
        f"calibrated on {len(samples[0]):,} tokens, judged on {len(exact[0]):,}\n"
    )
    figures: dict[str, float] = {}
    for number, name in enumerate(names):
        decoded = ROUND_TRIPS[name](samples)(exact)
        errors = [
            errors_of(one.numpy(), other.numpy(), first)
            for one, other in zip(exact, decoded, strict=True)
        ]
        median = {kind: float(np.median([e[kind] for e in errors])) for kind in errors[0]}
        share = bytes_per_token(name, hidden_size) / (2 * hidden_size)
        packed = "-"
        if name in ENCODINGS:
            shares = [
                packed_share(name, one.numpy(), other.numpy()[:16_384])
                for one, other in zip(exact, samples, strict=True)
            ]
            packed = f"{float(np.mean(shares)):.3f}"
            figures[f"encoding_{name}_packed_size_of_bf16"] = float(np.mean(shares))
        figures[f"encoding_{name}_size_of_bf16"] = share
        figures |= {f"encoding_{name}_error_{kind}": median[kind] for kind in RECORDED}
        if number == 0:
            print("| encoding | of bf16 | packed | " + " | ".join(median) + " |")
            print("|---" * (3 + len(median)) + "|")
        values = " | ".join(f"{v:.2%}" for v in median.values())
        print(f"| `{name}` | {share:.3f} | {packed} | {values} |", flush=True)
    return store.identity.target_name, figures


def main() -> None:
    """Measures every encoding on every layer of the stores."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stores", nargs="+", help="stores whose layers are kept in bf16")
    parser.add_argument("--tokens", type=int, default=6000, help="tokens judged")
    parser.add_argument("--encodings", default=f"bf16,{DEFAULT}")
    parser.add_argument("--no-record", action="store_true", help="print only")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    check_round_trips()
    for store_dir in arguments.stores:
        target, figures = judge(store_dir, arguments.encodings.split(","), arguments.tokens)
        if not arguments.no_record:
            rows = {name: (value, "1", target) for name, value in figures.items()}
            device = f"{os.cpu_count()} CPU cores"
            title = f"Errors of the encodings: {target}"
            record(title, rows, device=device, packages=("numpy", "torch"))


if __name__ == "__main__":
    main()
