"""What sampling accepts and gains: distributions, rejection sampling, clipping at stops."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def sampling_probabilities(
    logits: Float[Tensor, "*rows vocab"], *, temperature: float, top_p: float, top_k: int
) -> Float[Tensor, "*rows vocab"]:
    """Give the distribution that a token is sampled from, in fp32.

    Logits are divided by the temperature, cut to the `top_k` largest (0 keeps all), then to the
    smallest set whose probability reaches `top_p`; what is left is normalised.
    """
    scores = logits.float() / temperature
    if 0 < top_k < scores.shape[-1]:
        smallest_kept = scores.topk(top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < smallest_kept, -torch.inf)
    probabilities = scores.softmax(dim=-1)
    if top_p >= 1.0:
        return probabilities
    ordered, order = probabilities.sort(dim=-1, descending=True)
    # A token stays while the tokens before it have not reached top_p, so the first always stays.
    ordered = ordered.masked_fill(ordered.cumsum(dim=-1) - ordered >= top_p, 0.0)
    kept = torch.zeros_like(probabilities).scatter_(-1, order, ordered)
    return kept / kept.sum(dim=-1, keepdim=True)


def draw(
    probabilities: Float[Tensor, "*rows vocab"], *, generator: torch.Generator | None
) -> Int[Tensor, "*rows"]:
    """Draw one token of each row's distribution."""
    flat = probabilities.reshape(-1, probabilities.shape[-1])
    return torch.multinomial(flat, 1, generator=generator).view(probabilities.shape[:-1])


def accept_sampled(
    drafted: Int[Tensor, "batch drafted"],
    draft_probabilities: Float[Tensor, "batch drafted vocab"],
    target_probabilities: Float[Tensor, "batch queries vocab"],
    num_drafted: Int[Tensor, "batch"],
    *,
    generator: torch.Generator | None,
) -> tuple[Int[Tensor, "batch"], Int[Tensor, "batch"]]:
    """Accept drafted tokens by rejection sampling and draw the token after them.

    A drafted token is kept with probability min(1, p / q); the token after the kept ones comes from
    max(p - q, 0), or from p when every drafted token was kept (Leviathan et al., 2023). The tokens
    are then distributed as the target's own, whatever the drafter.

    Returns:
        The number of accepted tokens and the token after them, [batch] each.
    """
    queries = target_probabilities.shape[1]
    offsets = torch.arange(queries - 1, device=drafted.device)
    p = target_probabilities[:, : queries - 1].gather(-1, drafted[..., None])[..., 0]
    q = draft_probabilities.gather(-1, drafted[..., None])[..., 0]
    uniform = torch.rand(q.shape, generator=generator, device=q.device, dtype=q.dtype)
    kept = (uniform * q < p) & (offsets < num_drafted[:, None])
    num_accepted = kept.long().cumprod(dim=1).sum(dim=1)

    rows = torch.arange(drafted.shape[0], device=drafted.device)
    target_row = target_probabilities[rows, num_accepted]
    # Nothing was drafted past the last offset: there q is zero and the residual is p itself.
    draft_row = draft_probabilities[rows, num_accepted.clamp(max=queries - 2)]
    draft_row = draft_row * (num_accepted < num_drafted)[:, None]
    residual = (target_row - draft_row).clamp_min(0.0)
    # p == q up to rounding leaves nothing; then a rejection was a rounding accident and p is right.
    residual = torch.where(residual.sum(dim=-1, keepdim=True) > 0, residual, target_row)
    return num_accepted, draw(residual, generator=generator)


def clip_gain(
    num_accepted: Int[Tensor, "batch"],
    room: Int[Tensor, "batch"],
    is_stop: Bool[Tensor, "batch queries"],
) -> tuple[Int[Tensor, "batch"], Bool[Tensor, "batch"]]:
    """Give the tokens that a pass gains: `num_accepted + 1`, clipped at a stop token or the limit.

    The official package clips the same way, so the last block of a request can be shorter.

    Args:
        num_accepted: Drafted tokens accepted.
        room: Tokens that the request may still gain.
        is_stop: Whether the token gained at each place is a stop token.

    Returns:
        The tokens gained, stop token included, and whether the request met a stop token.
    """
    gained = torch.minimum(num_accepted + 1, room)
    places = torch.arange(is_stop.shape[1], device=is_stop.device)
    first_stop = torch.where(is_stop, places, is_stop.shape[1]).amin(dim=1)
    stopped = first_stop < gained
    return torch.where(stopped, first_stop + 1, gained), stopped
