"""The command line of each engine, as lists of arguments."""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from recipes.pipeline.config import InputError
from scripts.hostfile import Hosts
from scripts.processes import Start

SCRIPTS = Path(__file__).resolve().parent
# Variables of these names are handed to the ranks of other hosts
HANDED_ON = re.compile(
    r"(PT_|HABANA_|HLS_|HCCL_|ENABLE_CONSOLE|LOG_LEVEL_|EXPERIMENTAL_|FLASH_ATTENTION_|QUANT_CONFIG|HF_|HUGGING|"
    r"TRANSFORMERS_|XDG_CACHE_HOME|OMP_|MKL_|NCCL_|GLOO_|FI_|UCX_|TOKENIZERS_|RUN_STAMP|PYTHON|HYDRA_|DS_|DEEPSPEED_|"
    r"TORCH|CUDA_|WANDB_|MLFLOW)"
)


def alone(script: list[str]) -> list[str]:
    return [sys.executable, *script]


def torchrun(ranks: int, port: int, script: list[str]) -> list[str]:
    launcher = [sys.executable, "-u", str(SCRIPTS / "torchrun.py"), f"--nproc_per_node={ranks}"]
    return [*launcher, "--master_addr=127.0.0.1", f"--master_port={port}", *script]


def deepspeed(hosts: Hosts, node: int, address: str, port: int, script: list[str]) -> list[str]:
    """DeepSpeed's per-host launcher for host number `node`; slots are numbers, so ranks are counted from them."""
    world = base64.urlsafe_b64encode(json.dumps(hosts).encode()).decode()
    launcher = [
        sys.executable,
        "-u",
        str(SCRIPTS / "deepspeed_ranks.py"),
        f"--world_info={world}",
        f"--node_rank={node}",
    ]
    return [
        *launcher,
        f"--master_addr={address}",
        f"--master_port={port}",
        "--no_local_rank",
        "--log_level=critical",
        *script,
    ]


def deepspeed_over_hosts(
    hosts: Hosts, address: str, port: int, script: list[str], added: dict[str, str]
) -> list[Start]:
    """One ssh for each host, with the host's command and variables for its standard input.

    DeepSpeed's own runner is not used: it gives arguments and variables to the remote shell half quoted, lets the other
    hosts hang when one fails, and on a signal ends every DeepSpeed launcher of the hosts, other runs' too.
    """
    handed = {
        **_deepspeed_env(),
        **{name: value for name, value in os.environ.items() if HANDED_ON.match(name)},
        **added,
    }
    remote = "exec " + shlex.join([sys.executable, "-u", str(SCRIPTS / "remote_host.py")])
    starts = []
    for node, (host, slots) in enumerate(hosts.items()):
        chosen = ",".join(map(str, slots))
        some = slots != list(range(len(slots)))  # slots picked by number: only they are shown to the ranks
        parcel = {
            "folder": os.getcwd(),
            "environment": handed
            | ({"CUDA_VISIBLE_DEVICES": chosen, "HABANA_VISIBLE_MODULES": chosen} if some else {}),
            "ranks": len(slots),
            "command": deepspeed(hosts, node, address, port, script),
        }
        ssh = [
            "ssh",
            "-T",
            "-o",
            "BatchMode=yes",
            "-o",
            "ConnectTimeout=20",
            "-o",
            "ServerAliveInterval=15",
            host,
            remote,
        ]
        starts.append(Start(ssh, json.dumps(parcel).encode() + b"\n", f"ssh to {host}"))
    return starts


def _deepspeed_env() -> dict[str, str]:
    """KEY=VALUE lines of DeepSpeed's .deepspeed_env (home, then here), which users of its runner have."""
    found: dict[str, str] = {}
    for folder in (Path.home(), Path()):
        file = folder / os.environ.get("DS_ENV_FILE", ".deepspeed_env")
        if file.is_file():
            pairs = (line.partition("=") for line in file.read_text().splitlines() if "=" in line)
            found |= {name.strip(): value.strip() for name, _, value in pairs}
    return found


def mpirun(hosts: Hosts, ranks: int, exported: set[str], script: list[str]) -> list[str]:
    """`exported`: names of variables for every rank. Cores are this server's: the others are taken to be like it."""
    version = mpi_version()
    sockets = cores_by_socket()
    here = max(map(len, hosts.values())) if hosts else ranks
    each = min(sockets) // -(-here // len(sockets))  # cores of a rank, where ranks are dealt to the sockets in turn
    if each:
        place = ["--bind-to", "core", "--map-by", f"{'socket' if version < 5 else 'package'}:PE={each}"]
        place += ["--rank-by", "slot"] if version < 5 else []  # version 5 refuses it
    else:
        place = ["--bind-to", "none", "--map-by", "slot:OVERSUBSCRIBE"]
    command = ["mpirun", "-n", str(ranks), *place, "--report-bindings", "--allow-run-as-root"]
    if hosts:
        command += ["--host", ",".join(f"{host}:{len(slots)}" for host, slots in hosts.items())]
    for name in sorted(exported):
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


def cores_by_socket() -> list[int]:
    """Physical cores of each socket, of those that this process may use."""
    sockets: dict[str, set[str]] = {}
    for cpu in os.sched_getaffinity(0):
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        try:
            socket, core = ((topology / name).read_text() for name in ("physical_package_id", "core_id"))
        except OSError:  # a container without /sys
            socket, core = "0", str(cpu)
        sockets.setdefault(socket, set()).add(core)
    return [len(cores) for cores in sockets.values()]
