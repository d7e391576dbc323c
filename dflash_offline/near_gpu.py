"""Which cores lie next to a GPU, and what a process on one of many may take of the machine.

On a node of two sockets a copy between a GPU and memory of the other socket crosses the link
between them, and so does every look into that memory; a process that stays on its GPU's socket
allocates there, too. Linux says which cores are near in a device's `local_cpulist`.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

GPUS_DIR = Path("/proc/driver/nvidia/gpus")
"""The driver's folder of GPUs, named by their places on the PCI bus: CUDA's order where all are of
one kind."""
PCI_DIR = Path("/sys/bus/pci/devices")
MAX_COMPILE_PROCESSES = 8


def usable_cores() -> set[int]:
    """The cores that this thread may use."""
    if sys.platform != "linux":
        return set(range(os.cpu_count() or 1))
    return os.sched_getaffinity(0)


def thread_limits(num_processes: int) -> dict[str, str]:
    """Environment of one of several processes, so that libraries do not each take every core.

    The compiler would start up to 32 processes of its own in each, numpy a thread a core.
    """
    share = max(1, len(usable_cores()) // max(1, num_processes))
    return {
        "OMP_NUM_THREADS": "1",  # Torch's own are `torch_threads`.
        "TORCHINDUCTOR_COMPILE_THREADS": str(min(MAX_COMPILE_PROCESSES, share)),
    }


def near_cores(
    devices: Sequence[str], *, gpus_dir: Path = GPUS_DIR, pci_dir: Path = PCI_DIR
) -> set[int]:
    """The cores next to some GPUs, of those that this process may use.

    All of these without a GPU, where nothing is known of one, or where the process has been kept
    away from every near core on purpose. In a Slurm job, too: a number counts the job's own GPUs
    there, and Slurm has chosen the cores.

    Args:
        devices: names as in CUDA_VISIBLE_DEVICES: numbers, or ids that begin with `GPU-`.
        gpus_dir: where the driver lists them.
        pci_dir: where Linux does.
    """
    allowed = usable_cores()
    near: set[int] = set()
    if "SLURM_JOB_ID" in os.environ and any(device.isdigit() for device in devices):
        return allowed
    for device in devices:
        place = pci_place(device, gpus_dir)
        path = pci_dir / place / "local_cpulist" if place is not None else None
        if path is None or not path.is_file():
            return allowed
        near |= cores_of(path.read_text())
    return near & allowed or allowed


def pci_place(device: str, gpus_dir: Path) -> str | None:
    """The PCI address of a GPU, such as `0000:1b:00.0`; None where the driver does not tell."""
    try:
        folders = sorted(gpus_dir.iterdir())
    except OSError:
        return None
    if device.isdigit():
        return folders[int(device)].name.lower() if int(device) < len(folders) else None
    for folder in folders:
        information = folder / "information"
        # An id may be shortened, as long as one GPU's alone begins so.
        if information.is_file() and f"\t {device}" in information.read_text():
            return folder.name.lower()
    return None


def cores_of(text: str) -> set[int]:
    """Core numbers of a list as Linux writes it: `0-3,8` are 0, 1, 2, 3 and 8."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores |= set(range(int(first), int(last or first) + 1))
    return cores


@contextmanager
def on_cores(cores: set[int]) -> Iterator[None]:
    """Keeps this thread, and the processes that it starts meanwhile, on some cores."""
    before = usable_cores()
    if cores == before:
        yield
        return
    os.sched_setaffinity(0, cores)  # Other cores than before are known on Linux only.
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
