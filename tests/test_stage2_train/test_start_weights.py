"""Where training starts from."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save
from torch.nn.functional import scaled_dot_product_attention
from transformers import Qwen3Config, Qwen3ForCausalLM

from stage2_train.checkpoint import latest_checkpoint, load_drafter
from stage2_train.drafter import Drafter, initialize
from stage2_train.start_weights import take_last_layers, take_start_weights
from stage2_train.train import train_drafter
from storage.head import LAST_LAYERS_FILE
from storage.reader import open_store
from storage.writer import open_for_writing
from tests.test_stage2_train.conftest import HIDDEN_SIZE, fill_store, make_architecture


def made(**changes) -> Drafter:
    drafter = Drafter(make_architecture(**changes))
    initialize(drafter, seed=1)
    return drafter


def layers_like(drafter: Drafter, *, first: int) -> dict[str, torch.Tensor]:
    """What a store keeps of a target whose layers have the drafter's shapes, without head norms."""
    generator = torch.Generator().manual_seed(7)
    return {
        (f"layers.{first + int(name.split('.')[1])}." + name.split(".", 2)[2])
        if name.startswith("layers.")
        else name: torch.randn(weight.shape, generator=generator)
        for name, weight in drafter.named_parameters()
        if not name.endswith(("q_norm.weight", "k_norm.weight"))
        and not name.startswith(("fc", "hidden_norm"))
    }


def test_a_copied_layer_computes_what_the_targets_layer_does():
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, num_hidden_layers=4, vocab_size=64, attn_implementation="eager",
    )  # fmt: skip
    target = Qwen3ForCausalLM(config).eval()
    drafter = made(
        hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, num_hidden_layers=2, rms_norm_eps=config.rms_norm_eps,
        rope_parameters=config.rope_parameters,
    )  # fmt: skip
    with torch.no_grad():
        for name, weight in target.named_parameters():
            if name.endswith("norm.weight"):
                weight.uniform_(0.5, 1.5)
    weights = {name.removeprefix("model."): w for name, w in target.state_dict().items()}
    assert take_last_layers(drafter, weights) == 14
    token_ids = torch.randint(0, 64, (1, 9))
    with torch.no_grad():
        states = target(token_ids, output_hidden_states=True).hidden_states
        nothing = torch.zeros(1, 2, 0, 8)

        def causal(queries, keys, values, _):
            return scaled_dot_product_attention(
                queries, keys, values, is_causal=True, enable_gqa=True
            )

        # Layers 2 and 3 begin with what layer 1 gave; the last of these states are normed.
        drafted = drafter(states[2], torch.arange(9)[None], [(nothing, nothing)] * 2, causal)
    torch.testing.assert_close(drafted, states[-1], rtol=1e-4, atol=1e-5)


def test_context_features_begin_as_the_last_captured_states():
    drafter = made(num_hidden_layers=1)
    fresh = drafter.fc.weight.detach().clone()
    weights = layers_like(drafter, first=6)
    take_last_layers(drafter, weights)
    added = drafter.fc.weight.detach() - fresh
    torch.testing.assert_close(added[:, -HIDDEN_SIZE:], torch.eye(HIDDEN_SIZE), rtol=0, atol=1e-6)
    assert float(added[:, :-HIDDEN_SIZE].abs().max()) == 0.0
    assert torch.equal(drafter.hidden_norm.weight, weights["layers.6.input_layernorm.weight"])


def test_head_norms_that_the_target_lacks_keep_the_scale_of_its_heads():
    drafter = made(num_hidden_layers=1)
    take_last_layers(drafter, layers_like(drafter, first=6))
    attention = drafter.layers[0].self_attn
    inputs = torch.randn(4096, HIDDEN_SIZE) * drafter.layers[0].input_layernorm.weight
    for project, norm in (
        (attention.q_proj, attention.q_norm),
        (attention.k_proj, attention.k_norm),
    ):
        rms = float(project(inputs).detach().square().mean().sqrt())
        assert float(norm.weight[0]) == pytest.approx(rms, rel=0.05)


