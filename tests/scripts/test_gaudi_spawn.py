import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from recipes.pipeline.config import InputError
from scripts import gaudi_spawn
from scripts.hostfile import choose, read_hostfile

REPOSITORY = Path(__file__).resolve().parents[2]
LAUNCHER = str(REPOSITORY / "scripts" / "gaudi_spawn.py")
# What shells split, expand or drop
ARGUMENTS = [
    "I'm a student",
    'say "it is -4C outside" now',
    "--p=hello big world",
    "a=[q_proj,v_proj]",
    "x=a  b",
    "p=$HOME;ls",
    "a={b:1,c:2}",
    "",
    "two\nlines",
    "`id` $(id) * ? ~ \\ |&",
    "${now:%Y}",
]
WRITE_ARGUMENTS = """
import json, os, sys
out = os.environ["OUT"]
json.dump([sys.argv[1:], {k: os.environ.get(k) for k in ("WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS", "RUN_STAMP",
    "CUDA_VISIBLE_DEVICES", "PT_HPU_X")}], open(f"{out}/rank{os.environ.get('RANK', '0')}.json", "w"))
"""
ALL_REDUCE = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.tensor(float(dist.get_rank() + 1))
dist.all_reduce(x)
assert x == dist.get_world_size() * (dist.get_world_size() + 1) / 2
"""


@pytest.fixture
def launch(tmp_path):
    def start(script: str, *options: str, arguments=(), wait: bool = True, path: str = "", **variables: str):
        file = tmp_path / f"script{len(list(tmp_path.glob('script*')))}.py"
        file.write_text(script)
        environment = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "RUN_STAMP")}
        environment |= {"OUT": str(tmp_path), **variables}
        if path:
            environment["PATH"] = f"{path}:{environment['PATH']}"
        command = [sys.executable, LAUNCHER, *options, str(file), *arguments]
        process = subprocess.Popen(
            command, cwd=tmp_path, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        if not wait:
            return process
        out, err = process.communicate(timeout=120)
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    return start


def written(folder: Path, rank: int = 0):
    return json.loads((folder / f"rank{rank}.json").read_text())


def fake(folder: Path, name: str, body: str) -> str:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{body}\n")
    (folder / name).chmod((folder / name).stat().st_mode | stat.S_IEXEC)
    return str(folder)


ENGINES = [["--world_size", "2"], ["--world_size", "2", "--use_deepspeed"]]


@pytest.mark.distributed
@pytest.mark.parametrize("options", [*ENGINES, ["--world_size", "1"]])
def test_arguments_arrive_byte_for_byte(launch, tmp_path, options):
    done = launch(WRITE_ARGUMENTS, *options, arguments=ARGUMENTS)
    assert done.returncode == 0, done.stderr
    for rank in range(int(options[1])):
        assert written(tmp_path, rank)[0] == ARGUMENTS


@pytest.mark.distributed
def test_arguments_and_variables_cross_a_remote_shell_unchanged(launch, tmp_path):
    # pdsh and ssh that do what the real ones do to a command: join its words and give them to a shell
    host = REPOSITORY  # the remote side starts in the same folder
    log = tmp_path / "remote"
    body = (
        f'while [ "$1" != localhost ]; do shift; done; shift\nprintf "%s" "$*" | sed "s/%n/0/g" > {log}; exec sh {log}'
    )
    binaries = fake(tmp_path / "bin", "pdsh", body)
    fake(tmp_path / "bin", "ssh", "exit 0")
    (tmp_path / "hosts").write_text("# one server\nlocalhost slots=2\n\n")
    options = ["--hostfile", str(tmp_path / "hosts"), "--use_deepspeed", "--master_addr", "127.0.0.1"]
    done = launch(
        WRITE_ARGUMENTS, *options, arguments=ARGUMENTS, path=binaries, PT_HPU_X="a $HOME 'b'", DS_ACCELERATOR="cpu"
    )
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        arguments, variables = written(tmp_path, rank)
        assert arguments == ARGUMENTS
        assert variables["PT_HPU_X"] == "a $HOME 'b'"
        assert variables["WORLD_SIZE"] == "2" and variables["RUN_STAMP"]
    assert host.exists()


@pytest.mark.distributed
@pytest.mark.parametrize("options", ENGINES)
def test_ranks_meet(launch, options):
    assert launch(ALL_REDUCE, *options).returncode == 0


@pytest.mark.distributed
def test_two_launches_at_once_both_finish(launch):
    first, second = (launch(ALL_REDUCE, *ENGINES[0], wait=False) for _ in range(2))
    assert first.wait(timeout=100) == second.wait(timeout=100) == 0


@pytest.mark.distributed
@pytest.mark.parametrize("options", [*ENGINES, ["--world_size", "1"]])
def test_a_scripts_exit_status_is_returned(launch, options):
    done = launch("import sys; sys.exit(7)", *options)
    assert done.returncode == 7
    assert "exit status 7" in done.stderr


@pytest.mark.distributed
@pytest.mark.parametrize("options", ENGINES)
def test_a_dead_rank_ends_the_others(launch, tmp_path, options):
    script = """
