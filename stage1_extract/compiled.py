"""Compiled decoder layers, and the evidence that they ran compiled.

All layers share one compiled function: their weights are its inputs. Each decoder layer's forward
returns `torch.compiler.is_dynamo_compiling()` beside its output, which the compiler folds to True
and eager code answers with False: a witness that no counter can contradict. Rows have a few fixed
lengths, so that nothing is compiled after the warm-up; then a recompilation is an error.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

# Kinds of layers times lengths of rows: each pair is one graph.
_MAX_GRAPHS = 64


def layer_forward(layer: nn.Module, *inputs: Any, **arguments: Any) -> tuple[Any, bool]:
    """The layer's output, and whether this ran compiled."""
    return type(layer).forward(layer, *inputs, **arguments), torch.compiler.is_dynamo_compiling()


@dataclass
class CompiledLayers:
    """Runs decoder layers compiled and counts how they ran."""

    backend: str = "inductor"
    num_layer_runs: int = 0
    num_compiled_layer_runs: int = 0
    num_replays: int = 0
    """Forward passes that were replayed as recorded: their layers are not among the runs."""
    _function: Callable[..., tuple[Any, bool]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        import torch._dynamo.config

        limits = torch._dynamo.config
        limits.recompile_limit = max(limits.recompile_limit, _MAX_GRAPHS)
        self._function = torch.compile(
            layer_forward, fullgraph=True, dynamic=False, backend=self.backend
        )

    @contextmanager
    def used_by(self, layers: nn.ModuleList) -> Iterator[None]:
        """Lets the layers' own `forward` be the compiled one inside the block; hooks stay."""
        for layer in layers:
            layer.forward = partial(self._run, layer)
        try:
            yield
        finally:
            for layer in layers:
                del layer.forward

    def _run(self, layer: nn.Module, *inputs: Any, **arguments: Any) -> Any:
        output, is_compiled = self._function(layer, *inputs, **arguments)
        self.num_layer_runs += 1
        self.num_compiled_layer_runs += is_compiled
        return output

    def forbid_recompiling(self) -> None:
        """From now on a shape that has not been compiled raises."""
        torch.compiler.set_stance("fail_on_recompile")

    def evidence(self) -> dict[str, Any]:
        """How the layers ran so far and what was compiled, in the words of a log record."""
        compiled, runs = self.num_compiled_layer_runs, self.num_layer_runs
        return {
            "execution": "compiled" if compiled == runs else "mixed" if compiled else "eager",
            "num_layer_runs": runs,
            "num_compiled_layer_runs": compiled,
            "num_replays": self.num_replays,
            **compile_counts(),
        }


def compile_counts() -> dict[str, int]:
    """Compilations of this process so far: graphs, cache hits and misses, breaks."""
    # Importing it costs a second, which an eager run does not pay.
    from torch._dynamo.utils import counters

    return {
        "num_compiles": counters["stats"]["unique_graphs"],
        "num_compiles_cold": counters["inductor"]["fxgraph_cache_miss"],
        "num_compiles_cached": counters["inductor"]["fxgraph_cache_hit"],
        "num_graph_breaks": sum(counters["graph_break"].values()),
    }
