"""One host's part of a run: the launcher starts this through ssh, writes what to do to its input, and holds that open.

No shell sees an argument or a variable, and none shows on a command line. When the input ends (the launcher is gone,
or the connection), so do the ranks of this host.
"""

import json
import os
import signal
import socket
import sys
import threading
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from scripts.processes import Start, run  # noqa: E402


def main() -> int:
    parcel = json.loads(sys.stdin.buffer.readline())
    try:
        os.chdir(parcel["folder"])
    except OSError as error:
        print(f"error: {socket.gethostname()}: {parcel['folder']}: {error.strerror}", file=sys.stderr)
        return 2
    lifeline = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    environment = {**os.environ, **parcel["environment"]}
    share = len(os.sched_getaffinity(0)) // parcel["ranks"]
    environment.setdefault("OMP_NUM_THREADS", str(max(1, share)))
    return run([Start(parcel["command"])], environment, quiet=True)


def _end_with(lifeline: int) -> None:
    while os.read(lifeline, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