import os, sys, time
open(f"{os.environ['OUT']}/pid{os.environ['RANK']}", "w").write(str(os.getpid()))
if os.environ["RANK"] == "1":
    time.sleep(1)
    sys.exit(3)
time.sleep(120)
"""
    process = launch(script, *options, wait=False)
    while not (tmp_path / "pid1").exists():
        time.sleep(0.1)
    died = time.monotonic()
    assert process.wait(timeout=60) == 3
    assert time.monotonic() - died < 16
    assert not psutil.pid_exists(int((tmp_path / "pid0").read_text()))


@pytest.mark.distributed
@pytest.mark.parametrize("options", ENGINES)
def test_a_signal_ends_every_rank(launch, tmp_path, options):
    script = "import os, time; open(f\"{os.environ['OUT']}/pid{os.environ['RANK']}\", 'w').write(str(os.getpid())); time.sleep(120)"
    process = launch(script, *options, wait=False)
    while len([p for p in tmp_path.glob("pid*") if p.read_text()]) < 2:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 128 + signal.SIGTERM
    assert not any(psutil.pid_exists(int(p.read_text())) for p in tmp_path.glob("pid*"))


def test_threads_are_shared_out_unless_the_user_has_set_them(launch, tmp_path):
    launch(WRITE_ARGUMENTS, "--world_size", "1")
    assert int(written(tmp_path)[1]["OMP_NUM_THREADS"]) == len(os.sched_getaffinity(0))
    launch(WRITE_ARGUMENTS, "--world_size", "1", OMP_NUM_THREADS="5")
    assert written(tmp_path)[1]["OMP_NUM_THREADS"] == "5"


def test_the_users_visible_devices_are_kept(launch, tmp_path):
    launch(WRITE_ARGUMENTS, "--world_size", "1", CUDA_VISIBLE_DEVICES="1")
    assert written(tmp_path)[1]["CUDA_VISIBLE_DEVICES"] == "1"


@pytest.mark.distributed
def test_the_users_visible_devices_are_kept_under_deepspeed(launch, tmp_path):
    launch(WRITE_ARGUMENTS, "--world_size", "1", "--use_deepspeed", CUDA_VISIBLE_DEVICES="1")
    assert written(tmp_path)[1]["CUDA_VISIBLE_DEVICES"] == "1"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("host1 lots=2\n", "line 1: 'host1 lots=2' is not `hostname slots=N`"),
        ("a slots=2\n\n# more\na slots=2\n", "line 4: 'a slots=2': the host a is named twice"),
        ("a slots=0\n", "line 1: 'a slots=0': slots takes 1 or more"),
        ("a slots=2 extra\n", "line 1: 'a slots=2 extra'"),
        ("# nothing\n", "names no host"),
    ],
)
def test_a_bad_line_of_a_hostfile_is_shown(tmp_path, text, said):
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(InputError, match="hosts") as error:
        read_hostfile(str(tmp_path / "hosts"))
    assert said in str(error.value)


def test_a_hostfile_with_comments_and_what_is_chosen_of_it(tmp_path):
    (tmp_path / "hosts").write_text("# servers\nnode-1.lan slots=2 # first\n\nnode-2.lan slots=4\n")
    hosts = read_hostfile(str(tmp_path / "hosts"))
    assert hosts == {"node-1.lan": [0, 1], "node-2.lan": [0, 1, 2, 3]}
    assert choose(hosts, "node-2.lan:1,3", None, "f") == {"node-2.lan": [1, 3]}
    assert choose(hosts, "node-1.lan", None, "f") == {"node-1.lan": [0, 1]}
    assert choose(hosts, None, 3, "f") == {"node-1.lan": [0, 1], "node-2.lan": [0]}
    for include, said in (
        ("node-1.lan:2,3", "node-1.lan has no slot 2"),
        ("other", "no host 'other'"),
        ("node-1.lan:x", "numbers"),
    ):
        with pytest.raises(InputError, match=said):
            choose(hosts, include, None, "f")
    with pytest.raises(InputError, match="has 6 slots"):
        choose(hosts, None, 7, "f")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--hostfile", "nowhere", "--use_deepspeed", "x.py"], "--hostfile nowhere: No such file"),
        (["--world_size", "2", "nowhere.py"], "nowhere.py: no such script"),
        (["--world_size", "0", "x.py"], "--world_size 0: takes 1 or more"),
        (["--master_port", "70000", "x.py"], "--master_port 70000"),
        (["--hostfile", "x.py", "x.py"], "--use_deepspeed or --use_mpi"),
        (["--include", "a", "x.py"], "--hostfile"),
    ],
)
def test_wrong_options_end_in_one_line(tmp_path, options, said):
    (tmp_path / "x.py").write_text("")
    done = subprocess.run([sys.executable, LAUNCHER, *options], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert said in done.stderr and len(done.stderr.strip().splitlines()) == 1


def command_of(monkeypatch, tmp_path, *options, cards=None, kind="cpu"):
    (tmp_path / "x.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gaudi_spawn, "hpu_installed", lambda: kind == "hpu")
    monkeypatch.setattr(gaudi_spawn, "hpu_cards", lambda: cards or 0)
    monkeypatch.setattr(gaudi_spawn, "cards", lambda which: cards or 0 if which == kind else 0)
    return gaudi_spawn.build(gaudi_spawn.parse([*options, "x.py", "a b"]))


def test_more_ranks_than_cards_are_refused(monkeypatch, tmp_path):
    with pytest.raises(InputError, match="--world_size 9: this server has 8 cards"):
        command_of(monkeypatch, tmp_path, "--world_size", "9", cards=8, kind="hpu")
    monkeypatch.setenv("HABANA_VISIBLE_MODULES", "0,1")
    with pytest.raises(InputError, match="HABANA_VISIBLE_MODULES shows 2 cards"):
        command_of(monkeypatch, tmp_path, "--world_size", "4", cards=8, kind="hpu")
    command, added = command_of(monkeypatch, tmp_path, "--world_size", "2", cards=8, kind="hpu")
    assert "OMP_NUM_THREADS" not in added and command[-2:] == ["x.py", "a b"]


@pytest.mark.parametrize(("banner", "version"), [("mpirun (Open MPI) 4.1.4", 4), ("mpirun (Open MPI) 5.0.3", 5)])
def test_mpirun_is_given_what_its_version_takes(monkeypatch, tmp_path, banner, version):
    binaries = fake(tmp_path / "bin", "mpirun", f"echo '{banner}'")
    monkeypatch.setenv("PATH", f"{binaries}:{os.environ['PATH']}")
    monkeypatch.setattr(gaudi_spawn.os, "cpu_count", lambda: 32)
    command, added = command_of(monkeypatch, tmp_path, "--world_size", "8", "--use_mpi", cards=8, kind="hpu")
    assert command[:3] == ["mpirun", "-n", "8"] and command[-2:] == ["x.py", "a b"]
    assert ("--rank-by" in command) is (version == 4)
    assert ("socket:PE=4" if version == 4 else "package:PE=4") in command
    assert added["MASTER_ADDR"] == "127.0.0.1" and added["MASTER_PORT"].isdigit()
    exported = [command[n + 1] for n, word in enumerate(command) if word == "-x"]
    assert {"MASTER_ADDR", "MASTER_PORT", "RUN_STAMP"} <= set(exported)


def test_another_mpi_is_refused(monkeypatch, tmp_path):
    binaries = fake(tmp_path / "bin", "mpirun", "echo 'HYDRA build details: Version 4.0'")
    monkeypatch.setenv("PATH", f"{binaries}:{os.environ['PATH']}")
    with pytest.raises(InputError, match="not Open MPI"):
        command_of(monkeypatch, tmp_path, "--use_mpi")


def test_dry_run_shows_command_and_environment_and_starts_nothing(launch, tmp_path):
    done = launch(WRITE_ARGUMENTS, "--world_size", "8", "--use_deepspeed", "--dry_run", arguments=["it's"])
    assert done.returncode == 0
    assert "deepspeed.launcher.launch" in done.stdout and "'it'\"'\"'s'" in done.stdout
    assert "RUN_STAMP=" in done.stdout
    assert not list(tmp_path.glob("rank*"))


def test_help_teaches():
    done = subprocess.run([sys.executable, LAUNCHER, "--help"], capture_output=True, text=True)
    assert "+experiment=70b" in done.stdout and "hostname slots=8" in done.stdout
