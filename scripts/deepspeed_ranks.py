"""deepspeed.launcher.launch, the ranks of one host, with three differences.

The rank that failed is named in one line, its siblings are ended together and within seconds, and the variables of
visible cards stay as this process has them (DeepSpeed's launcher writes CUDA_VISIBLE_DEVICES over the user's).
"""

import contextlib
import importlib
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path[0] = str(Path(__file__).resolve().parents[1])

from scripts.processes import PATIENCE, describe, status_of, without_the_bridge  # noqa: E402

VISIBLE = ("CUDA_VISIBLE_DEVICES", "HABANA_VISIBLE_MODULES")


def main() -> int:
    launch = without_the_bridge(lambda: importlib.import_module("deepspeed.launcher.launch"))
    ranks: dict[str, subprocess.Popen] = {}
    failed: list[tuple[str, int]] = []

    def start(command: list[str], env: dict[str, str]) -> subprocess.Popen:
        own = {name: os.environ[name] for name in VISIBLE if name in os.environ}
        kept = {name: value for name, value in env.items() if name not in VISIBLE}
        name = f"rank {env['RANK']}" + ("" if env["CROSS_SIZE"] == "1" else f" on {socket.gethostname()}")
        ranks[name] = subprocess.Popen(command, env={**kept, **own})
        return ranks[name]

    def end_all(pid: int) -> None:  # called for each rank in turn; the first call ends them all
        failed.extend((name, rank.returncode) for name, rank in ranks.items() if rank.returncode and not failed)
        end_trees([rank.pid for rank in ranks.values() if rank.poll() is None])

    launch.subprocess = SimpleNamespace(Popen=start)
    launch.terminate_process_tree = end_all
    try:
        launch.main()
    except SystemExit:
        if not failed:
            raise
        print(f"gaudi_spawn: {describe(*failed[0])}", file=sys.stderr)
        return status_of(failed[0][1])
    return 0


def end_trees(pids: list[int]) -> None:
    import psutil

    tree = []
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            tree += [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    for ask in (psutil.Process.terminate, psutil.Process.kill):
        for process in tree:
            with contextlib.suppress(psutil.Error):
                ask(process)
        tree = psutil.wait_procs(tree, timeout=PATIENCE)[1]


if __name__ == "__main__":
    sys.exit(main())
