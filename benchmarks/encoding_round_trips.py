"""Encodings as one function, states in, decoded states out: with PyTorch, on any device.

The product's encodings are repeated here by their definition in `storage.encodings`, because numpy
would need hours for a whole store; `check_round_trips` holds them against it. The others are
candidates: what they decode is exact, how they would lie on disk only counted.

- `klt<B>`: one orthonormal basis a layer (the eigenvectors of the states' second moment), B bits a
  channel shared out by variance, Lloyd-Max levels of a normal distribution.
- `klt<B>p`: the same of what is left when a layer is predicted from the decoded layer before it.
- `lloyd<B>`: Hadamard rotation as in int4, B bits, Lloyd-Max levels, one scale a token.
- `e8`: Hadamard rotation, 8 channels at once rounded to the lattice E8 (2 bits a channel).
"""

import functools
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from storage.encodings import (
    ENCODINGS,
    FP8_MAX,
    INT8_MAX,
    SMALLEST_SCALE,
    calibrate_channels,
    decode,
    encode,
    encoded_bytes_per_token,
)
from storage.rotated import SMALLEST_STEP, group_size, rotation_size

RoundTrip = Callable[[Sequence[Tensor]], list[Tensor]]
"""float32 [tokens, hidden] of each layer -> the same, encoded and decoded."""

_ROTATED = {"int4": (4, 32), "int3": (3, 64), "int2": (2, 64)}
_LARGEST_BITS = 7


def channel_scales(samples: Tensor) -> Tensor:
    """`calibrate_channels` of some tokens."""
    return torch.from_numpy(calibrate_channels(samples[:16_384].cpu().numpy())).to(samples.device)


def each_layer(
    make: Callable[[Tensor], Callable[[Tensor], Tensor]], samples: Sequence[Tensor]
) -> RoundTrip:
    """The round trip of an encoding that treats every layer alone."""
    functions = [make(layer) for layer in samples]
    return lambda states: [function(x) for function, x in zip(functions, states, strict=True)]


# --- the product's ------------------------------------------------------------------------------


def bf16(samples: Sequence[Tensor]) -> RoundTrip:
    """Nothing is lost."""
    return list


def fp8(samples: Sequence[Tensor]) -> RoundTrip:
    """e4m3, one scale a token."""

    def function(states: Tensor) -> Tensor:
        largest = torch.full((), float(FP8_MAX), device=states.device)
        scales = (states.abs().amax(1, keepdim=True) / largest).clamp(min=float(SMALLEST_SCALE))
        codes = (states / scales).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
        return codes.float() * scales

    return each_layer(lambda layer: function, samples)


def int8(samples: Sequence[Tensor]) -> RoundTrip:
    """Channel scale times token scale."""

    def make(layer: Tensor) -> Callable[[Tensor], Tensor]:
        channels = channel_scales(layer)

        def function(states: Tensor) -> Tensor:
            y = states / channels
            largest = torch.full((), float(INT8_MAX), device=states.device)
            scales = (y.abs().amax(1, keepdim=True) / largest).clamp(min=float(SMALLEST_SCALE))
            return (y / scales).round().clamp(-127, 127) * scales * channels

        return function

    return each_layer(make, samples)


def rotated(name: str, samples: Sequence[Tensor]) -> RoundTrip:
    """int4, int3, int2: channel scale, rotation, group scales."""
    bits, group_channels = _ROTATED[name]
    half = 2.0 ** (bits - 1)

    def make(layer: Tensor) -> Callable[[Tensor], Tensor]:
        channels = channel_scales(layer)

        def function(states: Tensor) -> Tensor:
            z = rotate(states / channels)
            groups = z.unflatten(1, (-1, group_size(z.shape[1], group_channels)))
            steps = groups.abs().amax(2) / half
            scales = steps.amax(1, keepdim=True).clamp(min=float(SMALLEST_STEP))
            scale_codes = ((steps / scales).sqrt() * 255).ceil().clamp(1, 255)
            steps = (scale_codes.square() * (scales / 65025.0))[:, :, None]
            codes = ((groups / steps).floor() + half).clamp(0, 2 * half - 1)
            return rotate(((codes - half + 0.5) * steps).flatten(1)) * channels

        return function

    return each_layer(make, samples)


def rotate(values: Tensor) -> Tensor:
    """Multiplies each run of channels with the orthonormal Walsh-Hadamard matrix."""
    size = rotation_size(values.shape[1])
    runs = values.unflatten(1, (-1, size))
    return (runs @ _hadamard(size, values.device)).flatten(1)


@functools.cache
def _hadamard(size: int, device: torch.device) -> Tensor:
    matrix = torch.ones(1, 1, device=device)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(size)


