"""AdamW on fp32 master weights, with a cosine schedule and gradient clipping."""

import math
from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor, nn

from stage2_train.config import OptimizerConfig

EPS = 1e-8
# Weights of a drafter whose update waits for launches, not for memory: up to here torch's kernels
# for many tensors are used, of which a step needs ten and not two for each tensor.
FEW_WEIGHTS = 100_000_000


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
        num_weights = sum(master.numel() for master in self.masters)
        self._has_kernels = (
            self.masters is not self.parameters
            and self.parameters[0].is_cuda
            and num_weights > FEW_WEIGHTS
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
            eps=EPS,
            fused=True,
        )

    def step(self, rate: float) -> Float[Tensor, ""]:
        """Clips the gradients, updates, and gives their norm before clipping; does not wait."""
        if self._has_kernels:
            return self._fused_step(rate)
        self._take_gradients()
        norm = nn.utils.clip_grad_norm_(self.masters, self.config.clip_norm, foreach=True)
        for group in self.adamw.param_groups:
            group["lr"] = rate
        self.adamw.step()
        if self.masters is self.parameters:
            self.adamw.zero_grad(set_to_none=True)
        self._publish()
        return norm

    @torch.no_grad()
    def _take_gradients(self) -> None:
        """Moves the parameters' gradients to the masters, whose memory for them stays."""
        if self.masters is self.parameters:
            return
        own = [torch.empty_like(m) if m.grad is None else m.grad for m in self.masters]
        torch._foreach_copy_(own, [_gradient_of(parameter) for parameter in self.parameters])
        for master, parameter, gradient in zip(self.masters, self.parameters, own, strict=True):
            master.grad, parameter.grad = gradient, None

    @torch.no_grad()
    def _fused_step(self, rate: float) -> Float[Tensor, ""]:
        """Does the same with one kernel a tensor, which reads bf16 gradients as they are."""
        # Imported here, for a CPU needs no Triton.
        from stage2_train.optimizer_kernels import adamw_update, norm_of

        gradients = [_gradient_of(parameter) for parameter in self.parameters]
        norm = norm_of(gradients)
        gradient_scale = (self.config.clip_norm / (norm + 1e-6)).clamp(max=1.0)
        for group in self.adamw.param_groups:
            group["lr"] = rate
        decay_of = {
            id(master): group["weight_decay"]
            for group in self.adamw.param_groups
            for master in group["params"]
        }
        for master, parameter, gradient in zip(
            self.masters, self.parameters, gradients, strict=True
        ):
            state = self._state_of(master)
            state["step"] += 1
            adamw_update(
                master.detach(),
                state["exp_avg"],
                state["exp_avg_sq"],
                parameter.detach(),
                gradient,
                gradient_scale=gradient_scale,
                learning_rate=rate,
                betas=self.config.betas,
                eps=EPS,
                weight_decay=decay_of[id(master)],
                step=int(state["step"]),
            )
            parameter.grad = None
        return norm

    def _state_of(self, master: nn.Parameter) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.adamw.state[master]
        if not state:
            # The step count stays on the host: reading it must not wait for the device.
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(master)
            state["exp_avg_sq"] = torch.zeros_like(master)
        return state

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
                kind: self._like_fresh_state(kind, value, master)
                for kind in ("step", "exp_avg", "exp_avg_sq")
                if (value := state.get(f"{kind}.{name}")) is not None
            }
        self._publish()

    def _like_fresh_state(self, kind: str, value: Tensor, master: nn.Parameter) -> Tensor:
        if kind != "step":
            return value.to(master)
        return value.to("cpu" if self._has_kernels else master.device, torch.float32).clone()

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


def _gradient_of(parameter: nn.Parameter) -> Tensor:
    # A batch without a label gives no gradient to some weights; AdamW still decays their moments.
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
