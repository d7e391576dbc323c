"""A process that runs the scripts of many tests, one after the other."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import IO

LOOP = """
import json, sys, traceback
answers, sys.stdout = sys.stdout, sys.stderr
import torch
for line in sys.stdin:
    request = json.loads(line)
    sys.argv = ["-c", *request["arguments"]]
    try:
        exec(compile(request["script"], "<script>", "exec"), {"__name__": "__main__"})
        error = ""
    except BaseException:
        error = traceback.format_exc()
    torch.set_default_device(None)
    torch.compiler.set_stance("default")
    torch._dynamo.reset()
    print(json.dumps(error), file=answers, flush=True)
"""


class ScriptProcess:
    """Runs scripts in one process, started with the first: importing torch takes seconds.

    Each has names of its own and finds nothing compiled. A script that fails ends the process, for
    a GPU's errors stay with it; the next one gets a new process.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._process: subprocess.Popen[str] | None = None
        self._errors: IO[str] | None = None

    def run(self, script: str, arguments: list[str]) -> str:
        """Runs a script; gives what went wrong, nothing if nothing did."""
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps({"script": script, "arguments": arguments}) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        error: str = json.loads(answer) if answer else self._last_words()
        if error:
            self.stop()
        return error

    def stop(self) -> None:
        """Ends the process if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _start(self) -> "subprocess.Popen[str]":
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115, it lives as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", LOOP],
            env=os.environ | dict(self._environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        return self._process

    def _last_words(self) -> str:
        assert self._errors is not None
        self._errors.seek(0)
        return "the process died; it said last:\n" + self._errors.read()[-4000:]
