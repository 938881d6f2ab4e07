"""Start a recipe on many cards: torchrun by default, DeepSpeed or MPI; one host or several.

Every argument reaches the script byte for byte, on other hosts too. When a rank fails, it is named, the others are ended
and its exit status is returned.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shlex
import socket
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from recipes.pipeline.compose import REPOSITORY, SCHEMAS, compose_here, exit_on_error
from recipes.pipeline.config import InputError
from recipes.pipeline.runtime import cards, environment, hpu_cards, hpu_installed, lazy_mode
from scripts import commands
from scripts.arguments import OneLineParser
from scripts.hostfile import Hosts, choose, read_hostfile
from scripts.processes import Start, run

EXAMPLES = """\
examples
  8 cards of this server, DeepSpeed ZeRO-3:
    python scripts/gaudi_spawn.py --world_size 8 --use_deepspeed recipes/lora.py +experiment=70b
  2 processes on a CPU:
    python scripts/gaudi_spawn.py --world_size 2 recipes/lora.py +experiment=tiny
  two servers (a line `hostname slots=8` each; ssh without a password, same folders):
    python scripts/gaudi_spawn.py --hostfile hosts --use_deepspeed recipes/lora.py +experiment=70b
  see what would be started:
    python scripts/gaudi_spawn.py --world_size 8 --use_mpi --dry_run recipes/lora.py +experiment=70b

Options come before the script; everything behind the script is the script's.
"""


def main(argv: list[str] | None = None) -> int:
    """Exit status: the failed rank's, 0 when all ended well, 2 for a wrong command line, 128 + a signal's number."""
    with exit_on_error():
        options = parse(sys.argv[1:] if argv is None else argv)
        starts, added = build(options)
    if options.dry_run:
        show(starts, added)
        return 0
    return run(starts, {**os.environ, **added})


def parse(argv: list[str]) -> argparse.Namespace:
    parser = OneLineParser(
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


def build(options: argparse.Namespace) -> tuple[list[Start], dict[str, str]]:
    """What to start, and the variables it adds to the environment. Raises InputError."""
    if not Path(options.script).is_file():
        raise InputError(f"{options.script}: no such script; options of the launcher come before it")
    if options.world_size is not None and options.world_size < 1:
        raise InputError(f"--world_size {options.world_size}: takes 1 or more")
    if options.master_port is not None and not 0 < options.master_port < 65536:
        raise InputError(f"--master_port {options.master_port}: takes 1 to 65535")
    hosts = _hosts(options)
    ranks = sum(map(len, hosts.values())) or options.world_size or 1
    port = options.master_port or _free_port()
    added = {"RUN_STAMP": f"{time.strftime('%Y-%m-%d_%H-%M-%S')}-{secrets.token_hex(2)}"}  # names the run's folder
    if not hosts:
        added |= _for_this_server(ranks)
    elif options.use_mpi:  # other hosts are taken to be like this one; through ssh, each counts its own cores
        added["OMP_NUM_THREADS"] = _threads(max(map(len, hosts.values())))
    added = {name: value for name, value in added.items() if name not in os.environ}
    added |= _of_the_recipe(options, bool(hosts))
    script = [options.script, *options.arguments]
    address = options.master_addr or next(iter(hosts), "127.0.0.1")
    if options.use_mpi:
        added |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
        handed = {name for name in os.environ if commands.HANDED_ON.match(name)}
        return [Start(commands.mpirun(hosts, ranks, handed | set(added), script), name="mpirun")], added
    if hosts:
        return commands.deepspeed_over_hosts(hosts, address, port, script, added), added
    if options.use_deepspeed:
        return [Start(commands.deepspeed({"localhost": list(range(ranks))}, 0, address, port, script))], added
    if ranks == 1:
        return [Start(commands.alone(script), interruptible=True)], added
    return [Start(commands.torchrun(ranks, port, script))], added


def show(starts: list[Start], added: dict[str, str]) -> None:
    for start in starts:
        print("command      ", shlex.join(start.command))
        if start.parcel:
            parcel = json.loads(start.parcel)
            print("  which runs ", shlex.join(parcel["command"]))
            print("  with       ", " ".join(sorted(parcel["environment"])))
    for name, value in sorted(added.items()):
        print("environment  ", shlex.quote(f"{name}={value}"))


def _hosts(options: argparse.Namespace) -> Hosts:
    if options.hostfile is None:
        if options.include is not None:
            raise InputError("--include chooses among the hosts of a --hostfile; give one")
        return {}
    if not (options.use_deepspeed or options.use_mpi):
        raise InputError("--hostfile needs --use_deepspeed or --use_mpi")
    hosts = choose(read_hostfile(options.hostfile), options.include, options.world_size, options.hostfile)
    first = next(iter(hosts))
    if len(hosts) > 1 and not options.master_addr and (first == "localhost" or first.startswith("127.")):
        raise InputError(
            f"{options.hostfile}: {first} is another server to every host; write its name or --master_addr"
        )
    if options.use_mpi and any(slots != list(range(len(slots))) for slots in hosts.values()):
        raise InputError(
            f"--include {options.include}: mpirun takes whole hosts; use --use_deepspeed for slots by number"
        )
    return hosts


def _for_this_server(ranks: int) -> dict[str, str]:
    """Variables for `ranks` ranks here. Raises InputError for more of them than cards."""
    cores = len(os.sched_getaffinity(0))
    threads = {"OMP_NUM_THREADS": _threads(ranks)}
    kind = _kind()
    if kind == "cpu":
        if ranks > cores:
            print(f"warning: {ranks} ranks on {cores} CPU cores", file=sys.stderr)
        return {**threads, "DS_ACCELERATOR": "cpu"}
    visible = [part for part in os.environ.get("HABANA_VISIBLE_MODULES", "").split(",") if part.strip().isdigit()]
    if kind == "hpu" and visible and ranks > len(visible):
        raise InputError(f"--world_size {ranks}: HABANA_VISIBLE_MODULES shows {len(visible)} cards")
    if ranks > cards(kind):
        hint = "; CUDA_VISIBLE_DEVICES='' makes it a CPU run" if kind == "cuda" else ""
        raise InputError(f"--world_size {ranks}: this server has {cards(kind)} cards{hint}")
    return threads


def _of_the_recipe(options: argparse.Namespace, elsewhere: bool) -> dict[str, str]:
    """What the recipe's configuration wants in its ranks' environment before anything is imported. Raises InputError."""
    script = Path(options.script).resolve()
    hydras = any(
        argument.startswith("-") for argument in options.arguments
    )  # --help, --multirun: for the script to answer
    if script.parent != REPOSITORY / "recipes" or script.stem not in SCHEMAS or hydras:
        return {}
    cfg = compose_here([item for item in options.arguments if not item.lstrip("+").startswith("hydra.")], script.stem)
    kind = cfg.runtime.device.name
    if kind == "auto":
        if elsewhere:
            return {}  # this machine's cards say nothing of the other hosts'
        kind = _kind()
    return environment(cfg, kind, lazy_mode(cfg.runtime, kind))


def _threads(ranks: int) -> str:
    return str(max(1, len(os.sched_getaffinity(0)) // ranks))  # unset, each rank would take all cores


def _kind() -> str:
    if hpu_installed() and hpu_cards():
        return "hpu"
    drivers = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # asked first: torch takes seconds to import
    return "cuda" if any(map(os.path.exists, drivers)) and cards("cuda") else "cpu"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    sys.exit(main())
