"""A few integers say where a run stands; the length of the run does not depend on the place."""

import json

from stage2_train.position import Position, total_steps


def test_position_round_trip():
    position = Position(step=7, epoch=1, batch=2, snapshot_id="abc")
    assert Position.from_json(json.loads(json.dumps(position.to_json()))) == position
    assert position.after_step() == Position(step=8, epoch=1, batch=3, snapshot_id="abc")
    assert position.next_epoch() == Position(step=7, epoch=2)


def test_tokens_seen_go_on_over_epochs_and_checkpoints_of_before_they_were_counted():
    position = Position().after_step(num_tokens=500).next_epoch().after_step(num_tokens=12)
    assert position.num_tokens == 512
    older = position.to_json()
    del older["num_tokens"]
    assert Position.from_json(older).num_tokens == 0


def test_total_steps_are_the_same_anywhere_in_an_epoch():
    totals = {
        total_steps(
            Position(step=20 + batch, epoch=2, batch=batch),
            num_batches=10,
            batches_per_step=1,
            epochs=6,
            max_steps=None,
        )
        for batch in range(11)
    }
    assert totals == {60}


def test_total_steps_count_a_short_last_step_of_every_epoch():
    totals = {
        total_steps(
            Position(step=6 + batch // 4, epoch=2, batch=batch),
            num_batches=10,
            batches_per_step=4,
            epochs=6,
            max_steps=None,
        )
        for batch in (0, 4, 8)
    }
    assert totals == {6 + 4 * 3}


def test_total_steps_end_at_the_limit():
    start = Position()
    assert total_steps(start, num_batches=10, batches_per_step=1, epochs=6, max_steps=25) == 25
    assert total_steps(start, num_batches=10, batches_per_step=1, epochs=1, max_steps=25) == 10
