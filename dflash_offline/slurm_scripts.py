"""The sbatch files of a run, as plain text: the one place for Slurm's language. Pure."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash_offline.slurm_config import SlurmConfig

RANKS_END_WITHIN_S = 600
"""Seconds after the end of one rank after which the others are ended: time for a checkpoint."""

Script = Sequence[str]
"""Lines of a file."""


@dataclass(frozen=True, kw_only=True)
class BatchRun:
    """What the batch files of one run have in common."""

    name: str
    """Start of every job's name; no other run has the same."""
    folder: Path
    """`slurm/` in the run folder: the files written here, the run's settings, the logs."""
    drafters: tuple[str, ...]
    worker_gpus: int = 1
    """GPUs of each extraction worker; it starts a process for each by itself."""
    ranks: int = 1
    """Processes of each drafter, one a GPU."""
    command: tuple[str, ...]
    """Words that start dflash-offline on a node."""
    config: SlurmConfig

    @property
    def run_file(self) -> Path:
        """The settings as they were submitted; later edits of the run file do not reach jobs."""
        return self.folder / "run.toml"

    @property
    def logs_dir(self) -> Path:
        """Where jobs write their output, one file a task, longer with every restart."""
        return self.folder / "logs"

    @property
    def stages(self) -> tuple[str, ...]:
        """The jobs of this run, in the order in which they are submitted."""
        one_node = self.config.layout == "one-node"
        return ("node", "finalize") if one_node else ("extract", "train", "finalize")

    def job_name(self, stage: str) -> str:
        """The name that `squeue` shows."""
        return f"{self.name}-{stage}"

    def script_path(self, stage: str) -> Path:
        """The sbatch file of a stage."""
        return self.folder / f"{stage}.sbatch"


def scripts(run: BatchRun) -> dict[str, str]:
    """The text of every sbatch file of a run, by stage."""
    writers = {
        "extract": extract_script,
        "train": train_script,
        "node": node_script,
        "finalize": finalize_script,
    }
    return {stage: "\n".join(writers[stage](run)) + "\n" for stage in run.stages}


def extract_script(run: BatchRun) -> Script:
    """Stage 1 as a job array: one worker a task."""
    job = run.config.extract
    at_once = f"%{job.tasks_at_once}" if job.tasks_at_once else ""
    return [
        *_intro(
            f"Stage 1 of {run.name}: {job.tasks} workers, one a task. Each does its share of the",
            "units, then what the others left. A task may be killed, queued again or started",
            "twice: committed units are neither computed nor written again.",
        ),
        *_options(
            run,
            stage="extract",
            log="extract-%a.log",
            array=f"{array_text(range(job.tasks))}{at_once}",
            cpus=job.cpus,
            gpus=run.worker_gpus if job.gpus is None else job.gpus,
            memory=job.memory,
            time=job.time,
            more=job.sbatch_lines,
        ),
        *_STOP,
        *_setup(run),
        "# Not SLURM_ARRAY_TASK_COUNT: it is 2 when two tasks are tried again with --array=3,7.",
        f"num_workers={job.tasks}",
        "",
        *_compile_caches(run, folder="extract"),
        f"{_srun(run, cpus=job.cpus)} \\",
        f"  {_words(run.command)} extract {_word(run.run_file)} \\",
        '  --worker "$SLURM_ARRAY_TASK_ID" --num-workers "$num_workers" &',
        "children+=($!)",
        "",
        *_end(run),
    ]


def train_script(run: BatchRun) -> Script:
    """Stage 2 as a job array: one drafter a task, its ranks started by srun."""
    job = run.config.train
    ranks_of_node = run.ranks // job.nodes
    several = f", trained by {run.ranks} processes on {job.nodes} nodes" if run.ranks > 1 else ""
    return [
        *_intro(
            f"Stage 2 of {run.name}: one drafter a task{several}.",
            "It waits for the store's first shards and goes on from the drafter's last",
            "checkpoint, if there is one.",
        ),
        *_options(
            run,
            stage="train",
            log="train-%a.log",
            array=array_text(range(len(run.drafters))),
            nodes=job.nodes,
            tasks=run.ranks,
            cpus=job.cpus,
            gpus=ranks_of_node if job.gpus is None else job.gpus,
            memory=job.memory,
            time=job.time,
            more=job.sbatch_lines,
        ),
        *_STOP,
        *_setup(run),
        f"drafters=({_words(run.drafters)})",
        "drafter=${drafters[SLURM_ARRAY_TASK_ID]}",
        "",
        *_compile_caches(run, folder='"$drafter"'),
        *(_RANKS if run.ranks > 1 else ()),
        f"{_srun(run, nodes=job.nodes, tasks=run.ranks, cpus=job.cpus)} \\",
        f"  {_words(run.command)} train {_word(run.run_file)} \\",
        f'  --drafter "$drafter" --set train.wait_for_store_s={job.wait_for_store_s} &',
        "children+=($!)",
        "",
        *_end(run),
    ]


