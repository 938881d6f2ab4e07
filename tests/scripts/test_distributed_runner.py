"""gaudi_spawn's commands against those of optimum-habana's DistributedRunner (and of DeepSpeed's runner behind it), case by case.

Whole commands are compared; where the two differ on purpose, the test says how and why.
"""

import base64
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import commands, gaudi_spawn

REPOSITORY = Path(__file__).resolve().parents[2]
DOUBLES = REPOSITORY / "tests" / "doubles"
LORA = str(REPOSITORY / "recipes" / "lora.py")
SCRIPT = [LORA, "+experiment=tiny", "runtime=gaudi_lazy"]


GAUDI2 = [2, 38]  # sockets, cores of each
CASES = {
    "one card": {},
    "one card, deepspeed": {"use_deepspeed": True},
    "eight cards": {"world_size": 8},
    "eight cards, deepspeed": {"world_size": 8, "use_deepspeed": True},
    "eight cards, mpi": {"world_size": 8, "use_mpi": True, "server": GAUDI2},
    "three cards, mpi": {"world_size": 3, "use_mpi": True, "server": GAUDI2},
    "eight cards, mpi, sockets of one core": {"world_size": 8, "use_mpi": True, "server": [8, 1]},
    "eight cards, mpi, few cores": {"world_size": 8, "use_mpi": True, "server": [1, 4]},
    "two hosts, deepspeed": {"hostfile": "hosts", "use_deepspeed": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runner")
    (folder / "hosts").write_text("first slots=8\nsecond slots=8\n")
    (folder / "cases.json").write_text(json.dumps(CASES))
    (folder / ".deepspeed_env").write_text("MY_OWN=1\n")
    (folder / "bin").mkdir()
    for name, body in {
        "pdsh": "",
        "lscpu": 'echo "Socket(s): $SOCKETS"; echo "Core(s) per socket: $CORES"\n',  # the runner counts by it
    }.items():
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{body}")
        (folder / "bin" / name).chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def theirs(folder):
    path = [str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
    environment = {**os.environ, "PATH": os.pathsep.join(path), "PYTHONPATH": str(DOUBLES), "PT_HPU_LAZY_MODE": "1"}
    program = Path(__file__).with_name("runner_commands.py")
    done = subprocess.run(
        [sys.executable, str(program), "cases.json", *SCRIPT],
        cwd=folder, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def ours(folder, monkeypatch):
    """ours("--world_size", "8") -> (what is started, variables it adds), as on a server with 8 cards."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(gaudi_spawn, "_kind", lambda: "hpu")
    monkeypatch.setattr(gaudi_spawn, "cards", lambda kind: 8)

    def build(*options: str):
        return gaudi_spawn.build(gaudi_spawn.parse([*options, "--master_port", "29511", *SCRIPT]))

    return build


def option(command: list[str], name: str) -> str:
    return next(word for word in command if word.startswith(f"--{name}=")).split("=", 1)[1]


def world(command: list[str]) -> dict:
    return json.loads(base64.urlsafe_b64decode(option(command, "world_info")))


def replaced(command: list[str], changes: dict[tuple[str, ...], list[str]]) -> list[str]:
    """`command` with each run of words exchanged for others; each must be there, once."""
    for words, others in changes.items():
        (at,) = [n for n in range(len(command)) if tuple(command[n : n + len(words)]) == words]
        command = [*command[:at], *others, *command[at + len(words) :]]
    return command


def test_one_card_is_the_interpreter_itself(theirs, ours):
    (start,), _ = ours()
    assert start.command == theirs["one card"]["command"]


def test_many_cards_are_torchs_launcher(theirs, ours):
    (start,), _ = ours("--world_size", "8")
    changes = {
        # that module, with the failed rank's own exit status
        ("-um", "torch.distributed.run"): ["-u", str(REPOSITORY / "scripts/torchrun.py")],
        # theirs always meets at 29500, which another run on the server may hold
        ("--nproc_per_node=8",): ["--nproc_per_node=8", "--master_addr=127.0.0.1", "--master_port=29511"],
    }
    assert start.command == replaced(theirs["eight cards"]["command"], changes)


@pytest.mark.parametrize(("case", "options"), [("one card", []), ("eight cards", ["--world_size", "8"])])
def test_deepspeed_on_one_server_starts_the_same_ranks(theirs, ours, case, options):
    (start,), _ = ours(*options, "--use_deepspeed")
    started = theirs[f"{case}, deepspeed"]["started"]
    changes = {
        # DeepSpeed's own module, with the failed rank named and its exit status
        ("-m", "deepspeed.launcher.launch"): [str(REPOSITORY / "scripts/deepspeed_ranks.py")],
        ("--master_addr=127.0.0.1",): ["--node_rank=0", "--master_addr=127.0.0.1"],  # their default, said
        # "None" is their word for no file. Theirs lets one card have --local_rank=0 behind the script: Hydra refuses it
        ("--enable_each_rank_log=None",): ["--no_local_rank"] if case == "one card" else [],
        ("--log_level=info",): ["--log_level=critical"],  # what has failed, gaudi_spawn says itself
    }
    assert start.command == replaced(started, changes)


# Open MPI. What differs from theirs on purpose, in every case:
#   MASTER_ADDR is 127.0.0.1: "localhost" may be an IPv6 address on one rank and IPv4 on another;
#   -u: a rank's output comes line by line;
#   -x NAME for each variable: theirs leans on mpirun handing all of them on by itself, which it does on one server only;
#   the variables that the recipe and a run on many cores need, for ranks that import the bridge first thing.
# Version 5 has sockets under the name of packages, and refuses --rank-by slot.
# And in one case each:
PLACES = {
    "eight cards, mpi": ("socket:PE=9", "socket:PE=9"),
    # 76 cores by 3 are 25, but two of the ranks share a socket, which has 38
    "three cards, mpi": ("socket:PE=25", "socket:PE=19"),
    "eight cards, mpi, sockets of one core": ("slot:PE=1", "socket:PE=1"),  # the same place by another name
    # fewer cores than ranks: PE=0 is no place
    "eight cards, mpi, few cores": ("socket:PE=0", None),
}


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("case", PLACES)
def test_mpi_is_theirs_but_for_the_stated_differences(theirs, ours, monkeypatch, case, version):
    for name in [name for name in os.environ if commands.HANDED_ON.match(name)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PT_HPU_MAX_COMPOUND_OP_SIZE", "10")
    sockets, cores = CASES[case]["server"]
    monkeypatch.setattr(commands, "mpi_version", lambda: version)
    monkeypatch.setattr(commands, "cores_by_socket", lambda: [cores] * sockets)
    ranks = CASES[case]["world_size"]
    (start,), added = ours("--world_size", str(ranks), "--use_mpi")

    wanted = {
        **theirs[case]["variables"],
        "MASTER_ADDR": "127.0.0.1",
        "DS_ACCELERATOR": "hpu",
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // ranks)),
        "PT_HPU_LAZY_MODE": "1",
        "RUN_STAMP": added["RUN_STAMP"],
    }
    assert added == wanted
    their_place, place = PLACES[case]
    unit = "socket" if version == 4 else "package"
    order = ["--rank-by", "slot"] if version == 4 else []
    bound = ["--bind-to", "none", "--map-by", "slot:OVERSUBSCRIBE"]
    if place is not None:
        bound = ["--bind-to", "core", "--map-by", place.replace("socket", unit), *order]
    exported = sorted({*wanted, "PT_HPU_MAX_COMPOUND_OP_SIZE"})
    changes = {
        ("--bind-to", "core", "--map-by", their_place, "--rank-by", "slot"): bound,
        (sys.executable,): [*(word for name in exported for word in ("-x", name)), sys.executable, "-u"],
    }
    assert start.command == replaced(theirs[case]["command"], changes)


def test_two_hosts_start_the_same_ranks_with_more_of_the_environment(theirs, ours, monkeypatch):
    monkeypatch.setenv("PT_HPU_MAX_COMPOUND_OP_SIZE", "10")
    starts, _ = ours("--hostfile", "hosts", "--use_deepspeed")
    started = theirs["two hosts, deepspeed"]["started"]
    parcels = [json.loads(start.parcel) for start in starts]
    assert [start.name for start in starts] == ["ssh to first", "ssh to second"]
    for node, parcel in enumerate(parcels):
        assert world(parcel["command"]) == world(started)
        for name in ("master_addr", "master_port"):
            assert option(parcel["command"], name) == option(started, name)
        assert option(parcel["command"], "node_rank") == str(node)  # theirs leaves %n to pdsh
        assert parcel["command"][-len(SCRIPT) :] == SCRIPT
    exports = next(word for word in started if word.startswith("export "))
    assert "MY_OWN=1" in exports and parcels[0]["environment"]["MY_OWN"] == "1"  # .deepspeed_env is read by both
    # DeepSpeed's runner exports by a short list of prefixes: without .deepspeed_env the cards would run in another mode
    assert "PT_HPU" not in exports
    for name, value in {"PT_HPU_LAZY_MODE": "1", "PT_HPU_MAX_COMPOUND_OP_SIZE": "10"}.items():
        assert all(parcel["environment"][name] == value for parcel in parcels)


def test_a_hostfile_with_comments_is_read_where_theirs_is_refused(tmp_path):
    from scripts.hostfile import read_hostfile

    path = tmp_path / "hosts"
    path.write_text("# the first is the master\nfirst slots=8  # rack 1\n\nsecond slots=8\n")
    assert {host: len(slots) for host, slots in read_hostfile(str(path)).items()} == {"first": 8, "second": 8}


def test_ranks_on_a_server_get_the_recipes_environment(ours):
    _, added = ours("--world_size", "8", "--use_deepspeed")
    assert (added["PT_HPU_LAZY_MODE"], added["DS_ACCELERATOR"]) == ("1", "hpu")


def test_an_exported_mode_that_disagrees_is_refused_before_anything_starts(ours, monkeypatch):
    from recipes.pipeline.config import InputError

    monkeypatch.setenv("PT_HPU_LAZY_MODE", "0")
    with pytest.raises(InputError, match=r"PT_HPU_LAZY_MODE=0 in the environment, but runtime\.lazy needs 1"):
        ours("--world_size", "8")
