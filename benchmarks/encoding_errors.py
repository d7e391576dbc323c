"""What each encoding does to real hidden states: bytes and errors, from a store kept in bf16.

    python benchmarks/encoding_errors.py STORE [--tokens 8000] [--no-record]

Channel scales come from the training split, errors from the held-out split. Errors are relative:
the root mean square of (decoded - exact) over that of exact; a few massive channels hold most of
the energy, so the figure over all hides ruined channels, and each channel is judged by itself, sink
tokens (position 0) left out. Median over the layers.
"""

import argparse
import os
from collections.abc import Iterable

import numpy as np
from results import record

from storage.encodings import (
    ENCODINGS,
    bf16_to_float32,
    calibrate_channels,
    decode,
    encode,
    encoded_bytes_per_token,
)
from storage.reader import Snapshot, open_store

RECORDED = ("token_median", "channel_median", "channel_worst")


def take_states(
    snapshot: Snapshot, indices: Iterable[int], layer: str, num_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """(float32 [tokens, hidden], whether each token is a sequence's first), so many tokens."""
    parts, firsts, taken = [], [], 0
    for index in indices:
        states = bf16_to_float32(snapshot.read(int(index), layers=[layer]).states[layer].data)
        parts.append(states)
        firsts.append(np.arange(len(states)) == 0)
        taken += len(states)
        if taken >= num_tokens:
            break
    return np.concatenate(parts)[:num_tokens], np.concatenate(firsts)[:num_tokens]


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


def main() -> None:
    """Measures every encoding on every layer of the store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store", help="a store whose layers are kept in bf16")
    parser.add_argument("--tokens", type=int, default=8000, help="tokens judged, and calibrated on")
    parser.add_argument("--no-record", action="store_true", help="print only")
    arguments = parser.parse_args()
    store = open_store(arguments.store)
    snapshot = store.snapshot()
    layers = {n: r for n, r in store.layers.items() if r.encoding == "bf16"}
    if not layers:
        raise SystemExit(f"{arguments.store} has no layer in bf16; extract one with that encoding")
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ENCODINGS}
    for layer in layers:
        training = np.flatnonzero(~snapshot.held_out)
        samples, _ = take_states(snapshot, training, layer, arguments.tokens)
        scales = calibrate_channels(samples)
        held_out = np.flatnonzero(snapshot.held_out)
        exact, first = take_states(snapshot, held_out, layer, arguments.tokens)
        for name, entry in ENCODINGS.items():
            channel_scales = scales if entry.calibrated else None
            encoded = encode(name, exact, channel_scales=channel_scales)
            decoded = decode(name, encoded, channel_scales=channel_scales)
            found[name].append(errors_of(exact, decoded, first))
    hidden_size = next(iter(layers.values())).hidden_size
    figures: dict[str, tuple[float, str, str]] = {}
    for name, errors in found.items():
        share = encoded_bytes_per_token(name, hidden_size) / (2 * hidden_size)
        figures[f"encoding_{name}_size_of_bf16"] = (share, "1", f"hidden size {hidden_size}")
        median = {kind: np.median([e[kind] for e in errors]) for kind in errors[0]}
        for kind in RECORDED:
            figures[f"encoding_{name}_error_{kind}"] = (float(median[kind]), "1", "")
        if name == "bf16":
            print("| encoding | of bf16 | " + " | ".join(median) + " |")
        print(f"| {name} | {share:.3f} | " + " | ".join(f"{v:.2%}" for v in median.values()) + " |")
    if not arguments.no_record:
        title = f"Errors of the encodings: {store.identity.target_name}"
        record(title, figures, device=f"{os.cpu_count()} CPU cores", packages=("numpy",))


if __name__ == "__main__":
    main()
