"""Ranks get a GPU each and torchrun's variables."""

import pytest

from dflash_offline.rank_launch import rank_places
from stage2_train.ranks import Ranks, find_ranks


def test_each_rank_has_its_gpu_and_knows_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    places = rank_places(2, available_gpus=2, port=1234)
    assert [place.environment["CUDA_VISIBLE_DEVICES"] for place in places] == ["5", "7"]
    assert {place.environment["MASTER_PORT"] for place in places} == {"1234"}
    found = [find_ranks(place.environment) for place in places]
    assert found == [Ranks(rank=rank, size=2, local_rank=rank) for rank in range(2)]


def test_too_few_gpus_are_refused_and_none_means_the_cpu() -> None:
    with pytest.raises(ValueError, match="gpus_per_drafter = 3, but this process sees 2 GPUs"):
        rank_places(3, available_gpus=2, port=1)
    assert "CUDA_VISIBLE_DEVICES" not in rank_places(3, available_gpus=0, port=1)[0].environment
