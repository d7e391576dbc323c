"""Whether two stores of the same target hold the same states, up to rounding."""

from pathlib import Path

import numpy as np

from storage.reader import open_store


def worst_difference(
    store_dir: Path, reference_dir: Path, *, num_sequences: int = 4
) -> tuple[float, str]:
    """Largest relative difference of a layer's states between two stores, and where it was.

    Norms of differences are averaged over a sequence's tokens, as the proof at the start of each
    extraction does it.

    Args:
        store_dir: the store in question.
        reference_dir: one that holds its sequences, too.
        num_sequences: how many to compare.
    """
    store, reference = open_store(store_dir), open_store(reference_dir)
    layers = list(store.layers)
    snapshot = store.snapshot()
    worst, about = 0.0, "no sequence was compared"
    for index in range(min(num_sequences, snapshot.num_sequences)):
        sequence_id = snapshot.sequence_id(index)
        for layer in layers:
            states, expected = (
                each.sequence(sequence_id).hidden_states(layers=[layer])[:, 0]
                for each in (store, reference)
            )
            error = np.linalg.norm(states - expected, axis=1) / np.linalg.norm(expected, axis=1)
            if float(error.mean()) >= worst:
                worst = float(error.mean())
                about = f"layer {layer} of {sequence_id}, with the encoding's rounding of both"
    return worst, about