def test_a_deeper_drafter_gets_them_last_and_a_shallower_one_the_last_of_them():
    deep, weights = made(num_hidden_layers=3), layers_like(made(num_hidden_layers=2), first=4)
    fresh = deep.layers[0].mlp.up_proj.weight.detach().clone()
    assert take_last_layers(deep, weights) == 14
    assert torch.equal(deep.layers[0].mlp.up_proj.weight, fresh)
    for place, number in ((1, 4), (2, 5)):
        own = deep.layers[place].mlp.up_proj.weight
        assert torch.equal(own, weights[f"layers.{number}.mlp.up_proj.weight"])
    shallow = made(num_hidden_layers=1)
    assert take_last_layers(shallow, weights) == 7
    own = shallow.layers[0].mlp.up_proj.weight
    assert torch.equal(own, weights["layers.5.mlp.up_proj.weight"])


def test_parts_of_other_widths_stay_fresh():
    wide = made(num_hidden_layers=1, intermediate_size=56)
    fresh = wide.layers[0].mlp.up_proj.weight.detach().clone()
    assert take_last_layers(wide, layers_like(made(num_hidden_layers=1), first=0)) == 4
    assert torch.equal(wide.layers[0].mlp.up_proj.weight, fresh)


def store_keeping(folder: Path, weights: dict[str, torch.Tensor] | None) -> Path:
    store_dir = fill_store(folder / "store")
    if weights is not None:
        open_for_writing(store_dir).put_head_file(LAST_LAYERS_FILE, save(weights))
    return store_dir


def test_the_store_decides_unless_the_setting_does(tmp_path):
    weights = layers_like(made(), first=3)
    store = open_store(store_keeping(tmp_path, weights))
    for setting in (None, "target"):
        drafter = made()
        said = take_start_weights(drafter, setting, store)
        assert said == "the target's last layers (14 of 14 matrices fit)"
        own = drafter.layers[1].self_attn.v_proj.weight
        assert torch.equal(own, weights["layers.4.self_attn.v_proj.weight"])
    drafter, same = made(), made()
    assert take_start_weights(drafter, "fresh", store) == "fresh weights"
    for name, weight in drafter.named_parameters():
        assert torch.equal(weight, same.get_parameter(name))


@pytest.mark.parametrize(
    ("weights", "reason"),
    [
        (None, r"the store keeps no layers of its target \(store.last_layers\)"),
        (
            {
                "layers.3.mlp.up_proj.weight": torch.zeros(2, 2),
                "layers.3.input_layernorm.weight": torch.full((HIDDEN_SIZE,), 9.0),
                "norm.weight": torch.full((HIDDEN_SIZE,), 9.0),
            },
            "have other widths or parts",
        ),
    ],
)
def test_what_does_not_fit_is_said(tmp_path, weights, reason):
    store = open_store(store_keeping(tmp_path, weights))
    with pytest.raises(ValueError, match=reason) as raised:
        take_start_weights(made(), "target", store)
    assert str(raised.value).endswith('leave it out, or set it to "fresh"')
    drafter, same = made(), made()
    said = take_start_weights(drafter, None, store)
    assert said.startswith("fresh weights: the ")
    for name, weight in drafter.named_parameters():
        assert torch.equal(weight, same.get_parameter(name))


def test_a_training_says_what_it_starts_from_and_a_resumed_one_does_not(make_run, tmp_path, capsys):
    store_dir = store_keeping(tmp_path, layers_like(made(), first=3))
    run = make_run(train={"max_steps": 1}).model_copy(update={"store_dir": store_dir})
    assert train_drafter(run) == 0
    assert "starting from the target's last layers (14 of 14" in capsys.readouterr().out
    # What it started from may be gone by then.
    (store_dir / "head" / LAST_LAYERS_FILE).unlink()
    train = run.train.model_copy(update={"max_steps": 2})
    assert train_drafter(run.model_copy(update={"train": train})) == 0
    assert "starting from" not in capsys.readouterr().out
    assert load_drafter(latest_checkpoint(run.drafter_dir)).architecture.num_hidden_layers == 2
