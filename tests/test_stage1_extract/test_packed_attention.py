"""Packed attention: each sequence sees itself only, whatever the rule of the model."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from stage1_extract.packed_attention import (
    PackingUnsupportedError,
    attend_packed,
    packed_input,
)

LENGTHS = [5, 1, 12]
LAYER = nn.Module()


def boundaries(lengths: list[int] = LENGTHS) -> dict[str, Any]:
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return {"cu_seq_lens_q": ends, "host_boundaries": ends}


def projections(*, value_width: int = 8) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 4, sum(LENGTHS), 8), (1, 2, sum(LENGTHS), 8), (1, 2, sum(LENGTHS), value_width)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def by_definition(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scaling: float = 8**-0.5,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor:
    """One token and head at a time, over the tokens of its sequence that it sees."""
    output = torch.zeros(1, query.shape[2], 4, value.shape[-1])
    starts = [0, 5, 6]
    for token in range(query.shape[2]):
        first = max(start for start in starts if start <= token)
        if sliding_window is not None:
            first = max(first, token - sliding_window + 1)
        for head in range(4):
            scores = key[0, head // 2, first : token + 1] @ query[0, head, token] * scaling
            if softcap is not None:
                scores = torch.tanh(scores / softcap) * softcap
            if s_aux is not None:
                scores = torch.cat([scores, s_aux[head : head + 1]])
            weights = scores.softmax(-1)[: token + 1 - first]
            output[0, token, head] = weights @ value[0, head // 2, first : token + 1]
    return output


RULES: list[dict[str, Any]] = [
    {},
    {"scaling": 0.3},
    {"sliding_window": 4},
    {"sliding_window": 100},
    {"softcap": 2.0},
    {"softcap": 2.0, "sliding_window": 3},
    {"s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    {"s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0]), "sliding_window": 4},
]


@pytest.mark.parametrize("value_width", [8, 6])
@pytest.mark.parametrize("rule", RULES)
def test_the_rule_of_each_kind_of_model(rule: dict[str, Any], value_width: int) -> None:
    states = projections(value_width=value_width)
    output, _ = attend_packed(LAYER, *states, None, **boundaries(), **rule)
    torch.testing.assert_close(output, by_definition(*states, **rule), rtol=1e-4, atol=1e-5)


def test_other_sequences_change_nothing() -> None:
    states = projections()
    before, _ = attend_packed(LAYER, *states, None, **boundaries())
    for each in states:
        each[:, :, :6] = torch.nan
    after, _ = attend_packed(LAYER, *states, None, **boundaries())
    assert torch.equal(after[:, 6:], before[:, 6:])


def test_positions_restart_and_boundaries_are_cumulative() -> None:
    sequences = [np.array([7, 8, 9], dtype=np.int32), np.array([5, 6], dtype=np.int32)]
    arguments = packed_input(sequences, device="cpu")
    assert arguments["input_ids"].tolist() == [[7, 8, 9, 5, 6]]
    assert arguments["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
    assert arguments["cu_seq_lens_q"].tolist() == [0, 3, 5]
    assert arguments["cu_seq_lens_q"].dtype == torch.int32
    assert torch.equal(arguments["host_boundaries"], arguments["cu_seq_lens_q"])


def test_a_row_of_fixed_length_is_filled_with_a_sequence_of_its_own() -> None:
    sequences = [np.array([7, 8, 9], dtype=np.int32), np.array([5, 6], dtype=np.int32)]
    arguments = packed_input(sequences, device="cpu", row_tokens=8, num_boundaries=6)
    assert arguments["input_ids"].tolist() == [[7, 8, 9, 5, 6, 0, 0, 0]]
    assert arguments["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert arguments["cu_seq_lens_q"].tolist() == [0, 3, 5, 8, 8, 8]
    shorter = packed_input(sequences[:1], device="cpu", row_tokens=8, num_boundaries=6)
    assert {name: each.shape for name, each in arguments.items()} == {
        name: each.shape for name, each in shorter.items()
    }


def test_repeated_boundaries_change_nothing() -> None:
    states = projections()
    expected, _ = attend_packed(LAYER, *states, None, **boundaries())
    repeated = boundaries([*LENGTHS, 0, 0, 0])
    output, _ = attend_packed(LAYER, *states, None, **repeated)
    assert torch.equal(output, expected)


def test_a_model_that_keeps_boundaries_to_itself_is_refused() -> None:
    with pytest.raises(PackingUnsupportedError, match="does not hand sequence boundaries"):
        attend_packed(LAYER, *projections(), None)


def test_a_layer_with_its_own_mask_is_refused() -> None:
    mask = torch.zeros(1, 1, sum(LENGTHS), sum(LENGTHS))
    with pytest.raises(PackingUnsupportedError, match="mask of its own"):
        attend_packed(LAYER, *projections(), mask, **boundaries())


def test_a_layer_that_is_not_causal_is_refused() -> None:
    layer = nn.Module()
    layer.is_causal = False  # type: ignore[assignment]
    with pytest.raises(PackingUnsupportedError):
        attend_packed(layer, *projections(), None, **boundaries())


@pytest.mark.gpu
@pytest.mark.parametrize("rule", [{}, {"scaling": 0.3}, {"sliding_window": 4}])
def test_the_kernel_agrees_with_one_sequence_at_a_time(rule: dict[str, Any]) -> None:
    states = projections()
    expected, _ = attend_packed(LAYER, *states, None, **boundaries(), **rule)
    on_gpu = [each.to("cuda", torch.bfloat16) for each in states]
    ends = boundaries()
    ends["cu_seq_lens_q"] = ends["cu_seq_lens_q"].cuda()
    output, _ = attend_packed(LAYER, *on_gpu, None, **ends, **rule)
    torch.testing.assert_close(output.float().cpu(), expected, rtol=5e-2, atol=2e-2)
