"""One drafter spread over several GPUs by FSDP2: each holds and updates its rows of every matrix.

A layer's weights are gathered when it runs and dropped behind it; its gradient is summed and
scattered as it appears. The layers and their arithmetic are those of the drafter itself.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Float
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.functional import scaled_dot_product_attention

from stage2_train.checkpoint import MODEL, OPTIMIZER
from stage2_train.collate import PackedBatch
from stage2_train.config import OptimizerConfig
from stage2_train.drafter import Drafter
from stage2_train.fast_path import FastPath, context_forward, layer_forward
from stage2_train.optimizer import EPS
from stage2_train.ranks import Ranks
from stage2_train.target_head import TargetHead

MOMENTS = ("exp_avg", "exp_avg_sq")


class _Layer(nn.Module):
    """One layer with the function that runs it: FSDP's hooks stand outside of compiled code."""

    def __init__(self, layer: nn.Module, run: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.run = layer, run

    def forward(self, *inputs: Any) -> Any:
        return self.run(self.layer, *inputs)


class ShardedPath(nn.Module):
    """Runs a drafter whose weights are spread over ranks; takes the place of a `FastPath`."""

    def __init__(
        self, drafter: Drafter, fast_path: FastPath | None, *, dtype: torch.dtype, ranks: Ranks
    ) -> None:
        """Shards the drafter's weights, which lie on the ranks' device in fp32.

        Args:
            drafter: the same drafter on every rank.
            fast_path: the compiled layers; None runs plain ones, as on a CPU.
            dtype: what the layers compute in; weights and gradients are fp32.
            ranks: the ranks that share the drafter.
        """
        super().__init__()
        self.fast_path = plain_path() if fast_path is None else fast_path
        self.fc, self.hidden_norm, self.norm = drafter.fc, drafter.hidden_norm, drafter.norm
        self.layers = nn.ModuleList(_Layer(layer, self.fast_path.layer) for layer in drafter.layers)
        # In a tuple, out of the module tree: its layers must not be found twice.
        self._drafter = (drafter,)
        mesh = init_device_mesh(drafter.fc.weight.device.type, (ranks.size,))
        policy = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        for part in (*self.layers, self):
            fully_shard(part, mesh=mesh, mp_policy=policy)

    def draft(
        self,
        drafter: Drafter,
        batch: PackedBatch,
        features: Float[Tensor, "tokens features"],
        *,
        head: TargetHead,
    ) -> tuple[Float[Tensor, "drafted hidden"], bool]:
        """Does what `FastPath.draft` does; every rank must call it as often."""
        drafted: tuple[Tensor, bool] = self(batch, features, head)
        return drafted

    def forward(
        self, batch: PackedBatch, features: Tensor, head: TargetHead
    ) -> tuple[Tensor, bool]:
        """Runs the layers inside FSDP's hooks."""
        sharded = {part.layer: part for part in cast(Sequence[_Layer], self.layers)}
        fast_path = replace(self.fast_path, layer=lambda layer, *inputs: sharded[layer](*inputs))
        return fast_path.draft(self._drafter[0], batch, features, head=head)


def plain_path() -> FastPath:
    """Gives the layers over plain attention, which reads FlexAttention's masks cell by cell."""
    layer = partial(layer_forward, attend=dense_attend)
    return FastPath(context=context_forward, layer=layer, is_flex_wanted=True)


def dense_attend(
    queries: Tensor, context: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], mask: Any
) -> Tensor:
    """Does what `attend_by_kernels` does by plain attention, for CPUs; slow and simple."""
    keys, values = (
        torch.cat(parts).transpose(0, 1)[None] for parts in zip(context, own, strict=True)
    )
    query = torch.arange(len(queries), device=queries.device)[:, None]
    key = torch.arange(keys.shape[2], device=keys.device)[None, :]
    mixed = scaled_dot_product_attention(
        queries.transpose(0, 1)[None],
        keys,
        values,
        attn_mask=mask.mask_mod(None, None, query, key),
        enable_gqa=True,
    )
    return mixed[0].transpose(0, 1)


