"""Layers: which decoder layers are captured. Ids are 0-based decoder layers everywhere."""

from collections.abc import Sequence

from storage.schema import LM_HEAD_INPUT, layer_name


def spread_layer_ids(num_target_layers: int, num_captured: int) -> list[int]:
    """The layers DFlash takes by default, spread from the second to the fourth but last.

    One layer: the middle one. Else round(1 + i * (L - 4) / (n - 1)), with Python's rounding of
    halves to even, as the official drafters were made.

    Raises:
        ValueError: The target is too shallow for so many different layers.
    """
    if num_captured == 1:
        return [num_target_layers // 2]
    step = (num_target_layers - 4) / (num_captured - 1)
    layer_ids = [round(1 + index * step) for index in range(num_captured)]
    if len(set(layer_ids)) < num_captured or not 0 <= min(layer_ids) <= max(layer_ids):
        raise ValueError(
            f"store.num_layers = {num_captured}: the target has {num_target_layers} layers, too few"
            " to spread these over; ask for fewer or name them in store.target_layer_ids"
        )
    return layer_ids


def captured_layers(
    target_layer_ids: Sequence[int] | None,
    *,
    num_layers: int,
    lm_head_input: bool,
    num_target_layers: int,
) -> list[str]:
    """Names of the layers to store, lowest first, checked against the target's depth.

    Raises:
        ValueError: An id is out of range or named twice, or there are none.
    """
    if target_layer_ids is None:
        target_layer_ids = spread_layer_ids(num_target_layers, num_layers)
    wrong = [each for each in target_layer_ids if not 0 <= each < num_target_layers]
    if wrong:
        raise ValueError(
            f"store.target_layer_ids: {', '.join(map(str, wrong))} out of range; the target has"
            f" decoder layers 0 to {num_target_layers - 1}"
        )
    if len(set(target_layer_ids)) < len(target_layer_ids):
        raise ValueError(f"store.target_layer_ids names a layer twice: {list(target_layer_ids)}")
    if not target_layer_ids:
        raise ValueError("store.target_layer_ids is empty; name at least one decoder layer")
    names = [layer_name(each) for each in sorted(target_layer_ids)]
    return [*names, LM_HEAD_INPUT] if lm_head_input else names
