"""Transfer: a batch's states encoded on the GPU and copied to pinned memory on a side stream."""

import queue
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from stage1_extract.encode import (
    DeviceBuffers,
    EncodedBatch,
    as_batch,
    buffer_bytes,
    channel_scales_on,
    divide,
    encode_on_device,
)
from stage1_extract.loss_sample import take_sample
from stage1_extract.worker_metrics import Part
from storage.schema import LayerRecord

_MIN_BUFFERS, _MAX_BUFFERS = 2, 8


def _mark(stream: torch.cuda.Stream | None = None, *, blocking: bool = False) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True, blocking=blocking)
    event.record(stream)
    return event


@dataclass
class CudaArrival:
    """One batch on its way; its events say when each part was done."""

    layers: Mapping[str, LayerRecord]
    num_tokens: int
    encoded: DeviceBuffers | None
    device_sample: Mapping[str, Tensor] | None
    host_sample: Mapping[str, Tensor] | None
    buffer: Shaped[Tensor, "bytes"]
    free_buffers: "queue.SimpleQueue[Tensor]"
    previous_end: torch.cuda.Event | None
    forward_start: torch.cuda.Event
    forward_end: torch.cuda.Event
    encode_start: torch.cuda.Event
    encode_end: torch.cuda.Event
    copy_start: torch.cuda.Event
    copy_end: torch.cuda.Event = field(repr=False)

    def wait(self) -> EncodedBatch:
        """The batch, once it has arrived; valid until `release`."""
        self.copy_end.synchronize()
        # The memory on the device may be used again, now that the copies are done.
        self.encoded = self.device_sample = None
        return as_batch(divide(self.buffer, self.layers, self.num_tokens), self.layers)

    def sample(self) -> Mapping[str, Float[Tensor, "sampled _"]] | None:
        """Some of its states as they were, on the host; asked after `wait`."""
        return self.host_sample

    def seconds(self) -> Mapping[Part, float]:
        """Where the GPU's time went; `wait` is its time without work for want of a buffer."""
        idle_s = _between(self.previous_end, self.forward_start) if self.previous_end else 0.0
        return {
            "idle": idle_s,
            "forward": _between(self.forward_start, self.forward_end),
            "wait": _between(self.forward_end, self.encode_start),
            "encode": _between(self.encode_start, self.encode_end),
            "copy": _between(self.copy_start, self.copy_end),
        }

    def release(self) -> None:
        """Gives the pinned buffer back."""
        self.free_buffers.put(self.buffer)


def _between(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
    return float(start.elapsed_time(end)) / 1e3


class CudaTransfer:
    """Encodes on the current stream, copies on one of its own."""

    def __init__(
        self,
        layers: Mapping[str, LayerRecord],
        *,
        device: str,
        batch_tokens: int,
        write_buffer_bytes: int,
    ):
        """Prepares the ring of buffers.

        Args:
            layers: The layer records.
            device: The GPU.
            batch_tokens: Tokens of the largest batch.
            write_buffer_bytes: Pinned memory of the ring, at least two batches.
        """
        self._layers = layers
        self._channel_scales = channel_scales_on(device, layers, list(layers))
        self._stream = torch.cuda.Stream(device)
        num_bytes = buffer_bytes(layers, batch_tokens)
        self.num_buffers = max(_MIN_BUFFERS, min(_MAX_BUFFERS, write_buffer_bytes // num_bytes))
        self._free: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        for _ in range(self.num_buffers):
            self._free.put(torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True))
        self._forward_start: torch.cuda.Event | None = None
        self._previous_end: torch.cuda.Event | None = None

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compiles the kernels for states of a type, before the first batch needs them."""
        states = {
            name: torch.zeros(16, record.hidden_size, dtype=dtype, device=self._stream.device)
            for name, record in self._layers.items()
        }
        encode_on_device(states, self._layers, self._channel_scales)

    def begin(self) -> None:
        """Notes that a forward pass is handed over next."""
        self._forward_start = _mark()

    def start(
        self, states: Mapping[str, Float[Tensor, "tokens _"]], *, with_sample: bool
    ) -> CudaArrival:
        """Hands encoding and copy over; waits only where all buffers are in use.

        Args:
            states: By layer name, the batch's tokens end to end.
            with_sample: Whether a few states are copied as they are, too.
        """
        assert self._forward_start is not None, "begin comes first"
        forward_end = _mark()
        buffer = self._free.get()
        encode_start = _mark()
        encoded = encode_on_device(states, self._layers, self._channel_scales)
        sample = take_sample(states) if with_sample else None
        encode_end = _mark()
        self._stream.wait_event(encode_end)
        copy_start = _mark(self._stream)
        with torch.cuda.stream(self._stream):
            buffer[: len(encoded.whole)].copy_(encoded.whole, non_blocking=True)
            host_sample = sample and {
                name: each.to("cpu", non_blocking=True) for name, each in sample.items()
            }
        arrival = CudaArrival(
            layers=self._layers,
            num_tokens=len(next(iter(states.values()))),
            encoded=encoded,
            device_sample=sample,
            host_sample=host_sample,
            buffer=buffer,
            free_buffers=self._free,
            previous_end=self._previous_end,
            forward_start=self._forward_start,
            forward_end=forward_end,
            encode_start=encode_start,
            encode_end=encode_end,
            copy_start=copy_start,
            # Whoever waits for it sleeps, instead of keeping a core busy.
            copy_end=_mark(self._stream, blocking=True),
        )
        self._previous_end = encode_end
        return arrival
