"""A process that has the libraries loaded and forks for each script it is asked to run: a start takes a second, not ten.

Reads a line of JSON a run {script, arguments, cwd, environment, out, err} and answers with its exit status. The script runs as
`python script arguments` would; what has to see a cold start (the order of imports, launchers, the double) does not run here.
"""

import importlib
import json
import os
import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
LIBRARIES = [
    "recipes.pipeline.trainer", "recipes.pipeline.data", "recipes.pipeline.generation", "recipes.pipeline.samples",
    "recipes.pipeline.memory_plan", "modeling.memory", "deepspeed", "matplotlib.pyplot", "tensorboard", "hydra.main",
    "torch.utils.tensorboard",
]  # fmt: skip


def become(request: dict) -> str:
    """This process is now the script's."""
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    for number, name in ((1, request["out"]), (2, request["err"])):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv = [request["script"], *request["arguments"]]
    sys.path[0] = str(Path(request["script"]).parent)
    return request["script"]


def serve() -> str | None:
    """Forks for each request; the script's path in the child, None where the requests end."""
    answers = os.dup(1)
    os.dup2(2, 1)  # what a library prints while it loads is no answer
    for name in LIBRARIES:
        importlib.import_module(name)
    for line in iter(sys.stdin.readline, ""):
        if (child := os.fork()) == 0:
            os.close(answers)
            return become(json.loads(line))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os.write(answers, f"{status}\n".encode())
    return None


if __name__ == "__main__" and (path := serve()):
    runpy.run_path(path, run_name="__main__")
