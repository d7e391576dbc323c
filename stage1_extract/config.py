"""Settings of stage 1: the target, the data, the store to create, the extraction itself."""

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ByteSize, ConfigDict, Field

Batching = Literal["packed", "padded", "single"]
"""How sequences share a forward pass: `packed` end to end with attention inside each, `padded` on
the right beside others of similar length, `single` alone."""


class Settings(BaseModel):
    """Base of every table of the run file: frozen, unknown keys refused."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class TargetConfig(Settings):
    """The model being accelerated."""

    model: str
    """A Hugging Face folder (quantised ones, too), a GGUF file, a hub id, or
    `embedded:smollm2-135m-instruct`."""
    revision: str | None = None
    """Hub revision (branch, tag or commit); None takes the default branch."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Arithmetic type of the target's forward pass."""
    attention: str | None = None
    """Attention function of the target by its transformers name, for example `sdpa` or `eager`;
    None takes what transformers prefers for the model."""
    trust_remote_code: bool = False
    """Whether code shipped with the model may run. Leave off unless you have read it."""


class DataConfig(Settings):
    """The conversations that stage 1 reads."""

    conversations: tuple[str, ...]
    """JSONL, Parquet or Arrow files, folders of them, or datasets saved with `save_to_disk`; a
    relative path starts at the run file's folder."""
    limit: int | None = Field(default=None, ge=1)
    """Conversations to read at most, in file order; None reads all."""
    max_sequence_tokens: int = Field(default=4096, ge=2)
    """Longest sequence, in tokens."""
    long_conversations: Literal["truncate", "skip"] = "truncate"
    """What happens to a conversation above `max_sequence_tokens`; both are counted."""
    template_arguments: dict[str, Any] = {}
    """Chat-template arguments, for example {enable_thinking = false}; part of the identity."""
    strict: bool = False
    """Stop at the first unusable line or row instead of counting and skipping it."""
    bad_line_limit: int = Field(default=100, ge=0)
    """Unusable lines or rows of the files tolerated before extraction stops."""
    counted_conversations: int = Field(default=20_000, ge=1)
    """Conversations that `plan` turns into tokens one by one; of more than this a random sample of
    this many is counted, and the plan says how far it may be off."""


class StoreConfig(Settings):
    """The store that stage 1 fills and stage 2 reads."""

    dir: str | None = None
    """Folder or URL (`s3://bucket/prefix`) of the store; None puts it into the run folder."""
    encoding: Literal["bf16", "fp8", "int8", "int4", "int3", "int2"] = "int3"
    """How hidden states are kept: `bf16` exact, `fp8` with a scale per token and layer; the others
    also have channel scales, calibrated before the workers start. docs/encodings.md compares. With
    `int4` and fewer bits `lm_head_input` is kept in `int8`."""
    packing: Literal["zstd"] | None = None
    """Also pack the encoded states without loss: bf16 to 0.7 of its bytes, fp8 to 0.83, int8 to
    0.9, the others hardly. A thread reads 0.9 to 1.6 GB/s of states and writes 0.7 to 1.0."""
    calibration_tokens: int = Field(default=16_384, ge=256)
    """Tokens of a random sample of the conversations from which channel scales are taken."""
    num_layers: int = Field(default=5, ge=1)
    """Captured layers when `target_layer_ids` is not given, spread as DFlash spreads them."""
    target_layer_ids: tuple[int, ...] | None = None
    """0-based decoder layers to capture: id i is Hugging Face's `hidden_states[i + 1]`."""
    lm_head_input: bool = False
    """Also keep the final normed state, from which the target's distribution follows."""
    last_layers: int = Field(default=5, ge=0)
    """Decoder layers of the target, counted from the last, whose weights the store keeps, for
    drafters to start from (`init_from`); 0 keeps none."""
    shard_bytes: int = Field(default=1_000_000_000, ge=1_000_000)
    """Aimed size of one shard, in bytes."""
    held_out_fraction: float = Field(default=0.05, ge=0.0, lt=1.0)
    """Share of sequences, by id hash, that no drafter is trained on."""


