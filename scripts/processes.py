"""Start processes, hand signals on, leave none behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
PATIENCE = 8.0  # seconds that a rank has between SIGTERM and SIGKILL
GRACE = PATIENCE + 4  # the same for the process that looks after ranks
SSH_FAILED = 255  # any other status is the remote command's, which has spoken itself
ADOPT_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER of Linux


@dataclass(frozen=True)
class Start:
    """A command; `parcel` is written to its standard input, which stays open until the command has to end."""

    command: list[str]
    parcel: bytes | None = None
    name: str = ""
    interruptible: bool = False  # gets SIGINT as SIGINT: a single script, which can say goodbye itself


def run(starts: list[Start], environment: dict[str, str], quiet: bool = False) -> int:
    """Run all at once; when one fails or a signal comes, end the others and every descendant.

    Returns the first failed command's exit status, 128 + the number of a signal, 2 where a command cannot be started.
    """
    ctypes.CDLL(None).prctl(ADOPT_ORPHANS, 1, 0, 0, 0)  # ranks whose parent is gone become children of this process
    running: list[tuple[Start, subprocess.Popen]] = []
    with _signals() as received:
        try:
            for start in starts:
                running.append((start, _open(start, environment)))
            status = _wait(running, received)
        except OSError as error:
            print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
            status = 2
        for _, process in running:
            with contextlib.suppress(OSError):
                process.kill()
        _end_descendants()
    if received:
        if not quiet:
            print(f"gaudi_spawn: stopped by {signal.Signals(received[0]).name}; every rank was ended", file=sys.stderr)
        return 128 + received[0]
    return status


def without_the_bridge(load: Callable[[], T]) -> T:
    """load(), which imports torch or DeepSpeed, in a process that only starts ranks: Gaudi's bridge stays out of it.

    In eager mode `import torch` loads the bridge, and DeepSpeed does where it finds one; the ranks' environment stays as it is.
    """
    aside = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "DS_ACCELERATOR": "cpu"}
    before = {name: os.environ.get(name) for name in aside}
    os.environ.update(aside)
    try:
        return load()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def status_of(code: int) -> int:
    """Exit status that a shell shows for a return code of subprocess (negative: a signal)."""
    return code if code >= 0 else 128 - code


def describe(who: str, code: int) -> str:
    if code < 0:
        hint = " (out of memory?)" if code == -signal.SIGKILL else ""
        return f"{who} was killed by {signal.Signals(-code).name}{hint}; the others were ended"
    return f"{who} exited with {code}; the others were ended"


def _open(start: Start, environment: dict[str, str]) -> subprocess.Popen:
    stdin = None if start.parcel is None else subprocess.PIPE
    process = subprocess.Popen(start.command, env=environment, start_new_session=True, stdin=stdin)
    if start.parcel is not None:
        with contextlib.suppress(BrokenPipeError):  # it has ended already: its exit status tells
            process.stdin.write(start.parcel)
            process.stdin.flush()
    return process


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    received: list[int] = []
    before = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # under nohup SIGHUP stays ignored
            before[number] = signal.signal(number, lambda number, frame: received.append(number))
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(running: list[tuple[Start, subprocess.Popen]], received: list[int]) -> int:
    status, deadline = 0, None
    while [process for _, process in running if process.poll() is None]:
        status = status or _first_failure(running)
        if deadline is None and (status or received):
            deadline = time.monotonic() + GRACE
            for start, process in running:
                _ask_to_end(start, process, received)
        elif deadline and (time.monotonic() > deadline or len(received) > 1):
            for _, process in running:
                process.kill()
        time.sleep(0.1)
    return status or _first_failure(running)


def _first_failure(running: list[tuple[Start, subprocess.Popen]]) -> int:
    for start, process in running:
        if process.returncode:
            if start.name and (start.parcel is None or process.returncode == SSH_FAILED):
                print(f"gaudi_spawn: {describe(start.name, process.returncode)}", file=sys.stderr)
            return status_of(process.returncode)
    return 0


def _ask_to_end(start: Start, process: subprocess.Popen, received: list[int]) -> None:
    with contextlib.suppress(OSError):
        if process.stdin:
            process.stdin.close()  # the other side of ssh ends its ranks when its input ends
        else:
            process.send_signal(received[0] if received and start.interruptible else signal.SIGTERM)


def _end_descendants() -> None:
    import psutil

    for ask in (psutil.Process.terminate, psutil.Process.kill):
        left = psutil.Process().children(recursive=True)
        for child in left:
            with contextlib.suppress(psutil.Error):
                ask(child)
        psutil.wait_procs(left, timeout=2)
