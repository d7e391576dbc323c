"""Settings of stage 2: one drafter, its training and its loss."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Settings(BaseModel):
    """Base of every table of the run file: frozen, unknown keys refused."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


_DecayRate = Annotated[float, Field(ge=0.0, lt=1.0)]


class OptimizerConfig(Settings):
    """AdamW with fp32 master weights and a cosine schedule."""

    learning_rate: float = Field(default=6e-4, gt=0.0)
    """Peak learning rate."""
    warmup_fraction: float = Field(default=0.04, ge=0.0, lt=1.0)
    """Share of all steps spent on linear warm-up."""
    weight_decay: float = Field(default=0.0, ge=0.0)
    """Decoupled weight decay of matrices; norms have none."""
    betas: tuple[_DecayRate, _DecayRate] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    clip_norm: float = Field(default=1.0, gt=0.0)
    """Global gradient norm above which gradients are scaled down."""


LossKind = Literal["cross_entropy", "kl", "total_variation"]


class LossConfig(Settings):
    """What is learned from a block's rows, which of them count, and how much."""

    kind: LossKind = "cross_entropy"
    """`cross_entropy` against the sequence's own tokens; `kl` or `total_variation` against the
    target's distribution, which need a store with `lm_head_input`. Total variation learns slowly
    from fresh weights: start from another drafter (`init_from`)."""
    weighting: Literal["decay", "d_pace"] | None = None
    """Weight of an offset: `decay` by `gamma`; `d_pace` by how far the drafter itself would get
    (SpecForge's D-PACE), divided by the number of blocks. `d_pace` needs the cross-entropy. None
    takes `d_pace`, which learns faster, but `decay` where the loss is another or `gamma` or
    `min_weight` is set."""
    pace_smoothing: float = Field(default=0.5, ge=0.0, le=1.0)
    """D-PACE's smoothing of the drafter's probabilities: 0 trusts them, 1 ignores them."""
    gamma: float | None = Field(default=None, gt=0.0)
    """Decay of the offset weight exp(-(k-1)/gamma); None takes 7, 5, 4 for block 16, 10, 8."""
    min_weight: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Offsets whose weight lies below are left out of the loss and not computed."""
    stop_at_unsupervised: bool = False
    """End a block's labels at its first unsupervised one instead of masking each alone."""
    chunk_rows: int = Field(default=2560, ge=1)
    """Rows whose logits exist at once."""

    @property
    def is_paced(self) -> bool:
        """Whether offsets are weighed by D-PACE."""
        is_free = self.gamma is None and self.min_weight == 0.0 and self.kind == "cross_entropy"
        return self.weighting == "d_pace" or (self.weighting is None and is_free)

    @model_validator(mode="after")
    def _pace_is_that_of_the_labels(self) -> "LossConfig":
        if self.weighting == "d_pace" and self.kind != "cross_entropy":
            raise ValueError(
                f'weighting = "d_pace" goes with kind = "cross_entropy", not with "{self.kind}": '
                "it weighs by the probabilities of the labels"
            )
        return self


