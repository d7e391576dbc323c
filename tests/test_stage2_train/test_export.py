"""Exports load in the official package and in speculators, and draft there what they draft here."""

import importlib.util
import json
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

from dflash_offline.decode_target import TargetDecoder
from dflash_offline.speculate import DecodingSettings, decode
from stage2_train.checkpoint import save_checkpoint
from stage2_train.draft import ContextCache, draft_logits, head_of
from stage2_train.export import (
    export_official,
    export_speculators,
    load_any_drafter,
    speculators_config,
)

LAYER_IDS = (0, 1)
VARIANTS = {
    "full": {},
    "sliding": {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 4},
    "sliding, both ways": {
        "layer_types": ("sliding_attention", "full_attention"),
        "sliding_window": 4,
        "is_causal": False,
    },
    "causal": {"is_causal": True},
}


@pytest.fixture
def official():
    """The official inference package, with its GPU clock replaced."""
    reason = "pip install --no-deps dflash==0.1.0 to test exports against the official package"
    module = pytest.importorskip("dflash.model", reason=reason)
    with mock.patch.object(module, "_cuda_time", return_value=0.0):
        yield module


@pytest.fixture
def speculators():
    """speculators' DFlash models; packages that only its data preparation needs stay empty."""
    path = Path(__file__).parents[2] / "benchmarks" / "peer_imports.py"
    spec = importlib.util.spec_from_file_location("peer_imports", path)
    peer_imports = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(peer_imports)
    if not (peer_imports.peers_dir() / "speculators").is_dir():
        command = f"pip install --no-deps --target {peer_imports.peers_dir()} speculators==0.9.0"
        pytest.skip(f"{command} to test exports against speculators")
    return peer_imports.import_peer("speculators.models.dflash")


def checkpoint_of(drafter, folder):
    return save_checkpoint(
        folder,
        step=1,
        architecture=drafter.architecture,
        weights=drafter.state_dict(),
        optimizer={},
        state={},
    )


def draft_once(drafter, head, states, *, anchor_ids, anchors):
    """Our drafter's logits for one block of every row, with the states of all tokens."""
    num_tokens = states.shape[1]
    context = ContextCache(drafter, batch_size=len(states), num_slots=num_tokens)
    positions = torch.arange(num_tokens).expand(len(states), -1)
    context.write(states, positions, positions)
    return draft_logits(
        drafter,
        head,
        context,
        anchor_ids=anchor_ids,
        anchors=anchors,
        block_lengths=torch.full_like(anchors, drafter.architecture.block_size),
        num_visible=num_tokens,
    )


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_official_package_drafts_the_same_logits(
    tmp_path, official, make_target, make_drafter, make_head, variant, dtype
):
    target = make_target()
    scales = {
        "input_embedding_scale": 2.0,
        "output_multiplier": 0.5,
        "final_logit_softcapping": 3.0,
    }
    drafter = make_drafter(target, **VARIANTS[variant], **scales)
    out_dir = export_official(checkpoint_of(drafter, tmp_path), tmp_path / "export", dtype=dtype)
    assert {w.dtype for w in load_file(out_dir / "model.safetensors").values()} == {dtype}

    ours = load_any_drafter(out_dir)
    theirs = official.DFlashDraftModel.from_pretrained(out_dir, dtype=torch.float32).eval()
    torch.manual_seed(5)
    states, anchor = torch.randn(1, 11, 64), 9
    token_ids = torch.tensor([[7, *[drafter.architecture.mask_token_id] * 4]])
    with torch.no_grad():
        logits = draft_once(
            ours,
            head_of(ours, make_head(target)),
            states[:, :anchor],
            anchor_ids=token_ids[:, 0],
            anchors=torch.tensor([anchor]),
        )
        hidden = theirs(
            target_hidden=states[:, :anchor],
            noise_embedding=official._raw_input_embeddings(target, token_ids, 2.0),
            position_ids=torch.arange(anchor + 5)[None],
        )
        expected = theirs.compute_logits(hidden[:, 1:], target.lm_head)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4)


