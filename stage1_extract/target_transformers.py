"""The transformers backend: loads the target and reads hidden states with hooks."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int32, Int64
from numpy import ndarray
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.distributed import DistributedConfig
from transformers.utils.logging import disable_progress_bar

from stage1_extract.batches import MAX_SEQUENCES
from stage1_extract.compiled import CompiledLayers
from stage1_extract.config import Batching, TargetConfig
from stage1_extract.decoder import capture, find_decoder, no_hook_left_behind
from stage1_extract.device_copy import to_device
from stage1_extract.packed_attention import PACKED_ATTENTION, packed_input
from stage1_extract.recorded import RecordedPass
from stage1_extract.target import SPREAD, resolve_target
from stage1_extract.target_files import clear_errors, load_config, load_tokenizer
from storage.schema import LM_HEAD_INPUT


class TransformersTarget:
    """A target loaded with transformers, on one device unless it is spread or parted."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        device: str = "cpu",
        published_dtype: torch.dtype | None = None,
    ):
        self.model = model
        self.tokenizer = tokenizer
        self.device = device
        self.published_dtype = published_dtype
        """Type of the weights in the model's files, where its configuration names one."""
        self.config = model.config.get_text_config()
        self.decoder = find_decoder(model)
        self.batching: Batching = "padded"
        """How sequences share a forward pass; exact for every causal model unless proved better."""
        self.compiled: CompiledLayers | None = None
        """Compiled decoder layers, where packed forward passes use them."""
        self._row_sizes: list[int] = []
        self._recorded: dict[tuple[int, tuple[str, ...]], RecordedPass] = {}

    @classmethod
    def load(
        cls, config: TargetConfig, *, device: str = "cpu", is_parted: bool = False
    ) -> "TransformersTarget":
        """Loads weights and tokenizer.

        Args:
            config: Which target, and how it computes.
            device: Where to; `SPREAD` lets accelerate lay the layers out, which is slow and fits
                whatever this machine holds.
            is_parted: Whether this process loads its part only, by the model's own plan for tensor
                parallelism; all processes of torch.distributed do so at once.

        Raises:
            ValueError: The target is not found, transformers cannot load it, or it has no plan.
        """
        folder = resolve_target(config)
        tokenizer = load_tokenizer(config)
        text_config = load_config(config)
        arguments: dict[str, Any] = {
            "dtype": getattr(torch, config.dtype),
            "attn_implementation": attention_for(config, text_config),
            "trust_remote_code": config.trust_remote_code,
            "output_loading_info": True,
        }
        if is_parted:
            if not text_config.base_model_tp_plan:
                raise ValueError(
                    f"extract.gpus_per_worker: transformers has no tensor parallel plan for"
                    f" {text_config.model_type}; set it to 1, or use another target"
                )
            arguments["distributed_config"] = DistributedConfig(tp_plan="auto")
        if device == SPREAD:
            arguments["device_map"] = SPREAD
        disable_progress_bar()  # A worker's log is no place for a redrawn line.
        with clear_errors(config):
            try:
                model, info = AutoModelForCausalLM.from_pretrained(folder, **arguments)
            except ValueError as error:
                if "Unrecognized configuration class" not in str(error):
                    raise
                model, info = AutoModelForImageTextToText.from_pretrained(folder, **arguments)
        if info["missing_keys"]:
            raise ValueError(
                f"target.model: {folder} lacks weights (transformers would make them up at random):"
                f" {', '.join(sorted(info['missing_keys'])[:3])} and so on; fetch it again"
            )
        if device == SPREAD:
            device = "cuda" if torch.cuda.is_available() else "cpu"  # Of the first layers.
        elif not is_parted:
            model.to(device)
        model.eval().requires_grad_(False)
        return cls(model, tokenizer, device=device, published_dtype=text_config.dtype)

    def together(self, function: Callable[..., Any], **arguments: Any) -> Any:
        """Calls a function of this target, in every process that holds a part of it."""
        return function(self, **arguments)

    @torch.inference_mode()
    def hidden_states(
        self, token_ids: Sequence[Int32[ndarray, "_"]], *, layers: Sequence[str]
    ) -> dict[str, Float[Tensor, "tokens hidden"]]:
        """States by layer name, the sequences' tokens end to end; see `Target.hidden_states`.

        On a GPU it returns when the work is handed over, not when it is done. What it returns is
        valid until the next call: a recorded pass puts its states where they were before.
        """
        if self.batching == "packed":
            return self._packed_states(token_ids, layers)
        rows, real_tokens = padded_input(token_ids)
        with capture(self.decoder, layers) as captured:
            # No mask: in a causal model nothing before the padding on the right can see it.
            self.decoder.module(input_ids=to_device(rows, self.device), use_cache=False)
        real = to_device(real_tokens, self.device)
        # Spread over GPUs, layers leave their states where they are.
        return {
            name: captured[name].flatten(0, 1)[real.to(captured[name].device)] for name in layers
        }

    def _packed_states(
        self, token_ids: Sequence[Int32[ndarray, "_"]], layers: Sequence[str]
    ) -> dict[str, Float[Tensor, "tokens hidden"]]:
        num_tokens = sum(len(each) for each in token_ids)
        if self.compiled is None:
            states = self._pass(packed_input(token_ids, device=self.device), layers)
        else:
            size = self._row_size(num_tokens)
            inputs = self._row_input(token_ids, size)
            recorded = self._recorded.get((size, tuple(layers)))
            states = self._pass(inputs, layers) if recorded is None else recorded(inputs)
            self.compiled.num_replays += recorded is not None
        return {name: states[name][:num_tokens] for name in layers}

    def _row_input(self, token_ids: Sequence[Int32[ndarray, "_"]], size: int) -> dict[str, Any]:
        """Sequences as a row of a fixed length."""
        boundaries = MAX_SEQUENCES + 2
        return packed_input(
            token_ids, device=self.device, row_tokens=size, num_boundaries=boundaries
        )

    def _pass(
        self, inputs: Mapping[str, Any], layers: Sequence[str]
    ) -> dict[str, Float[Tensor, "row hidden"]]:
        """One forward pass over a packed row."""
        with (
            self._attention(PACKED_ATTENTION),
            self.compiled.used_by(self.decoder.layers) if self.compiled else nullcontext(),
            capture(self.decoder, layers) as captured,
        ):
            self.decoder.module(**inputs, use_cache=False)
        return {name: captured[name][0] for name in layers}

    @torch.inference_mode()
    def record_passes(self, layers: Sequence[str]) -> None:
        """Records a compiled pass over each length of rows; from then on they are replayed.

        Raises:
            Exception: A pass waits for the device, or depends on more than is there.
        """
        pool = torch.cuda.graph_pool_handle()
        for size in self._row_sizes:
            self._recorded[size, tuple(layers)] = RecordedPass(
                lambda inputs: self._pass(inputs, layers),
                self._row_input([np.zeros(size, dtype=np.int32)], size),
                pool=pool,
            )

    def forget_recorded(self) -> None:
        """Lets every pass be launched kernel by kernel again."""
        self._recorded = {}

    def seconds_a_pass(self, layers: Sequence[str], *, repetitions: int = 3) -> float:
        """Time of a forward pass over the longest row, several handed over at once."""
        row = [np.zeros(self._row_sizes[-1], dtype=np.int32)]
        self.hidden_states(row, layers=layers)
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        for _ in range(repetitions):
            self.hidden_states(row, layers=layers)
        torch.cuda.synchronize()
        return (time.perf_counter() - start_s) / repetitions

    def compile_layers(self, *, row_sizes: Sequence[int], backend: str = "inductor") -> None:
        """Makes packed forward passes run compiled layers, on rows of a few fixed lengths.

        Args:
            row_sizes: Lengths of rows; a batch takes the shortest that holds it.
            backend: Of `torch.compile`.
        """
        self.compiled = CompiledLayers(backend=backend)
        self._row_sizes = sorted(row_sizes)

    def warm_up(self, layers: Sequence[str]) -> None:
        """Compiles everything that will be needed; from then on a recompilation is an error."""
        if self.compiled is not None:
            for size in self._row_sizes:
                self.hidden_states([np.zeros(size, dtype=np.int32)], layers=layers)
            self.compiled.forbid_recompiling()

    @property
    def longest_row(self) -> int | None:
        """Tokens of the longest compiled row; None where rows are as long as their batch."""
        return self._row_sizes[-1] if self.compiled is not None else None

    def _row_size(self, num_tokens: int) -> int:
        fitting = [size for size in self._row_sizes if size >= num_tokens]
        if not fitting:
            raise ValueError(
                f"a batch of {num_tokens} tokens is longer than the compiled rows of"
                f" {self._row_sizes[-1]}; set extract.batch_tokens to at least the former"
            )
        return fitting[0]

    @contextmanager
    def _attention(self, name: str) -> Iterator[None]:
        """Switches the decoder's attention function for the block."""
        own = self.config._attn_implementation
        self.config._attn_implementation = name
        try:
            yield
        finally:
            self.config._attn_implementation = own

    @torch.inference_mode()
    def plain_hidden_states(
        self, token_ids: Int32[ndarray, "tokens"], *, layers: Sequence[str]
    ) -> dict[str, Float[Tensor, "tokens hidden"]]:
        """States of one sequence from transformers' own `output_hidden_states`, without hooks.

        The slow path that proves the fast one. Its last entry is after the final norm, so the last
        decoder layer alone is taken from a plain hook.
        """
        batch = torch.as_tensor(token_ids, dtype=torch.long, device=self.device)[None]
        num_layers = self.config.num_hidden_layers
        before_norm: list[Tensor] = []
        handle = self.decoder.norm.register_forward_pre_hook(
            lambda _, inputs: before_norm.append(inputs[0])
        )
        try:
            with no_hook_left_behind(self.decoder.module):
                output = self.decoder.module(
                    input_ids=batch, use_cache=False, output_hidden_states=True
                )
        finally:
            handle.remove()
        entries = list(output.hidden_states)
        entries[num_layers] = before_norm[0]
        states = {str(layer_id): entries[layer_id + 1][0] for layer_id in range(num_layers)}
        states[LM_HEAD_INPUT] = output.last_hidden_state[0]
        return {name: states[name] for name in layers}