def node_script(run: BatchRun) -> Script:
    """Both stages in one allocation of one node, its GPUs split between two job steps."""
    node, extract, train = run.config.node, run.config.extract, run.config.train
    extract_cpus, train_cpus = node.extract_gpus * extract.cpus, node.train_gpus * train.cpus
    return [
        *_intro(
            f"Both stages of {run.name} on one node, each a job step that starts one process a",
            f"GPU: stage 1 on {node.extract_gpus} GPUs, stage 2 on {node.train_gpus}.",
        ),
        *_options(
            run,
            stage="node",
            log="node.log",
            cpus=extract_cpus + train_cpus,
            gpus=node.extract_gpus + node.train_gpus,
            memory=node.memory,
            time=node.time,
            more=node.sbatch_lines,
        ),
        *_STOP,
        *_setup(run),
        *_compile_caches(run, folder="node"),
        "# --exact gives a step only what it names, so that the other finds its GPUs free;",
        "# --mem=0 lets both use the allocation's memory instead of the first taking it all.",
        f"{_srun(run, cpus=extract_cpus)} --exact --mem=0 {_gres(run, node.extract_gpus)} \\",
        f"  --open-mode=append --output={_word(run.logs_dir / 'extract.log')} \\",
        f"  {_words(run.command)} extract {_word(run.run_file)} &",
        "children+=($!)",
        f"{_srun(run, cpus=train_cpus)} --exact --mem=0 {_gres(run, node.train_gpus)} \\",
        f"  --open-mode=append --output={_word(run.logs_dir / 'train.log')} \\",
        f"  {_words(run.command)} train {_word(run.run_file)} \\",
        f"  --set train.wait_for_store_s={train.wait_for_store_s} &",
        "children+=($!)",
        "",
        *_end(run),
    ]


def finalize_script(run: BatchRun) -> Script:
    """The job after all others, however they ended: it counts what is done."""
    return [
        *_intro(
            f"After all other jobs of {run.name}, however they ended: counts commits and finished",
            "drafters, and says how to do what is left. Exit code 75: something is left.",
        ),
        *_options(
            run,
            stage="finalize",
            log="finalize.log",
            cpus=1,
            gpus=0,
            memory=None,
            time=run.config.finalize_time,
            more=(),
            is_stoppable=False,
        ),
        "",
        *_setup(run),
        f"exec {_words(run.command)} slurm finalize {_word(run.run_file)}",
    ]


def array_text(indices: Sequence[int]) -> str:
    """Task indices as `--array` takes them: `0-2,5`."""
    parts: list[str] = []
    ordered = sorted(set(indices))
    start = 0
    for end in range(1, len(ordered) + 1):
        if end == len(ordered) or ordered[end] != ordered[end - 1] + 1:
            first, last = ordered[start], ordered[end - 1]
            parts.append(str(first) if first == last else f"{first}-{last}")
            start = end
    return ",".join(parts)


def _intro(*comment: str) -> Script:
    return [
        "#!/bin/bash",
        *(f"# {line}" for line in comment),
        "# Written by `dflash-offline slurm`, anew at each submission: what your site needs",
        "# belongs into the table [slurm] of the run file.",
    ]


def _options(
    run: BatchRun,
    *,
    stage: str,
    log: str,
    cpus: int,
    gpus: int,
    memory: str | None,
    time: str,
    more: Sequence[str],
    array: str | None = None,
    nodes: int = 1,
    tasks: int = 1,
    is_stoppable: bool = True,
) -> Script:
    """The `#SBATCH` lines; the run's own come last, where they override ours."""
    config = run.config
    options: Mapping[str, str | int | None] = {
        "job-name": run.job_name(stage),
        "array": array,
        "nodes": nodes,
        "ntasks": tasks,
        "ntasks-per-node": tasks // nodes if nodes > 1 else None,
        "cpus-per-task": cpus,
        "mem": memory,
        "time": time,
        "partition": config.partition,
        "account": config.account,
        # To the batch shell alone, which decides and tells its children.
        "signal": f"B:USR1@{config.signal_s}" if is_stoppable else None,
        "open-mode": "append",
        "output": f'"{run.logs_dir / log}"',
    }
    lines = [f"--{name}={value}" for name, value in options.items() if value is not None]
    lines += [_gres(run, gpus)] if gpus else []
    # For preemption and node failure; a time-out is queued again below, which Slurm does not do.
    lines += ["--requeue"]
    return [f"#SBATCH {line}" for line in (*lines, *config.sbatch_lines, *more)]


def _gres(run: BatchRun, gpus: int) -> str:
    kind = f"gpu:{run.config.gpu_type}" if run.config.gpu_type else "gpu"
    return f"--gres={kind}:{gpus}"