def overfit(drafter, head, sequences, states, *, num_steps=120):
    """Teaches a drafter a few sequences by heart, at every anchor before its last tokens."""
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    block_size = drafter.architecture.block_size
    rows = torch.arange(len(sequences))
    for _ in range(num_steps):
        anchors = torch.randint(
            4, sequences.shape[1] - block_size, (len(sequences),), generator=generator
        )
        logits = draft_once(
            drafter, head, states, anchor_ids=sequences[rows, anchors], anchors=anchors
        )
        labels = sequences[rows[:, None], anchors[:, None] + torch.arange(1, block_size)]
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return drafter.eval()


@pytest.fixture
def taught(make_target, make_drafter, make_head):
    """A target, a drafter that knows its answers mostly by heart, and the prompts."""
    target = make_target()
    torch.manual_seed(6)
    prompts = torch.randint(0, 60, (8, 4)).tolist()
    answers = decode(
        TargetDecoder(target),
        prompts,
        settings=DecodingSettings(max_new_tokens=40),
        batch_size=8,
    )
    sequences = torch.tensor(
        [prompt + each.token_ids for prompt, each in zip(prompts, answers.generations, strict=True)]
    )
    with torch.no_grad():
        hidden = target(sequences, output_hidden_states=True).hidden_states
    states = torch.cat([hidden[index + 1] for index in LAYER_IDS], dim=-1)
    drafter = make_drafter(target)
    overfit(drafter, head_of(drafter, make_head(target)), sequences, states)
    return target, drafter, prompts, answers


def test_official_package_decodes_the_same_tokens_and_acceptance_lengths(
    tmp_path, official, taught, make_head
):
    target, drafter, prompts, answers = taught
    out_dir = export_official(
        checkpoint_of(drafter, tmp_path), tmp_path / "export", dtype=torch.float32
    )
    theirs = official.DFlashDraftModel.from_pretrained(out_dir, dtype=torch.float32).eval()
    # A token from the middle of one answer: it stops that answer inside a block.
    for stops in ((), (answers.generations[0].token_ids[18],)):
        ours = decode(
            TargetDecoder(target, layer_ids=LAYER_IDS),
            prompts,
            settings=DecodingSettings(max_new_tokens=37, stop_token_ids=stops),
            batch_size=8,
            drafter=load_any_drafter(out_dir),
            head=make_head(target),
        )
        for prompt, generation in zip(prompts, ours.generations, strict=True):
            expected = official.dflash_generate(
                theirs,
                target=target,
                input_ids=torch.tensor([prompt]),
                max_new_tokens=37,
                stop_token_ids=list(stops) or None,
                return_stats=True,
            )
            assert prompt + generation.token_ids == expected.output_ids[0].tolist()
            assert generation.acceptance_lengths == expected.acceptance_lengths
        lengths = [length for each in ours.generations for length in each.acceptance_lengths]
        assert lengths.count(5) > 5, "no fully accepted blocks: the test says nothing"
    assert any(
        each.token_ids[-1] in stops and each.acceptance_lengths[-1] < 5 for each in ours.generations
    )


