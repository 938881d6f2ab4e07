"""A process that has the libraries loaded and forks for each script it is asked to run: a start takes a second, not ten.

warm_process.py SOCKET ends when its standard input does. tests/warm_python.py is what asks. The script runs as `python script
arguments` would, and what it starts through sys.executable is started from here too. What has to see a cold start (the order of
imports, the double, how much memory libraries take) does not run here.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
LIBRARIES = [
    "recipes.pipeline.trainer", "recipes.pipeline.data", "recipes.pipeline.generation", "recipes.pipeline.samples",
    "recipes.pipeline.memory_plan", "recipes.pipeline.adapter", "modeling.memory", "deepspeed", "matplotlib.pyplot",
    "tensorboard", "hydra.main", "torch.utils.tensorboard", "torch.distributed.run", "deepspeed.launcher.launch", "psutil",
]  # fmt: skip
REQUEST = 2**20  # bytes at most


def become(request: dict, files: list[int]) -> list[str]:
    """This process is now the command's."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    sys.stdout.reconfigure(write_through=request["unbuffered"])
    if request["session"]:
        os.setsid()
    sys.executable = request["executable"]
    command = request["command"]
    sys.argv = ["-c", *command[2:]] if command[0] == "-c" else command
    own = "" if command[0] == "-c" else str(Path(command[0]).resolve().parent)
    given = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    sys.path[:2] = [own, *given]  # for this program's own two
    return command


def serve(path: str) -> list[str] | None:
    """Forks for each request; the command in the child, None where the standard input ends."""
    for name in LIBRARIES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a fork that looks for garbage copies every page it looks at
    ended, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(f"{path}.new")
    listening.listen(32)
    os.rename(f"{path}.new", path)  # there when it answers
    running: dict[int, socket.socket] = {}  # by process
    while True:
        for file in select.select([sys.stdin, listening, ended, *running.values()], [], [])[0]:
            if file is sys.stdin:
                return None
            if file is listening:
                asked, _ = listening.accept()
                text, files, _, _ = socket.recv_fds(asked, REQUEST, 3)
                if (child := os.fork()) == 0:
                    for other in (asked, listening, *running.values()):
                        other.close()
                    os.close(ended)
                    os.close(wake)
                    return become(json.loads(text), files)
                for copy in files:
                    os.close(copy)
                running[child] = asked
                asked.sendall(f"{child}\n".encode())
            elif file == ended:
                os.read(ended, 4096)
                for child in list(running):
                    found, status = os.waitpid(child, os.WNOHANG)
                    if found:
                        answer(running.pop(child), os.waitstatus_to_exitcode(status))
            else:  # who asked is gone: killed
                child = next((child for child, asked in running.items() if asked is file), None)
                if child is not None and not file.recv(1):
                    os.kill(child, signal.SIGKILL)
                    os.waitpid(child, 0)
                    running.pop(child).close()


def answer(asked: socket.socket, status: int) -> None:
    with contextlib.suppress(BrokenPipeError):
        asked.sendall(f"{status}\n".encode())
    asked.close()


if __name__ == "__main__" and (command := serve(sys.argv[1])):
    if command[0] == "-c":
        exec(compile(command[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        runpy.run_path(command[0], run_name="__main__")
