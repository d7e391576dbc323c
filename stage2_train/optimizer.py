"""AdamW on fp32 master weights, with a cosine schedule and gradient clipping."""

import math
from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor, nn

from stage2_train.config import OptimizerConfig


def learning_rate(step: int, *, total_steps: int, config: OptimizerConfig) -> float:
    """Gives the rate of update number `step` (from 0): linear warm-up, then cosine to zero."""
    warmup_steps = math.ceil(config.warmup_fraction * total_steps)
    if step < warmup_steps:
        return config.learning_rate * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


class MasterAdamW:
    """Updates fp32 master weights and hands them to the drafter in its own type.

    Where the drafter itself is fp32 its parameters are the master weights.
    """

    def __init__(
        self,
        drafter: nn.Module,
        config: OptimizerConfig,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Takes fp32 masters of the drafter's weights, then moves it to its device and type."""
        self.config = config
        masters = [p.detach().to(device, torch.float32) for p in drafter.parameters()]
        drafter.to(device, dtype)
        self.names = [name for name, _ in drafter.named_parameters()]
        self.parameters = list(drafter.parameters())
        self.masters = (
            self.parameters
            if dtype == torch.float32
            else [nn.Parameter(master) for master in masters]
        )
        decayed = [master for master in self.masters if master.dim() > 1]
        others = [master for master in self.masters if master.dim() <= 1]
        self.adamw = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": config.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=config.learning_rate,
            betas=config.betas,
            fused=True,
        )

    def step(self, rate: float) -> Float[Tensor, ""]:
        """Clips the gradients, updates, and gives their norm before clipping; does not wait."""
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            if master is not parameter:
                master.grad = None if parameter.grad is None else parameter.grad.float()
                parameter.grad = None
        norm = nn.utils.clip_grad_norm_(self.masters, self.config.clip_norm, foreach=True)
        for group in self.adamw.param_groups:
            group["lr"] = rate
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        self._publish()
        return norm

    def weights(self) -> dict[str, Tensor]:
        """Gives the master weights by name."""
        return {n: m.detach() for n, m in zip(self.names, self.masters, strict=True)}

    def state(self) -> dict[str, Tensor]:
        """Gives the optimizer's state by name; empty before the first step."""
        return {
            f"{kind}.{name}": value
            for name, master in zip(self.names, self.masters, strict=True)
            for kind, value in self.adamw.state[master].items()
        }

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        """Takes over master weights and optimizer state, as `weights` and `state` gave them."""
        for name, master in zip(self.names, self.masters, strict=True):
            master.copy_(weights[name])
            self.adamw.state[master] = {
                kind: _like_fresh_state(kind, value, master)
                for kind in ("step", "exp_avg", "exp_avg_sq")
                if (value := state.get(f"{kind}.{name}")) is not None
            }
        self._publish()

    @torch.no_grad()
    def _publish(self) -> None:
        pairs = [
            (parameter, master)
            for parameter, master in zip(self.parameters, self.masters, strict=True)
            if parameter is not master
        ]
        if pairs:
            parameters, masters = zip(*pairs, strict=True)
            torch._foreach_copy_(list(parameters), list(masters))


def _like_fresh_state(kind: str, value: Tensor, master: Tensor) -> Tensor:
    # The fused kernel wants the step count where the weights are, as a tensor of its own.
    return value.to(master.device, torch.float32).clone() if kind == "step" else value.to(master)
