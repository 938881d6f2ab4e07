"""gaudi_spawn's commands against those of optimum-habana's DistributedRunner (and of DeepSpeed's runner behind it), case by case.

Where the two differ on purpose, the test says how and why.
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runner")
    (folder / "hosts").write_text("first slots=8\nsecond slots=8\n")
    (folder / ".deepspeed_env").write_text("MY_OWN=1\n")
    (folder / "bin").mkdir()
    (folder / "bin" / "pdsh").write_text("#!/bin/sh\n")
    (folder / "bin" / "pdsh").chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def theirs(folder):
    path = [str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
    environment = {**os.environ, "PATH": os.pathsep.join(path), "PYTHONPATH": str(DOUBLES), "PT_HPU_LAZY_MODE": "1"}
    program = Path(__file__).with_name("runner_commands.py")
    done = subprocess.run(
        [sys.executable, str(program), LORA, str(folder / "hosts")],
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


def test_one_card_is_the_interpreter_itself(theirs, ours):
    (start,), _ = ours()
    assert theirs["one card"]["interpreter"] == [sys.executable]
    assert start.command == [sys.executable, *SCRIPT]


def test_many_cards_are_torchs_launcher(theirs, ours):
    (start,), _ = ours("--world_size", "8")
    interpreter = theirs["eight cards"]["interpreter"]
    assert interpreter == [sys.executable, "-um", "torch.distributed.run", "--nproc_per_node=8"]
    # torchrun.py is that module with the failed rank's own exit status; and a port of its own: theirs is always 29500
    assert start.command[:4] == [sys.executable, "-u", str(REPOSITORY / "scripts/torchrun.py"), "--nproc_per_node=8"]
    assert start.command[-len(SCRIPT) :] == SCRIPT


@pytest.mark.parametrize(("case", "options"), [("one card", []), ("eight cards", ["--world_size", "8"])])
def test_deepspeed_on_one_server_starts_the_same_ranks(theirs, ours, case, options):
    (start,), _ = ours(*options, "--use_deepspeed")
    started = theirs[f"{case}, deepspeed"]["started"]
    assert world(start.command) == world(started)
    for name in ("master_addr", "master_port"):
        assert option(start.command, name) == option(started, name)
    # DeepSpeed's own launch module is wrapped (deepspeed_ranks.py); no --local_rank ever: Hydra refuses it, and theirs adds it
    # on one card
    assert "--no_local_rank" in start.command
    assert ("--no_local_rank" in started) == (case == "eight cards")


def test_mpi_on_version_4(theirs, ours, monkeypatch):
    monkeypatch.setattr(commands, "mpi_version", lambda: 4)
    monkeypatch.setattr(commands, "cores_by_socket", lambda: [2])
    (start,), added = ours("--world_size", "2", "--use_mpi")
    reference = theirs["two cards, mpi"]
    placed = reference["interpreter"][reference["interpreter"].index("--map-by") + 1]
    if placed.startswith("socket"):  # this machine's cores, counted from lscpu there
        expected = [word if word != placed else "socket:PE=1" for word in reference["interpreter"]]
        front = start.command[: start.command.index("-x")]
        assert sorted(front) == sorted(expected[:-1])
    assert {name: added[name] for name in ("MASTER_ADDR", "MASTER_PORT")} == {
        **reference["variables"],
        "MASTER_ADDR": "127.0.0.1",  # "localhost" may be an IPv6 address on one rank and IPv4 on another
    }
    # Theirs hands on what mpirun does by itself on one server; ours names each variable, PT_HPU_* among them
    exported = {start.command[n + 1] for n, word in enumerate(start.command) if word == "-x"}
    assert {"MASTER_ADDR", "MASTER_PORT", "PT_HPU_LAZY_MODE", "DS_ACCELERATOR"} <= exported


def test_mpi_on_version_5_has_none_of_the_options_it_refuses(theirs, ours, monkeypatch):
    monkeypatch.setattr(commands, "mpi_version", lambda: 5)
    monkeypatch.setattr(commands, "cores_by_socket", lambda: [2])
    (start,), _ = ours("--world_size", "2", "--use_mpi")
    assert "--rank-by" in theirs["two cards, mpi"]["interpreter"]
    assert "--rank-by" not in start.command
    assert start.command[start.command.index("--map-by") + 1] == "package:PE=1"


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