class ShardedGradients:
    """FSDP sums the ranks' gradients batch by batch, in fp32, and divides by their number."""

    def __init__(self, parameters: Sequence[nn.Parameter], ranks: Ranks) -> None:
        self.parameters, self.ranks = list(parameters), ranks

    def add(self) -> None:
        """Does nothing: each parameter's `grad` is the sum already."""

    @torch.no_grad()
    def finish(self, factor: float) -> None:
        """Turns the mean over ranks into the sum, times a factor."""
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor * self.ranks.size)


class ShardedAdamW:
    """AdamW on each rank's share of the fp32 weights; the interface is `MasterAdamW`'s."""

    def __init__(self, drafter: Drafter, config: OptimizerConfig, *, ranks: Ranks) -> None:
        """Takes a drafter that `ShardedPath` has sharded."""
        self.config, self.ranks = config, ranks
        self.names = [name for name, _ in drafter.named_parameters()]
        self.parameters = self.masters = list(drafter.parameters())
        decayed = [weight for weight in self.masters if weight.dim() > 1]
        others = [weight for weight in self.masters if weight.dim() <= 1]
        self.adamw = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": config.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=config.learning_rate,
            betas=config.betas,
            eps=EPS,
            fused=True,
        )

    def step(self, rate: float) -> Float[Tensor, ""]:
        """Clips the gradients, updates, and gives their norm over all ranks before clipping."""
        norm = nn.utils.clip_grad_norm_(self.masters, self.config.clip_norm, foreach=True)
        for group in self.adamw.param_groups:
            group["lr"] = rate
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def weights(self) -> dict[str, Tensor]:
        """Gathers the whole weights by name on the first rank's host; all ranks must call it."""
        return self._on_first(dict(zip(self.names, self.masters, strict=True)))

    def state(self) -> dict[str, Tensor]:
        """Gathers the whole optimizer state likewise; empty before the first step."""
        return self._on_first(
            {
                f"{kind}.{name}": value
                for name, weight in zip(self.names, self.masters, strict=True)
                for kind, value in self.adamw.state[weight].items()
            }
        )

    def _on_first(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        kept = {}
        for name, tensor in tensors.items():
            whole = _gathered(tensor)
            if self.ranks.is_first:
                kept[name] = whole.cpu()
        return kept

    @torch.no_grad()
    def load(self, checkpoint: Path) -> None:
        """Takes over this rank's share of a checkpoint, one tensor at a time."""
        with (
            safe_open(checkpoint / MODEL, framework="pt") as weights,
            safe_open(checkpoint / OPTIMIZER, framework="pt") as state,
        ):
            known = set(state.keys())
            for name, master in zip(self.names, self.masters, strict=True):
                master.copy_(_share_of(weights.get_tensor(name), like=master))
                self.adamw.state[master] = {
                    kind: value.to(master.device, torch.float32)
                    if kind == "step"
                    else _share_of(value, like=master)
                    for kind in ("step", *MOMENTS)
                    if f"{kind}.{name}" in known
                    and (value := state.get_tensor(f"{kind}.{name}")) is not None
                }


def whole_drafter(sharded: Drafter, *, dtype: torch.dtype) -> Drafter:
    """Gathers a copy of a sharded drafter on every rank, to be used without the others."""
    with torch.device("meta"):
        drafter = Drafter(sharded.architecture)
    gathered: Mapping[str, Tensor] = {
        name: _gathered(weight).to(dtype) for name, weight in sharded.named_parameters()
    }
    drafter.load_state_dict(gathered, assign=True)
    return drafter.eval()


def _gathered(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _share_of(whole: Tensor, *, like: Tensor) -> Tensor:
    assert isinstance(like, DTensor), "sharded before it is loaded"
    # Every rank has read the whole tensor: nothing needs to be sent.
    return distribute_tensor(
        whole.to(like.device, torch.float32), like.device_mesh, like.placements, src_data_rank=None
    )