def attention_for(config: TargetConfig, text_config: PretrainedConfig) -> str | None:
    """The attention function to load the target with; None lets transformers choose.

    Raises:
        ValueError: The one asked for would leave a part of the target's attention out.
    """
    if getattr(text_config, "attn_logit_softcapping", None) is None:
        return config.attention
    if config.attention == "sdpa":
        raise ValueError(
            f"target.attention = 'sdpa' leaves out the soft cap of {text_config.model_type}'s"
            " attention; use 'eager', or leave the setting out"
        )
    # Some transformers versions choose sdpa here by themselves, without a word.
    return config.attention or "eager"


def padded_input(
    token_ids: Sequence[Int32[ndarray, "_"]],
) -> tuple[Int64[Tensor, "rows columns"], Int64[Tensor, "tokens"]]:
    """Sequences as rows filled up with zeros on the right, and where the real tokens are.

    Their places are indices into the rows laid end to end.
    """
    lengths = torch.tensor([len(each) for each in token_ids])
    is_real = torch.arange(int(lengths.max())) < lengths[:, None]
    rows = torch.zeros(is_real.shape, dtype=torch.long)
    rows[is_real] = torch.cat([torch.as_tensor(each, dtype=torch.long) for each in token_ids])
    return rows, is_real.flatten().nonzero()[:, 0]
