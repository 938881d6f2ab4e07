"""Start a recipe on many cards: torchrun by default, DeepSpeed or MPI; one host or several.

No shell is involved on this host, and none sees the script's arguments on others: each reaches the script byte for byte.
When a rank fails, the others are ended and its exit status is returned.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import re
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from recipes.pipeline.config import InputError  # noqa: E402
from recipes.pipeline.runtime import cards, hpu_cards, hpu_installed  # noqa: E402
from scripts.hostfile import Hosts, choose, read_hostfile  # noqa: E402

EXAMPLES = """\
examples
  8 cards of this server, DeepSpeed ZeRO-3:
    python scripts/gaudi_spawn.py --world_size 8 --use_deepspeed recipes/lora.py +experiment=70b
  2 processes on a CPU:
    python scripts/gaudi_spawn.py --world_size 2 recipes/lora.py +experiment=tiny
  two servers (a line `hostname slots=8` each):
    python scripts/gaudi_spawn.py --hostfile hosts --use_deepspeed recipes/lora.py +experiment=70b
  see what would be started:
    python scripts/gaudi_spawn.py --world_size 8 --use_mpi --dry_run recipes/lora.py +experiment=70b

Options come before the script; everything behind the script is the script's.
"""
# Variables of these names are handed to every rank of every host
HANDED_ON = re.compile(
    r"(PT_|HABANA_|HLS_|HCCL_|ENABLE_CONSOLE|LOG_LEVEL_|HF_|HUGGINGFACE_|TRANSFORMERS_|XDG_CACHE_HOME|OMP_|NCCL_|GLOO_|TOKENIZERS_|"
    r"RUN_STAMP|PYTHONPATH|DS_|DEEPSPEED_|TORCH_|CUDA_)"
)
GRACE = 10  # seconds between a request to end and the end


def main(argv: list[str] | None = None) -> int:
    """Exit status: the failed rank's, 0 when all ended well, 2 for a wrong command line."""
    options = parse(sys.argv[1:] if argv is None else argv)
    try:
        command, added = build(options)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.dry_run:
        print("command      ", shlex.join(command))
        for name, value in sorted(added.items()):
            print("environment  ", shlex.quote(f"{name}={value}"))
        return 0
    return run(command, {**os.environ, **added})


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gaudi_spawn.py",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--world_size", type=int, help="ranks in all; with --hostfile: all of its slots by default, else 1"
    )
    parser.add_argument(
        "--hostfile", help="file with a line `hostname slots=N` for each server; needs --use_deepspeed or --use_mpi"
    )
    parser.add_argument("--include", help="hosts and slots of the hostfile to use: host1@host2:0,1")
    engine = parser.add_mutually_exclusive_group()
    engine.add_argument("--use_deepspeed", action="store_true", help="start through DeepSpeed's launcher")
    engine.add_argument("--use_mpi", action="store_true", help="start through mpirun (Open MPI 4 or 5)")
    parser.add_argument(
        "--master_addr", help="address of the first host; by default its name in the hostfile, else 127.0.0.1"
    )
    parser.add_argument("--master_port", type=int, help="port where the ranks meet; by default a free one")
    parser.add_argument(
        "--dry_run", action="store_true", help="print the command and the environment it adds, start nothing"
    )
    parser.add_argument("script", help="Python file to run on every rank")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="the script's own arguments")
    return parser.parse_args(argv)