class TrainConfig(Settings):
    """How one drafter is trained."""

    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of initial weights, order and anchors."""
    epochs: int = Field(default=6, ge=1)
    """Passes over the training split."""
    max_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps at most; None trains all epochs."""
    data_fraction: float = Field(default=1.0, gt=0.0, le=1.0)
    """Share of the training sequences that this drafter sees, chosen by their ids: the same for
    every seed, and part of any larger share."""
    batch_tokens: int = Field(default=4096, ge=2)
    """Token budget of one packed batch; its shape never changes."""
    window_tokens: int | None = Field(default=None, ge=2)
    """Tokens of a sequence that are trained at a time: of a longer one a window, drawn anew each
    epoch. None takes whole sequences as far as `batch_tokens` holds them."""
    num_anchors: int = Field(default=512, ge=1)
    """Blocks trained in one batch, shared out over its sequences."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Arithmetic type of the drafter; None takes bfloat16 where the device has fast bf16 matrix
    products (GPUs, CPUs with AMX or AVX512-BF16). Master weights are fp32 always."""
    attention: Literal["sdpa", "flex"] | None = None
    """Attention path: `sdpa` the plain reference; on a GPU `flex` for FlexAttention. None chooses:
    on a GPU kernels of our own where they take the drafter's shape in bf16, else FlexAttention."""
    compile: bool | None = None
    """Compile the drafter's layers; None does so on a GPU. Not with `attention = "sdpa"`."""
    fp8: bool | Literal["all"] | None = None
    """Multiply in fp8 with row scales on GPUs that can: MLP, projections and LM head. `true` leaves
    weight gradients in the drafter's own type, `"all"` makes them of fp8 products, too; None takes
    `"all"` where that was measured to pay: on Hopper GPUs from a hidden size of 2,048 on, in
    compiled layers, not with `fsdp`."""
    torch_threads: int = Field(default=1, ge=1)
    """CPU threads of the training process."""
    batches_per_step: int | None = Field(default=None, ge=1)
    """Packed batches of one optimizer step, over all GPUs; None takes one for each GPU. A GPU
    computes its share one after the other and their gradients are summed in fp32."""
    gpus_per_drafter: int = Field(default=1, ge=1)
    """GPUs that train this drafter together, one process each; without a GPU so many processes
    on the CPU. `batches_per_step` must be a multiple of it."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """How several GPUs hold one drafter: `ddp` each holds it whole, `fsdp` (FSDP2) each holds
    and updates its share of every matrix, for drafters too large for one GPU."""
    read_ahead_bytes: int = Field(default=1_000_000_000, ge=1)
    """Memory the reader may fill ahead of the step, in bytes."""
    read_cache_dir: str | None = None
    """Folder on a local disk that keeps what is read of a far store (S3, a slow network file
    system) for later epochs, shared by all drafters of a machine; None keeps nothing."""
    read_cache_bytes: int = Field(default=200_000_000_000, ge=1)
    """Bytes that this folder may hold; what was used longest ago goes first."""
    read_threads: int = Field(default=4, ge=1)
    """Threads that read the store; more for an object store or a network file system."""
    read_processes: int | None = Field(default=None, ge=0)
    """Processes that read and pack batches beside the trainer, each with `read_threads` threads; 0
    does so in threads of the trainer. None takes 2 on a GPU where a batch holds many short
    sequences: reading those takes the interpreter from the trainer's launches."""
    start_after_shards: int = Field(default=1, ge=1)
    """Committed shards to wait for before training starts on a store that is still filling."""
    wait_for_store_s: float | None = Field(default=None, ge=0.0)
    """Seconds to wait at most for those shards, and for the store itself if there is none yet;
    None takes a missing store for a mistake and waits for shards as long as it takes."""
    on_damage: Literal["stop", "skip"] = "stop"
    """What damage found while reading does: `stop` this drafter with the shard named, or `skip`
    the sequence, which is said and counted."""
    checkpoint_steps: int = Field(default=1000, ge=1)
    """Steps between checkpoints."""
    keep_checkpoints: int = Field(default=3, ge=1)
    """Latest checkpoints kept beside the best one."""
    validation_steps: int = Field(default=500, ge=1)
    """Steps between validations: held-out loss and the walk."""
    validation_sequences: int = Field(default=64, ge=1)
    """Held-out sequences of one validation."""
    log_steps: int = Field(default=10, ge=1)
    """Steps between two log lines."""
    optimizer: OptimizerConfig = OptimizerConfig()
    loss: LossConfig = LossConfig()

    @property
    def may_choose_fp8(self) -> bool:
        """Whether fp8 products are taken unasked, where GPU and widths suit: as measured only."""
        is_compiled = self.compile is not False and self.attention != "sdpa"
        is_whole = self.parallel == "ddp"
        return self.fp8 is None and is_compiled and is_whole and self.dtype != "float32"

    @model_validator(mode="after")
    def _a_window_fits_a_batch(self) -> "TrainConfig":
        if self.window_tokens is not None and self.window_tokens > self.batch_tokens:
            raise ValueError(
                f"window_tokens {self.window_tokens} is more than the batch_tokens "
                f"{self.batch_tokens} that a window has to fit into"
            )
        return self

    @model_validator(mode="after")
    def _fp8_goes_with_bfloat16(self) -> "TrainConfig":
        if self.fp8 and self.dtype == "float32":
            raise ValueError(
                'fp8 products leave in bfloat16: set dtype = "bfloat16" or leave it out, or '
                "fp8 = false"
            )
        return self


class DrafterConfig(Settings):
    """One drafter: its shape and where it departs from the shared `[train]` table."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200)
    """Name of its folder; unique in the run file."""
    num_layers: int = Field(default=5, ge=1)
    """Depth; independent of how many target layers it reads."""
    block_size: int = Field(default=16, ge=2)
    """Tokens of a block: the anchor and `block_size - 1` drafted ones."""
    mask_token_id: int | None = Field(default=None, ge=0)
    """Token that stands for a position to draft; None takes the target's unused or mask token."""
    target_layer_ids: tuple[int, ...] | None = None
    """Subset of the stored layers to read; None reads all of them."""
    num_attention_heads: int | None = Field(default=None, ge=1)
    """Query heads; None takes the target's."""
    num_key_value_heads: int | None = Field(default=None, ge=1)
    """Key and value heads; None takes the target's."""
    head_dim: int | None = Field(default=None, ge=2)
    """Width of one head; None takes the target's."""
    intermediate_size: int | None = Field(default=None, ge=1)
    """Width of the MLP; None takes the target's."""
    sliding_window: int | None = Field(default=None, ge=1)
    """Window of the layers named in `sliding_layers`, in tokens."""
    sliding_layers: tuple[int, ...] = ()
    """Draft layers with a sliding window, 0-based."""
    train: dict[str, Any] = {}
    """Settings of `[train]` that differ for this drafter, for example {seed = 1}."""
    grid: dict[str, list[Any]] = {}
    """Settings with the values to try, for example {num_layers = [1, 2], train.seed = [0, 1]}:
    the drafter stands for one drafter of each combination, named after it."""
    init_from: str | None = None
    """What training starts from: `"target"`, the target's last layers (`store.last_layers`), where
    it has a drafter's widths and parts; `"fresh"`, random weights; or a folder of a drafter, a
    checkpoint or an export. None takes the first of them that is possible."""


def refuse_less_than_a_block(train: TrainConfig, drafter: DrafterConfig) -> None:
    """Raises ValueError where a batch, or a window, holds less than one of the drafter's blocks."""
    for name in ("batch_tokens", "window_tokens"):
        value = getattr(train, name)
        if value is not None and value < drafter.block_size:
            raise ValueError(
                f"drafter {drafter.name}: train.{name} {value} is smaller than a block of "
                f"{drafter.block_size}; raise it to the length of your sequences"
            )


class DrafterRun(Settings):
    """Everything one training process needs, resolved."""

    drafter: DrafterConfig
    train: TrainConfig
    store_dir: Path | str
    """A folder, or the URL of an object store such as `s3://bucket/prefix`."""
    drafter_dir: Path
    """Folder of this drafter: metrics.jsonl, tensorboard/, checkpoints/, eval.json, export/."""