def _setup(run: BatchRun) -> Script:
    return [
        *run.config.setup_lines,  # Before `set -u`: scripts of `module` trip over it.
        "set -u",
        "export PYTHONUNBUFFERED=1",
        'echo "$(date +%FT%T) $SLURM_JOB_NAME${SLURM_ARRAY_TASK_ID:+ task $SLURM_ARRAY_TASK_ID}'
        ' on $(hostname), restart ${SLURM_RESTART_COUNT:-0}"',
        "",
    ]


def _compile_caches(run: BatchRun, *, folder: str) -> Script:
    parent = _word(Path(run.config.local_dir) / "dflash-offline")
    return [
        "# Compile caches lie on the node's own disk: shared ones crash, and cost the file system.",
        f'cache={parent}-"$(id -un)"/{_word(run.name)}/{folder}',
        'export TORCHINDUCTOR_CACHE_DIR="$cache/inductor" TRITON_CACHE_DIR="$cache/triton"',
        'mkdir -p "$TORCHINDUCTOR_CACHE_DIR" "$TRITON_CACHE_DIR"',
        "",
    ]


def _srun(run: BatchRun, *, nodes: int = 1, tasks: int = 1, cpus: int) -> str:
    """The start of a job step. Under srun a preempted process is told at once, not at the end."""
    words = ["srun", f"--nodes={nodes}", f"--ntasks={tasks}", f"--cpus-per-task={cpus}"]
    words += [f"--ntasks-per-node={tasks // nodes}"] if nodes > 1 else []
    # Ranks end together; after one that died the others would wait for it for ever.
    words += [f"--wait={RANKS_END_WITHIN_S}"] if tasks > 1 else []
    return shlex.join([*words, *run.config.srun_options])


_RANKS = (
    "# srun starts the ranks, not torchrun, which ignores USR1 and turns exit code 75 into 1. They",
    "# meet on the first node, unless MASTER_ADDR and MASTER_PORT say otherwise.",
)


_STOP = (
    "",
    "# USR1 comes before the time limit: stop, then queue again. TERM comes on scancel and at the",
    "# end of a preemption: only stop, for Slurm itself queues preempted jobs again, and a",
    "# cancelled one must stay cancelled. Children get USR1 in both cases: srun passes it on.",
    "stopped_by=",
    "children=()",
    "stop() {",
    "  stopped_by=${stopped_by:-$1}",
    '  [ ${#children[@]} = 0 ] || kill -USR1 "${children[@]}" 2>/dev/null',
    "}",
    "trap 'stop USR1' USR1",
    "trap 'stop TERM' TERM",
    "",
)


def _end(run: BatchRun) -> Script:
    limit = run.config.max_restarts
    return [
        "# The signal may have come before there was anyone to tell.",
        '[ -z "$stopped_by" ] || stop "$stopped_by"',
        "",
        "# By the task's name: the job id of an array's last task means the whole array.",
        "task=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}",
        "# In a preemption's grace time Slurm tells the job steps, not this shell, and a job that",
        "# then ends by itself counts as failed and is never queued again: so it must ask for it.",
        'is_preempted() { scontrol show job "$task" | grep -q "PreemptTime=[0-9]"; }',
        "",
        "code=0",
        'for child in "${children[@]}"; do',
        "  # `wait` also returns when a trap runs: ask until the child is gone, then for its code.",
        '  while kill -0 "$child" 2>/dev/null; do wait "$child"; done',
        '  wait "$child"',
        "  ended=$?",
        '  if [ $ended != 0 ] && [ -z "$stopped_by" ] && is_preempted; then',
        "    stopped_by=preemption",
        "  fi",
        "  # Told to stop before it could listen (128 + 10, 128 + 15): it had begun nothing.",
        '  if [ -n "$stopped_by" ] && { [ $ended = 138 ] || [ $ended = 143 ]; }; then ended=75; fi',
        "  # A failure outweighs 75 (stopped early), which outweighs 0 (done).",
        "  if [ $code = 0 ] || { [ $code = 75 ] && [ $ended != 0 ]; }; then code=$ended; fi",
        "done",
        "",
        "# 0: done. 75: stopped early, go on later. Anything else is a failure: not tried again.",
        "if [ $code = 75 ] && [[ $stopped_by == USR1 || $stopped_by == preemption ]]; then",
        f'  if [ "${{SLURM_RESTART_COUNT:-0}}" -lt {limit} ]; then',
        '    scontrol requeue "$task"',
        "  else",
        f'    echo "not queued again: slurm.max_restarts = {limit} is reached" >&2',
        "  fi",
        "fi",
        "exit $code",
    ]


def _word(value: str | Path) -> str:
    return shlex.quote(str(value))


def _words(values: Sequence[str]) -> str:
    return shlex.join(values)