class ExtractConfig(Settings):
    """How extraction runs."""

    gpus: tuple[int, ...] | None = None
    """GPUs to use, one worker each; None takes 0-4 of eight or more, else all."""
    gpus_per_worker: int = Field(default=1, ge=1)
    """GPUs that hold one target together, by transformers' tensor parallel plan for it; as many
    processes on a machine without a GPU."""
    num_workers: int = Field(default=2, ge=1)
    """Worker processes on a machine without a GPU."""
    torch_threads: int = Field(default=1, ge=1)
    """CPU threads of one worker's forward pass."""
    batch_tokens: int = Field(default=8192, ge=2)
    """Token budget of one forward pass; keep it on resume, rounding may depend on it."""
    batching: Batching | None = None
    """How sequences share a forward pass; None takes the first of `packed`, `padded`, `single` that
    a proof at the start finds exact for the target."""
    compile: bool | None = None
    """Run decoder layers compiled, on rows of a few fixed lengths; None does so on a GPU where the
    proof at the start finds them exact, true stops where they are not."""
    write_buffer_bytes: ByteSize = Field(default=ByteSize(2_000_000_000), ge=1)
    """Pinned host memory of a GPU worker between GPU and store; at least two batches' worth."""
    writer_threads: int = Field(default=3, ge=1)
    """Shards that a GPU worker writes at once: one is filled while others are flushed to disk."""
    max_failed_fraction: float = Field(default=0.05, ge=0.0, le=1.0)
    """Share of all sequences of the store that may fail (NaN states, no supervised pair, a template
    that refuses) before the exit code says so, now and whenever `extract` runs again."""
    stop_grace_s: float = Field(default=20.0, ge=0.0)
    """Seconds after a stop signal in which the open shard may still be finished."""
    max_store_bytes: ByteSize | None = None
    """What the store may take, in bytes or as text such as "1.5TB"; extraction refuses to start
    above it and names the ways to fit. None leaves it to the free disk."""
    force: bool = False
    """Start although the disk cannot hold the store."""


class ServerConfig(Settings):
    """An OpenAI-compatible server (vLLM, SGLang or another) that runs the target."""

    url: str
    """Address up to the version, for example `http://localhost:8000/v1`."""
    model: str | None = None
    """Name of the target at the server; None takes the only one it serves."""
    num_requests: int = Field(default=64, ge=1)
    """Requests in flight at once."""
    num_retries: int = Field(default=8, ge=0)
    """Further tries of a request that failed for want of the server, with growing pauses."""
    timeout_s: float = Field(default=600.0, gt=0.0)
    """Seconds that one answer may take."""
    api_key_variable: str = "OPENAI_API_KEY"
    """Environment variable with the key, for servers that ask for one."""


class RegenerateConfig(Settings):
    """How the target answers prompts itself."""

    prompts: tuple[str, ...] = ()
    """Files or folders of prompts, in any conversation format."""
    turns: Literal["every", "last"] = "every"
    """`every`: all given answers are dropped and every user turn is answered in order; `last`: the
    conversation is kept and only its last answer is written."""
    output: str | None = None
    """JSONL file of answered conversations; None puts it into the run folder."""
    max_new_tokens: int = Field(default=512, ge=1)
    """Longest answer, in tokens."""
    temperature: float = Field(default=0.0, ge=0.0)
    """0 is greedy decoding."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Nucleus share of probability kept when sampling."""
    batch_size: int | None = Field(default=None, ge=1)
    """Prompts answered at once; None takes 512 on a GPU where a step of all answers is replayed
    (docs/data.md), else 16."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of the sampling."""
    server: ServerConfig | None = None
    """Server that answers instead of the target loaded here."""


class ExtractRun(Settings):
    """Everything stage 1 needs, resolved: absolute paths, no defaults left to guess."""

    target: TargetConfig
    data: DataConfig
    store: StoreConfig
    extract: ExtractConfig
    store_dir: Path | str
    """A folder, or the URL of an object store such as `s3://bucket/prefix`."""
    run_dir: Path