# --- candidates ---------------------------------------------------------------------------------


def lloyd(bits: int, samples: Sequence[Tensor]) -> RoundTrip:
    """Rotation, then Lloyd-Max levels; only the token's size is adapted to."""

    def make(layer: Tensor) -> Callable[[Tensor], Tensor]:
        channels = channel_scales(layer)

        def function(states: Tensor) -> Tensor:
            y = states / channels
            sizes = root_mean_square(y)
            return rotate(nearest_level(rotate(y / sizes), bits)) * sizes * channels

        return function

    return each_layer(make, samples)


def e8(samples: Sequence[Tensor]) -> RoundTrip:
    """Rotation, then points of the lattice E8 inside a ball: about 2 bits a channel."""

    def make(layer: Tensor) -> Callable[[Tensor], Tensor]:
        channels = channel_scales(layer)

        def function(states: Tensor) -> Tensor:
            y = states / channels
            sizes = root_mean_square(y)
            vectors = rotate(y / sizes).unflatten(1, (-1, 8))
            # 2^16 points of E8 with covolume 1 fill a ball of radius 3.15: the largest vectors of
            # a normal distribution are drawn back to it.
            scale = 0.97
            scaled = vectors / scale
            radius = scaled.norm(dim=2, keepdim=True).clamp(min=1e-9)
            points = nearest_e8(scaled * (3.15 / radius).clamp(max=1.0))
            return rotate((points * scale).flatten(1)) * sizes * channels

        return function

    return each_layer(make, samples)


def nearest_e8(vectors: Tensor) -> Tensor:
    """The nearest point of E8: of D8 or of D8 shifted by one half."""
    best = nearest_d8(vectors)
    shifted = nearest_d8(vectors - 0.5) + 0.5
    is_shifted = (vectors - shifted).square().sum(2) < (vectors - best).square().sum(2)
    return torch.where(is_shifted[:, :, None], shifted, best)


def nearest_d8(vectors: Tensor) -> Tensor:
    """The nearest point with whole coordinates of even sum."""
    rounded = vectors.round()
    rest = vectors - rounded
    worst = rest.abs().argmax(2, keepdim=True)
    sign = torch.where(rest.gather(2, worst) < 0, -1.0, 1.0)
    other = rounded.scatter_add(2, worst, sign)
    return torch.where((rounded.sum(2, keepdim=True) % 2 == 0), rounded, other)


def klt(mean_bits: float, samples: Sequence[Tensor], *, is_predicted: bool) -> RoundTrip:
    """Own basis a layer, bits by variance; predicted from the decoded layer before if wanted."""
    layers: list[_KltLayer] = []
    before: Tensor | None = None
    for layer in samples:
        layers.append(_KltLayer(layer, before if is_predicted else None, mean_bits))
        before = layers[-1](layer, before if is_predicted else None)[0]

    def round_trip(states: Sequence[Tensor]) -> list[Tensor]:
        decoded, before = [], None
        for layer, values in zip(layers, states, strict=True):
            before, denormalized = layer(values, before if is_predicted else None)
            decoded.append(denormalized)
        return decoded

    return round_trip


