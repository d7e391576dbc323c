"""Evidence of how steps ran: compiled or eager, and where each compilation came from.

A step's function returns `torch.compiler.is_dynamo_compiling()`, which the compiler folds to True
and eager code answers with False: a witness that no counter can contradict. Compilations are
counted with their origin, cold or from the cache on disk.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

# Steps of a process after which every shape has been compiled, forwards and backwards.
WARMUP_STEPS = 3


@dataclass
class Evidence:
    """Counts what was compiled in this process and how the steps ran."""

    is_compiling_wanted: bool
    num_steps_ever: int = 0
    num_steps: int = 0
    num_compiled_steps: int = 0
    _last: dict[str, int] = field(default_factory=dict)

    def add_step(self, *, is_compiled: bool) -> None:
        """Takes note of a step's own witness; after the warm-up a recompilation is an error."""
        self.num_steps_ever += 1
        if self.is_compiling_wanted and self.num_steps_ever == WARMUP_STEPS:
            torch.compiler.set_stance("fail_on_recompile")
        self.num_steps += 1
        self.num_compiled_steps += is_compiled

    def compiling_allowed(self) -> AbstractContextManager[object]:
        """Lets code compile for the first time after the warm-up: validation, without gradients."""
        if not self.is_compiling_wanted:
            return nullcontext()
        stance: AbstractContextManager[object] = torch.compiler.set_stance("default")
        return stance

    def take(self) -> Mapping[str, Any]:
        """Gives the evidence since the last call, in the words of a log record."""
        counts = compile_counts() if self.is_compiling_wanted else {}
        new = {name: count - self._last.get(name, 0) for name, count in counts.items()}
        compiled, steps = self.num_compiled_steps, self.num_steps
        self.num_steps = self.num_compiled_steps = 0
        self._last = counts
        execution = "compiled" if compiled == steps else "mixed" if compiled else "eager"
        return {"execution": execution, "num_compiled_steps": compiled, **new}


def compile_counts() -> dict[str, int]:
    """Gives the compilations of this process so far: graphs, cache hits and misses, breaks."""
    # Importing it costs a second, which an eager run does not pay.
    from torch._dynamo.utils import counters

    return {
        "num_compiles": counters["stats"]["unique_graphs"],
        "num_compiles_cold": counters["inductor"]["fxgraph_cache_miss"],
        "num_compiles_cached": counters["inductor"]["fxgraph_cache_hit"],
        "num_graph_breaks": sum(counters["graph_break"].values()),
    }