def build(options: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """The command as a list of arguments, and the variables it adds to the environment. Raises InputError."""
    if not Path(options.script).is_file():
        raise InputError(f"{options.script}: no such script; options of the launcher come before it")
    hosts = _hosts(options)
    ranks = (
        sum(len(slots) for slots in hosts.values())
        if hosts
        else 1
        if options.world_size is None
        else options.world_size
    )
    if ranks < 1:
        raise InputError(f"--world_size {ranks}: takes 1 or more")
    port = options.master_port or _free_port()
    if not 0 < port < 65536:
        raise InputError(f"--master_port {port}: takes 1 to 65535")
    kind = "hpu" if hpu_installed() and hpu_cards() else "cuda" if cards("cuda") else "cpu"
    if not hosts:
        _check_cards(kind, ranks)
    added = _environment(kind, ranks if not hosts else max(map(len, hosts.values())))
    script = [options.script, *options.arguments]
    if options.use_mpi:
        return _mpirun(options, ranks, port, script, added), added
    if options.use_deepspeed and hosts:
        return _deepspeed_hosts(options, hosts, port, script, added), added
    if options.use_deepspeed:
        return _deepspeed_here(ranks, port, script, kind), added
    if ranks == 1:
        return [sys.executable, *script], added
    here = [sys.executable, "-u", str(REPOSITORY / "scripts" / "torchrun.py"), f"--nproc_per_node={ranks}"]
    return [*here, "--master_addr=127.0.0.1", f"--master_port={port}", *script], added


def _hosts(options: argparse.Namespace) -> Hosts:
    if not options.hostfile:
        if options.include:
            raise InputError("--include chooses among the hosts of a --hostfile; give one")
        return {}
    if not (options.use_deepspeed or options.use_mpi):
        raise InputError("--hostfile needs --use_deepspeed or --use_mpi")
    return choose(read_hostfile(options.hostfile), options.include, options.world_size, options.hostfile)


def _check_cards(kind: str, ranks: int) -> None:
    if kind == "cpu":
        cores = len(os.sched_getaffinity(0))
        if ranks > cores:
            print(f"warning: {ranks} ranks on {cores} CPU cores", file=sys.stderr)
        return
    variable = "HABANA_VISIBLE_MODULES" if kind == "hpu" else "CUDA_VISIBLE_DEVICES"
    visible = [part for part in os.environ.get(variable, "").split(",") if part.strip()]
    found = len(visible) if visible else cards(kind)
    if ranks > found:
        limit = f"{variable} shows {found}" if visible else f"this server has {found}"
        raise InputError(f"--world_size {ranks}: {limit} cards")


def _environment(kind: str, ranks_here: int) -> dict[str, str]:
    stamp = f"{time.strftime('%Y-%m-%d_%H-%M-%S')}-{secrets.token_hex(2)}"
    added = {"RUN_STAMP": stamp}  # names the run's folder: one for all ranks
    if kind == "cpu":
        added["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // ranks_here))
        added["DS_ACCELERATOR"] = "cpu"
    return {name: value for name, value in added.items() if name not in os.environ}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def _deepspeed_here(ranks: int, port: int, script: list[str], kind: str) -> list[str]:
    # DeepSpeed's launcher sets the visible devices from these ids: the user's own choice is handed on
    chosen = [part.strip() for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip()]
    ids = chosen[:ranks] if len(chosen) >= ranks else list(range(ranks))
    world = base64.urlsafe_b64encode(json.dumps({"localhost": ids}).encode()).decode()
    launcher = [sys.executable, "-u", "-m", "deepspeed.launcher.launch", f"--world_info={world}", "--quiet"]
    return [*launcher, "--master_addr=127.0.0.1", f"--master_port={port}", "--no_local_rank", *script]


def _deepspeed_hosts(
    options: argparse.Namespace, hosts: Hosts, port: int, script: list[str], added: dict[str, str]
) -> list[str]:
    # pdsh hands a command line to the remote shell: arguments and variables travel in one word that no shell changes
    handed = {name: value for name, value in {**os.environ, **added}.items() if HANDED_ON.match(name)}
    parcel = base64.urlsafe_b64encode(json.dumps({"argv": script, "environment": handed}).encode()).decode()
    include = "@".join(f"{host}:{','.join(map(str, slots))}" for host, slots in hosts.items())
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", options.hostfile, "--include", include]
    address = ["--master_addr", options.master_addr or next(iter(hosts)), "--master_port", str(port)]
    return [
        *launcher,
        *address,
        "--no_local_rank",
        "--force_multi",
        str(REPOSITORY / "scripts" / "remote_rank.py"),
        parcel,
    ]


def _mpirun(options: argparse.Namespace, ranks: int, port: int, script: list[str], added: dict[str, str]) -> list[str]:
    version = mpi_version()
    cores = os.cpu_count() or 1
    each = max(1, cores // ranks)
    # Fewer cores than ranks: Open MPI refuses to bind
    placed = ["--bind-to", "core", "--map-by", f"socket:PE={each}" if version < 5 else f"package:PE={each}"]
    if cores < ranks:
        placed = ["--bind-to", "none", "--map-by", "slot", "--oversubscribe"]
    elif version < 5:
        placed += ["--rank-by", "slot"]  # version 5 refuses the option
    command = ["mpirun", "-n", str(ranks), *placed, "--report-bindings", "--allow-run-as-root"]
    if options.hostfile:
        command += ["--hostfile", options.hostfile]
    address = options.master_addr or (next(iter(_hosts(options))) if options.hostfile else "127.0.0.1")
    added |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
    for name in sorted({*added, *filter(HANDED_ON.match, os.environ)}):
        command += ["-x", name]
    return [*command, sys.executable, "-u", *script]


def mpi_version() -> int:
    """Major version of Open MPI. Raises InputError where mpirun is missing or another MPI's."""
    try:
        text = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InputError(f"--use_mpi: mpirun cannot be run ({error}); install Open MPI") from error
    if (match := re.search(r"Open ?MPI\)? (\d+)\.", text)) is None:
        first = (text.strip().splitlines() or ["it says nothing"])[0]
        raise InputError(f"--use_mpi: mpirun is not Open MPI ({first})")
    return int(match[1])


def run(command: list[str], environment: dict[str, str]) -> int:
    """Run `command`, hand signals on, leave no process behind; its exit status."""
    try:
        process = subprocess.Popen(command, env=environment, start_new_session=True)
    except OSError as error:
        print(f"error: {command[0]}: {error.strerror}", file=sys.stderr)
        return 2
    received: list[int] = []

    def hand_on(number: int, frame: object) -> None:
        received.append(number)
        process.send_signal(signal.SIGTERM)

    before = {number: signal.signal(number, hand_on) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    tree: list = []
    ending = None
    while process.poll() is None:
        tree = _tree(process.pid) or tree
        ending = ending or (time.monotonic() if received else None)
        if ending and time.monotonic() - ending > GRACE:
            process.kill()
        time.sleep(0.2)
    _end(tree)
    for number, handler in before.items():
        signal.signal(number, handler)
    if received:
        return 128 + received[0]
    status = process.returncode if process.returncode >= 0 else 128 - process.returncode
    if status:
        print(f"gaudi_spawn: a rank failed, exit status {status}; the others were ended", file=sys.stderr)
    return status


def _tree(pid: int) -> list:
    import psutil

    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def _end(tree: list) -> None:
    import psutil

    for ask in (psutil.Process.terminate, psutil.Process.kill):
        alive = [child for child in tree if child.is_running()]
        for child in alive:
            try:
                ask(child)
            except psutil.Error:
                continue
        psutil.wait_procs(alive, timeout=GRACE / 2)


if __name__ == "__main__":
    sys.exit(main())
