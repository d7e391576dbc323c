"""Settings of the batch jobs: what a site and a run want of Slurm."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

_TIME = r"^(\d+-\d{1,2}(:\d{2}){0,2}|\d+(:\d{2}){0,2})$"


class Settings(BaseModel):
    """Base of every table of the run file: frozen, unknown keys refused."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class SlurmExtractConfig(Settings):
    """The job array of stage 1: each task is one worker."""

    tasks: int = Field(default=8, ge=1, le=1000)
    """Workers; a task does its share of the units, then what others left. At most 1,000."""
    tasks_at_once: int | None = Field(default=None, ge=1)
    """Tasks that may run at the same time; None sets no limit."""
    gpus: int | None = Field(default=None, ge=0)
    """GPUs of a task; None takes `extract.gpus_per_worker`."""
    cpus: int = Field(default=8, ge=1)
    """CPU cores of a task."""
    memory: str | None = None
    """Main memory of a task, for example `64G`; None takes the cluster's default."""
    time: str = Field(default="04:00:00", pattern=_TIME)
    """Time limit of a task (minutes, `hours:minutes:seconds`, `days-hours`); at its end the task
    queues again by itself."""
    sbatch_lines: tuple[str, ...] = ()
    """More `#SBATCH` options of this job, for example `--constraint=h200`."""


class SlurmTrainConfig(Settings):
    """The job array of stage 2: each task is one drafter, of `train.gpus_per_drafter` processes."""

    nodes: int = Field(default=1, ge=1)
    """Nodes of a drafter; they share its processes evenly."""
    gpus: int | None = Field(default=None, ge=0)
    """GPUs of a drafter on each node; None takes one for each of its processes there."""
    cpus: int = Field(default=8, ge=1)
    """CPU cores of each process."""
    memory: str | None = None
    """Main memory of a drafter on each node, for example `128G`; None takes the cluster's
    default."""
    time: str = Field(default="12:00:00", pattern=_TIME)
    """Time limit of a task; at its end the drafter queues again and goes on from a checkpoint."""
    wait_for_store_s: float = Field(default=3600.0, ge=0.0)
    """Seconds a started drafter waits for the store's first shards before it gives up."""
    sbatch_lines: tuple[str, ...] = ()
    """More `#SBATCH` options of this job."""


class SlurmNodeConfig(Settings):
    """Both stages in one allocation of one node, with `slurm.layout = "one-node"`."""

    extract_gpus: int = Field(default=5, ge=1)
    """GPUs of stage 1, one worker each; CPU cores a GPU as in `slurm.extract`."""
    train_gpus: int = Field(default=3, ge=1)
    """GPUs of stage 2, one drafter each, the others queue; CPU cores as in `slurm.train`."""
    memory: str | None = None
    """Main memory of the allocation, `0` for all of the node; None takes the cluster's default."""
    time: str = Field(default="12:00:00", pattern=_TIME)
    """Time limit of the allocation; at its end it queues again by itself."""
    sbatch_lines: tuple[str, ...] = ()
    """More `#SBATCH` options of this job."""


class SlurmConfig(Settings):
    """Batch jobs: what every job of the run asks for, and how it is stopped and started again."""

    layout: Literal["arrays", "one-node"] = "arrays"
    """`arrays`: a task for each worker and drafter; `one-node`: both stages in one allocation."""
    partition: str | None = None
    """Partition (queue); None takes the cluster's default."""
    account: str | None = None
    """Account to charge; None takes the user's default."""
    gpu_type: str | None = None
    """Type of GPU to ask for, as `sinfo -o %G` names it, for example `h200`; None takes any."""
    sbatch_lines: tuple[str, ...] = ()
    """More `#SBATCH` options of every job, for example `--qos=long`."""
    setup_lines: tuple[str, ...] = ()
    """Shell lines before the work, for example `module load cuda/12.8`."""
    command: tuple[str, ...] | None = None
    """Words that start dflash-offline on a node, for example
    `["apptainer", "exec", "--nv", "image.sif", "dflash-offline"]`; None takes the Python that
    submits, which must lie on a shared file system."""
    srun_options: tuple[str, ...] = ()
    """More options of every `srun`, for example `--container-image=image.sqsh`."""
    signal_s: int = Field(default=300, ge=60, le=65535)
    """Seconds before the time limit at which a task is told to stop; Slurm may be 60 s early."""
    max_restarts: int = Field(default=100, ge=0)
    """Times a task may queue again by itself, preemptions included."""
    local_dir: str = "/tmp"
    """Folder on each node's own disk for compile caches; a shared one breaks Triton's."""
    finalize_time: str = Field(default="00:30:00", pattern=_TIME)
    """Time limit of the job that counts what was done."""
    extract: SlurmExtractConfig = SlurmExtractConfig()
    train: SlurmTrainConfig = SlurmTrainConfig()
    node: SlurmNodeConfig = SlurmNodeConfig()
