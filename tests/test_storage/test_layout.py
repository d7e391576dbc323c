from storage import layout
from storage.schema import UnitId


def test_paths_of_a_unit_lie_under_its_two_digits() -> None:
    unit = UnitId(0, 12)
    digits = layout.fan_out(unit)
    assert layout.commit(unit) == f"commits/{digits}/00000-00012.json"
    assert layout.attempt(unit, "ab") == f"shards/{digits}/00000-00012.ab"
    assert layout.added_layers(unit, ["9", "12"]) == f"added/{digits}/00000-00012/12+9.json"


def test_units_spread_over_folders() -> None:
    folders = {layout.fan_out(UnitId(0, index)) for index in range(2000)}
    assert len(folders) > 250


def test_head_records_of_nested_files_lie_flat() -> None:
    assert layout.head_record("a/b%.json") == "head_records/a%2Fb%25.json.json"