@pytest.mark.parametrize("variant", ["full", "sliding", "sliding, both ways"])
def test_speculators_drafts_the_same_logits(
    tmp_path, speculators, make_target, make_drafter, make_head, variant
):
    target = make_target()
    target.save_pretrained(tmp_path / "target")
    # In training speculators counts the window from the anchor, engines from each query: they
    # agree where everything lies inside.
    window = {"sliding_window": 8} if "sliding" in variant else {}
    drafter = make_drafter(target, **{**VARIANTS[variant], **window})
    out_dir = export_speculators(
        checkpoint_of(drafter, tmp_path),
        tmp_path / "export",
        target=str(tmp_path / "target"),
        dtype=torch.float32,
    )
    theirs = speculators.DFlashDraftModel.from_pretrained(out_dir, dtype=torch.float32).eval()
    assert theirs.target_layer_ids == [1, 2]

    torch.manual_seed(7)
    num_tokens, num_anchors = 24, 3
    token_ids = torch.randint(0, 60, (1, num_tokens))
    anchors = torch.tensor([1, 2, 3] if "sliding" in variant else [4, 9, 13])
    loss_mask = torch.zeros(1, num_tokens)
    loss_mask[0, anchors] = 1.0
    with torch.no_grad():
        hidden = target(token_ids, output_hidden_states=True).hidden_states
        # Their convention: layer id i is `hidden_states[i]`.
        states = torch.cat([hidden[index] for index in theirs.target_layer_ids], dim=-1)
        theirs.config.transformer_layer_config._attn_implementation = "sdpa"
        theirs._create_mask_fn = importlib.import_module(
            "torch.nn.attention.flex_attention"
        ).create_mask
        expected = theirs._backbone_forward(
            states,
            token_ids,
            loss_mask,
            hidden[-1],
            torch.zeros(1, num_tokens, dtype=torch.long),
            max_anchors=num_anchors,
        )[1].view(num_anchors, 5, -1)
        logits = draft_once(
            drafter,
            head_of(drafter, make_head(target)),
            states.expand(num_anchors, -1, -1),
            anchor_ids=token_ids[0, anchors],
            anchors=anchors,
        )
    torch.testing.assert_close(logits, expected[:, 1:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("variant", ["full", "sliding", "sliding, both ways"])
def test_speculators_folder_comes_back_as_the_same_drafter(
    tmp_path, make_target, make_drafter, variant
):
    target = make_target()
    target.config.save_pretrained(tmp_path / "target")
    drafter = make_drafter(target, **VARIANTS[variant])
    out_dir = export_speculators(
        checkpoint_of(drafter, tmp_path),
        tmp_path / "export",
        target=str(tmp_path / "target"),
        dtype=torch.float32,
    )
    back = load_any_drafter(out_dir, num_target_layers=3)
    assert back.architecture.attention_rules == drafter.architecture.attention_rules
    assert back.architecture.target_layer_ids == drafter.architecture.target_layer_ids
    for name, weight in drafter.state_dict().items():
        assert torch.equal(back.state_dict()[name], weight)
    with pytest.raises(ValueError, match="does not say how deep its target is"):
        load_any_drafter(out_dir)


def test_what_speculators_saves_is_read(tmp_path, speculators, make_target):
    """A folder written by speculators itself, defaults left out, target weights inside."""
    target = make_target()
    target.save_pretrained(tmp_path / "target")
    settings = speculators.DFlashDraftModel._build_base_config_kwargs(
        "dflash",
        importlib.import_module("transformers").Qwen3Config(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            intermediate_size=48,
            vocab_size=64,
        ),
        verifier_name_or_path=str(tmp_path / "target"),
        draft_vocab_size=64,
        block_size=5,
        mask_token_id=63,
        target_layer_ids=[1, 2],
        draft_attn_impl="sdpa",
    )
    model = speculators.DFlashDraftModel(speculators.DFlashSpeculatorConfig(**settings))
    model.load_verifier_weights()
    model.save_pretrained(tmp_path / "saved")
    back = load_any_drafter(tmp_path / "saved", num_target_layers=3)
    assert back.architecture.target_layer_ids == (0, 1)
    assert torch.equal(back.fc.weight, model.fc.weight)


def test_layouts_refuse_what_they_cannot_say(make_target, make_drafter):
    target = make_target()
    for changes, reason in (
        ({"input_embedding_scale": 2.0}, "cannot scale the target's embedding"),
        ({"is_causal": True}, "causal blocks in sliding-window layers only"),
    ):
        architecture = make_drafter(target, **changes).architecture
        with pytest.raises(ValueError, match=reason):
            speculators_config(architecture, target="some/target", target_architectures=[])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"speculators_model_type": "eagle3"}, "only dflash drafters"),
        ({"draft_vocab_size": 32}, "reduced vocabulary"),
        ({"sample_from_anchor": True}, "sample_from_anchor"),
    ],
)
def test_foreign_drafters_of_other_kinds_are_refused(
    tmp_path, make_target, make_drafter, change, reason
):
    target = make_target()
    config = speculators_config(
        make_drafter(target).architecture, target="some/target", target_architectures=[]
    )
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ValueError, match=reason):
        load_any_drafter(tmp_path, num_target_layers=3)


def test_an_export_replaces_the_one_before_and_leaves_nothing_else(
    tmp_path, make_target, make_drafter
):
    checkpoint = checkpoint_of(make_drafter(make_target()), tmp_path / "drafter")
    for _ in range(2):
        export_official(checkpoint, tmp_path / "out" / "export")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["export"]
    names = {path.name for path in (tmp_path / "out" / "export").iterdir()}
    assert names == {"config.json", "model.safetensors"}
