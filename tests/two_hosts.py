"""Two servers on one machine: network namespaces with an sshd each, and a training over both, compared with one process.

  sudo .venv/bin/python tests/two_hosts.py            needs root, and Debian's iproute2, openssh-server (openmpi-bin for MPI)

The launcher runs on server `one` and reaches `one` and `two` by ssh, as on a cluster: DeepSpeed ZeRO-3, plain data parallelism in
DeepSpeed's engine, and MPI. Prints a table of losses, step by step; exit status 1 where they differ by more than 1e-5, 2 where
something needed is missing. What it sets up it takes away again; nothing in /root/.ssh is touched.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HOSTS = {"one": "10.211.0.1", "two": "10.211.0.2"}
TINY = ["+experiment=tiny", "runtime=cpu", "data.show_samples=0", "train.tensorboard=false", "train.eval_strategy=no"]
CASES = {
    "DeepSpeed ZeRO-3": (["--use_deepspeed"], ["deepspeed=zero3"]),
    "DeepSpeed ZeRO-0": (["--use_deepspeed"], ["deepspeed=zero0"]),
    "MPI": (["--use_mpi"], []),
}
TOLERANCE = 1e-5


def main() -> int:
    missing = [tool for tool in ("ip", "ssh", "sshd", "ssh-keygen") if not _tool(tool)]
    if os.geteuid() != 0 or missing:
        print(f"error: needs root and {', '.join(missing) or 'nothing else'}", file=sys.stderr)
        return 2
    cases = dict(CASES)
    if not shutil.which("mpirun"):
        print("MPI is left out: no mpirun here (apt-get install openmpi-bin)")
        del cases["MPI"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        alone = _losses(folder / "alone", [sys.executable], ["train.per_device_train_batch_size=4"])
        wrong = 0
        print(f"{'':20}" + "".join(f"step {n + 1:<6}" for n in range(len(alone))))
        print(f"{'one process':20}" + "".join(f"{loss:<11.6f}" for loss in alone))
        with servers(folder) as environment:
            for case, (engine, overrides) in cases.items():
                launch = [*_inside("one"), sys.executable, str(ROOT / "scripts" / "gaudi_spawn.py")]
                launch += ["--hostfile", str(folder / "hosts"), *engine]
                half = ["train.per_device_train_batch_size=2", *overrides]
                found = _losses(folder / case.replace(" ", "_"), launch, half, environment)
                apart = max(abs(a - b) for a, b in zip(alone, found, strict=True))
                wrong += apart > TOLERANCE
                print(f"{case:20}" + "".join(f"{loss:<11.6f}" for loss in found) + f"apart {apart:.1e}")
    return 1 if wrong else 0


def _tool(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")


def _inside(host: str) -> list[str]:
    return ["ip", "netns", "exec", f"spawn-{host}"]


def _losses(
    folder: Path, launch: list[str], overrides: list[str], environment: dict[str, str] | None = None
) -> list[float]:
    command = [*launch, str(ROOT / "recipes" / "lora.py"), *TINY, f"hydra.run.dir={folder}", *overrides]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **(environment or {})}, timeout=400
    )
    if done.returncode:
        sys.exit(f"{' '.join(launch[-3:])}: exit status {done.returncode}\n{done.stderr[-3000:]}")
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    return [record["loss"] for record in log if "loss" in record]


@contextlib.contextmanager
def servers(folder: Path) -> Iterator[dict[str, str]]:
    """Both servers up, reachable from each other by name; gives the launcher's environment."""
    _keys(folder)
    daemons: list[subprocess.Popen] = []
    try:
        _network()
        for host in HOSTS:
            sshd = [_tool("sshd"), "-D", "-e", "-f", str(folder / "sshd_config")]
            daemons.append(subprocess.Popen([*_inside(host), *sshd], stderr=(folder / f"{host}.log").open("w")))
        environment = {
            "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }
        _wait_for_ssh(environment)
        yield environment
    finally:
        for daemon in daemons:
            daemon.terminate()
        for host in HOSTS:
            subprocess.run(["ip", "netns", "delete", f"spawn-{host}"], stderr=subprocess.DEVNULL)
            shutil.rmtree(f"/etc/netns/spawn-{host}", ignore_errors=True)


def _network() -> None:
    names = "127.0.0.1 localhost\n" + "".join(f"{address} {host}\n" for host, address in HOSTS.items())
    for host in HOSTS:
        _do("ip", "netns", "add", f"spawn-{host}")
        etc = Path(f"/etc/netns/spawn-{host}")  # bound over /etc inside the namespace
        etc.mkdir(parents=True, exist_ok=True)
        (etc / "hosts").write_text(names)
    _do("ip", "link", "add", "spawn-a", "type", "veth", "peer", "name", "spawn-b")
    for end, (host, address) in zip(("spawn-a", "spawn-b"), HOSTS.items(), strict=True):
        _do("ip", "link", "set", end, "netns", f"spawn-{host}")
        _do(*_inside(host), "ip", "link", "set", end, "name", "eth0")
        _do(*_inside(host), "ip", "address", "add", f"{address}/24", "dev", "eth0")
        for device in ("eth0", "lo"):
            _do(*_inside(host), "ip", "link", "set", device, "up")


def _keys(folder: Path) -> None:
    for name in ("host", "user"):
        _do("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name))
    (folder / "hosts").write_text("".join(f"{host} slots=1\n" for host in HOSTS))
    (folder / "sshd_config").write_text(
        f"HostKey {folder}/host\nAuthorizedKeysFile {folder}/user.pub\nStrictModes no\nPidFile none\nUsePAM no\n"
        "PermitRootLogin yes\nPasswordAuthentication no\n"
    )
    config = folder / "ssh_config"
    config.write_text(
        f"IdentityFile {folder}/user\nStrictHostKeyChecking no\nUserKnownHostsFile /dev/null\nLogLevel ERROR\n"
    )
    ssh = folder / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(f'#!/bin/sh\nexec {_tool("ssh")} -F {config} "$@"\n')
    ssh.chmod(0o755)
    Path("/run/sshd").mkdir(exist_ok=True)


def _wait_for_ssh(environment: dict[str, str]) -> None:
    for host in HOSTS:
        for _ in range(50):
            command = [*_inside("one"), "ssh", host, "true"]
            if subprocess.run(command, env={**os.environ, **environment}, stderr=subprocess.DEVNULL).returncode == 0:
                break
            time.sleep(0.2)
        else:
            sys.exit(f"error: server {host} does not answer by ssh")


def _do(*command: str | None) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: {' '.join(map(str, command))}: {done.stderr.strip()}")


if __name__ == "__main__":
    sys.exit(main())
