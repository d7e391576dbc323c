"""dflash-offline with a nap in every batch and every step, so that there is time to interrupt it.

Names its GPUs first. The folder NAPS holds a file for each stage, with seconds that may change.
"""

import os
import sys
import time
from pathlib import Path

from dflash_offline.cli import main


def slowed(function, stage):
    path = Path(os.environ["NAPS"]) / stage

    def wrapper(*args, **kwargs):
        time.sleep(float(path.read_text()))
        return function(*args, **kwargs)

    return wrapper


if __name__ == "__main__":
    if sys.argv[1] == "extract":
        print(f"GPUs of extract: {os.environ.get('CUDA_VISIBLE_DEVICES')}", flush=True)
        from stage1_extract.worker import Worker

        Worker.extract_batch = slowed(Worker.extract_batch, "extract")
    if sys.argv[1] == "train":
        print(f"GPUs of train: {os.environ.get('CUDA_VISIBLE_DEVICES')}", flush=True)
        from stage2_train.train import Training

        Training.step = slowed(Training.step, "train")
    main()