class _KltLayer:
    """Basis, variances, bits and predictor of one layer; works on states of size one."""

    def __init__(self, samples: Tensor, before: Tensor | None, mean_bits: float):
        self.channels = channel_scales(samples)
        normalized, _ = self._normalized(samples)
        self.predictor = None if before is None else fit_predictor(before, normalized)
        rest = normalized - self._predicted(before)
        moment = (rest.double().T @ rest.double()) / len(rest)
        variances, basis = torch.linalg.eigh(moment)
        self.basis = basis.flip(1).float()
        self.deviations = variances.flip(0).clamp(min=1e-12).sqrt().float()
        self.bits = share_bits(self.deviations, mean_bits)

    def _normalized(self, states: Tensor) -> tuple[Tensor, Tensor]:
        y = states / self.channels
        sizes = root_mean_square(y)
        return y / sizes, sizes

    def _predicted(self, before: Tensor | None) -> Tensor | float:
        return 0.0 if self.predictor is None or before is None else before @ self.predictor

    def __call__(self, states: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
        """(decoded states of size one, decoded states)."""
        normalized, sizes = self._normalized(states)
        predicted = self._predicted(before)
        coefficients = (normalized - predicted) @ self.basis / self.deviations
        kept = coefficients[:, self.bits > 0]
        # One byte a token: eight steps to a factor of two.
        spread = (root_mean_square(kept).log2() * 8).round().div(8).exp2().clamp(2.0**-16, 2.0**15)
        coded = torch.zeros_like(coefficients)
        for bits in range(1, _LARGEST_BITS + 1):
            chosen = self.bits == bits
            coded[:, chosen] = nearest_level(coefficients[:, chosen] / spread, bits) * spread
        decoded = predicted + (coded * self.deviations) @ self.basis.T
        return decoded, decoded * sizes * self.channels


def fit_predictor(before: Tensor, wanted: Tensor) -> Tensor:
    """Least squares with a little ridge: wanted is about before @ predictor."""
    moment = before.double().T @ before.double()
    moment += torch.eye(len(moment), device=moment.device) * moment.diagonal().mean() * 1e-3
    return torch.linalg.solve(moment, before.double().T @ wanted.double()).float()


def share_bits(deviations: Tensor, mean_bits: float) -> Tensor:
    """Bits of each coefficient, by reverse water-filling, `mean_bits` on average at most."""
    octaves = deviations.log2()
    low, high = -32.0, 32.0
    for _ in range(60):
        level = (low + high) / 2
        too_many = (octaves + level).round().clamp(0, _LARGEST_BITS).mean() > mean_bits
        low, high = (low, level) if too_many else (level, high)
    return (octaves + low).round().clamp(0, _LARGEST_BITS).int()


def root_mean_square(values: Tensor) -> Tensor:
    """Of each token, [tokens, 1]; never zero."""
    return values.square().mean(1, keepdim=True).sqrt().clamp(min=1e-30)


def nearest_level(values: Tensor, bits: int) -> Tensor:
    """Each value rounded to the nearest Lloyd-Max level of the standard normal distribution."""
    levels = lloyd_max_levels(bits).to(values.device)
    return levels[torch.bucketize(values.contiguous(), (levels[1:] + levels[:-1]) / 2)]


@functools.cache
def lloyd_max_levels(bits: int) -> Tensor:
    """The 2**bits levels that lose least of a standard normal variable.

    By Lloyd's iteration: each level moves to the mean of its cell, (density at its left edge -
    density at its right edge) / mass between them.
    """
    levels = torch.linspace(-2, 2, 2**bits, dtype=torch.float64)
    for _ in range(20_000 if bits > 4 else 2_000):
        edges = torch.nn.functional.pad((levels[1:] + levels[:-1]) / 2, (1, 1), value=math.inf)
        edges[0] = -math.inf
        density = torch.exp(-edges.square() / 2) / math.sqrt(2 * math.pi)
        mass = torch.erf(edges / math.sqrt(2)).diff() / 2
        levels = (density[:-1] - density[1:]) / mass
    return levels.float()


ROUND_TRIPS: dict[str, Callable[[Sequence[Tensor]], RoundTrip]] = {
    "bf16": bf16,
    "fp8": fp8,
    "int8": int8,
    **{name: functools.partial(rotated, name) for name in _ROTATED},
    **{f"lloyd{bits}": functools.partial(lloyd, bits) for bits in (2, 3)},
    "e8": e8,
    **{f"klt{b:g}": functools.partial(klt, b, is_predicted=False) for b in (1, 1.5, 2, 3)},
    **{f"klt{b:g}p": functools.partial(klt, b, is_predicted=True) for b in (0.5, 1, 1.5, 2, 3)},
}


def bytes_per_token(name: str, hidden_size: int) -> float:
    """Bytes of one token and layer, token scales included."""
    if name in ENCODINGS:
        return encoded_bytes_per_token(name, hidden_size)
    if name.startswith("klt"):
        return float(name.strip("kltp")) * hidden_size / 8 + 5
    return (2 if name == "e8" else int(name[-1])) * hidden_size / 8 + 4


def check_round_trips(hidden_size: int = 192, num_tokens: int = 256) -> None:
    """Raises unless the product's encodings decode here to what `storage.encodings` decodes."""
    rng = np.random.default_rng(0)
    states = rng.standard_normal((num_tokens, hidden_size)).astype(np.float32)
    states *= np.exp(rng.standard_normal((1, hidden_size)) * 2).astype(np.float32)
    states[0] *= 1000
    scales = calibrate_channels(states)
    for name, entry in ENCODINGS.items():
        if name not in ROUND_TRIPS or name == "bf16":
            continue
        calibrated = scales if entry.calibrated else None
        wanted = decode(
            name, encode(name, states, channel_scales=calibrated), channel_scales=calibrated
        )
        found = ROUND_TRIPS[name]([torch.from_numpy(states)])([torch.from_numpy(states)])[0].numpy()
        # Sums of a rotation may be rounded in another order: few values then fall on the other
        # side of an edge.
        differing = np.mean(np.abs(found - wanted) > 1e-4 * np.abs(wanted) + 1e-6)
        if differing > 0.01:
            raise AssertionError(f"{name}: {differing:.1%} of the values differ from the reference")
