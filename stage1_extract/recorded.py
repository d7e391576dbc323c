"""Recorded passes: forward passes of fixed shapes, recorded as CUDA graphs and replayed.

A small target's kernels end sooner than Python can launch them: replaying launches all of them at
once. What is replayed may depend on nothing but the inputs' values on the device.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Inputs = Mapping[str, Any]
States = dict[str, Tensor]


class RecordedPass:
    """One forward pass; call it with new inputs of the same shapes.

    Its results lie where they lay before: use them, in the order of the stream, before the next
    call of any pass of the same pool.
    """

    def __init__(self, forward: Callable[[Inputs], States], inputs: Inputs, *, pool: Any):
        """Records a pass that has run before.

        Args:
            forward: What to record; it must not wait for the device.
            inputs: On the device; what is not stays as it is and may not be looked at.
            pool: Memory that passes share which do not run at once.
        """
        copies: dict[int, Tensor] = {}
        self._inputs = {
            # What is one tensor stays one: compiled code has noticed.
            name: copies.setdefault(id(each), each.clone()) if _is_on_device(each) else each
            for name, each in inputs.items()
        }
        # Libraries take their memory at the first use of a stream, which must not be recorded.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=_used(stream, forward, inputs), pool=pool):
            self._states = forward(self._inputs)

    def __call__(self, inputs: Inputs) -> States:
        """The states of new inputs."""
        for name, each in inputs.items():
            if _is_on_device(each):
                self._inputs[name].copy_(each, non_blocking=True)
        self._graph.replay()
        return self._states


def _used(
    stream: torch.cuda.Stream, forward: Callable[[Inputs], States], inputs: Inputs
) -> torch.cuda.Stream:
    with torch.cuda.stream(stream):
        forward(inputs)
    torch.cuda.current_stream().wait_stream(stream)
    return stream


def _is_on_device(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_cuda
