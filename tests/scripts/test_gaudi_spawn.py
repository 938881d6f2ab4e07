import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from recipes.pipeline.config import InputError
from scripts import commands, gaudi_spawn
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
    "${now:%Y} %n %h",
    "--",
    "--world_size",
    "-h",
    "naïve – 日本\t\\n",
]
WRITE_ARGUMENTS = """
import json, os, sys
out = os.environ["OUT"]
json.dump([sys.argv[1:], {k: os.environ.get(k) for k in ("WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS", "RUN_STAMP",
    "CUDA_VISIBLE_DEVICES", "HABANA_VISIBLE_MODULES", "PT_HPU_X", "HF_TOKEN")}], open(f"{out}/rank{os.environ.get('RANK', '0')}.json", "w"))
"""
ALL_REDUCE = """
import torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
x = torch.tensor(float(dist.get_rank() + 1))
dist.all_reduce(x)
assert x == dist.get_world_size() * (dist.get_world_size() + 1) / 2
dist.barrier()
dist.destroy_process_group()
"""


def hear_the_keyboard():
    """A shell's background job ignores SIGINT, and so would all that it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def launch(tmp_path):
    def start(script: str, *options: str, arguments=(), wait: bool = True, path: str = "", **variables: str):
        file = tmp_path / f"script{len(list(tmp_path.glob('script*')))}.py"
        file.write_text(script)
        environment = {
            k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "DS_ACCELERATOR", "RUN_STAMP")
        }
        environment |= {"OUT": str(tmp_path), **variables}
        if path:
            environment["PATH"] = f"{path}:{environment['PATH']}"
        command = [sys.executable, LAUNCHER, *options, str(file), *arguments]
        process = subprocess.Popen(
            command,
            cwd=tmp_path,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=hear_the_keyboard,
        )
        if not wait:
            return process
        out, err = process.communicate(timeout=120)
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    return start


DIES = """
import os, sys, time
open(f"{os.environ['OUT']}/pid{os.environ['RANK']}", "w").write(str(os.getpid()))
if os.environ["RANK"] == "1":
    time.sleep(1)
    sys.exit(3)
time.sleep(120)
"""
WAITS = DIES.replace("sys.exit(3)", "time.sleep(120)")


def pids_of(folder: Path, ranks: int) -> list[int]:
    files = [folder / f"pid{rank}" for rank in range(ranks)]
    end = time.monotonic() + 90
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < end, "the ranks have not started"
        time.sleep(0.05)
    return [int(file.read_text()) for file in files]


def written(folder: Path, rank: int = 0):
    return json.loads((folder / f"rank{rank}.json").read_text())


def fake(folder: Path, name: str, body: str) -> str:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{body}\n")
    (folder / name).chmod((folder / name).stat().st_mode | stat.S_IEXEC)
    return str(folder)


ENGINES = [["--world_size", "2"], ["--world_size", "2", "--use_deepspeed"]]


@pytest.mark.distributed
@pytest.mark.parametrize("options", ENGINES)
def test_ranks_meet_with_their_arguments_threads_and_visible_devices(launch, tmp_path, options):
    visible = {"CUDA_VISIBLE_DEVICES": "1,0,GPU-7", "HABANA_VISIBLE_MODULES": "2,3"}
    done = launch(WRITE_ARGUMENTS + ALL_REDUCE, *options, arguments=ARGUMENTS, **visible)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        arguments, variables = written(tmp_path, rank)
        assert arguments == ARGUMENTS
        assert variables["WORLD_SIZE"] == "2" and variables["LOCAL_RANK"] == str(rank)
        assert int(variables["OMP_NUM_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // 2)
        assert variables.items() >= visible.items()


def test_one_rank_gets_arguments_byte_for_byte(launch, tmp_path):
    assert launch(WRITE_ARGUMENTS, "--world_size", "1", arguments=ARGUMENTS).returncode == 0
    assert written(tmp_path)[0] == ARGUMENTS


# What ssh does to a command: its words are joined and given to a shell, away from the caller's variables
SSH = """while :; do case $1 in -o) shift 2;; -*) shift;; *) break;; esac; done
host=$1; shift; cd /
exec env -i PATH="$PATH" HOME=/ OUT="$OUT" sh -c "$*"
"""


@pytest.fixture
def two_hosts(tmp_path):
    (tmp_path / "hosts").write_text("# two names of this server\nlocalhost slots=1\n\n127.0.0.1 slots=4\n")
    fake(tmp_path / "bin", "ssh", SSH)
    return {
        "options": ["--hostfile", "hosts", "--include", "localhost@127.0.0.1:3", "--use_deepspeed"],
        "address": ["--master_addr", "127.0.0.1"],
        "path": str(tmp_path / "bin"),
    }


@pytest.mark.distributed
def test_two_hosts_meet_and_get_arguments_and_variables_byte_for_byte(launch, tmp_path, two_hosts):
    path = two_hosts["path"]
    done = launch(
        WRITE_ARGUMENTS + ALL_REDUCE,
        *two_hosts["options"],
        *two_hosts["address"],
        arguments=ARGUMENTS,
        path=path,
        PT_HPU_X="a $HOME 'b'\n%n",
        HF_TOKEN="secret",
        GLOO_SOCKET_IFNAME="lo",
    )
    assert done.returncode == 0, done.stderr
    stamps = set()
    for rank in range(2):
        arguments, variables = written(tmp_path, rank)
        assert arguments == ARGUMENTS
        assert variables["PT_HPU_X"] == "a $HOME 'b'\n%n" and variables["HF_TOKEN"] == "secret"
        assert variables["WORLD_SIZE"] == "2" and variables["LOCAL_RANK"] == "0"
        assert int(variables["OMP_NUM_THREADS"]) == len(os.sched_getaffinity(0))  # one rank on each "server"
        stamps.add(variables["RUN_STAMP"])
    assert len(stamps) == 1 and re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d-[0-9a-f]{4}", stamps.pop())
    assert written(tmp_path, 0)[1]["CUDA_VISIBLE_DEVICES"] is None
    assert written(tmp_path, 1)[1]["CUDA_VISIBLE_DEVICES"] == written(tmp_path, 1)[1]["HABANA_VISIBLE_MODULES"] == "3"


@pytest.mark.distributed
@pytest.mark.parametrize("how", ["rank dies", "launcher is killed"])
def test_a_host_does_not_outlive_the_run(launch, tmp_path, two_hosts, how):
    script = DIES if how == "rank dies" else WAITS
    process = launch(script, *two_hosts["options"], *two_hosts["address"], wait=False, path=two_hosts["path"])
    pids = pids_of(tmp_path, 2)
    if how == "launcher is killed":
        process.kill()
        process.wait(timeout=10)
    else:
        died = time.monotonic()
        err = process.communicate(timeout=60)[1]
        assert process.returncode == 3
        assert time.monotonic() - died < 16
        assert f"rank 1 on {socket.gethostname()} exited with 3" in err
    assert not psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=15)[1]


def test_an_unreachable_host_is_named(launch, tmp_path):
    (tmp_path / "hosts").write_text("far-away slots=2\n")
    path = fake(tmp_path / "bin", "ssh", "exit 255")
    done = launch("", "--hostfile", "hosts", "--use_deepspeed", path=path)
    assert done.returncode == 255
    assert done.stderr == "gaudi_spawn: ssh to far-away exited with 255; the others were ended\n"


@pytest.mark.distributed
def test_two_launches_at_once_both_finish(launch):
    first, second = (launch(ALL_REDUCE, *ENGINES[0], wait=False) for _ in range(2))
    assert first.wait(timeout=100) == second.wait(timeout=100) == 0


@pytest.mark.distributed
@pytest.mark.parametrize("options", ENGINES)
def test_a_dead_rank_is_named_and_ends_the_others(launch, tmp_path, options):
    process = launch(DIES, *options, wait=False)
    pids = pids_of(tmp_path, 2)
    died = time.monotonic()
    err = process.communicate(timeout=60)[1]
    assert process.returncode == 3
    assert time.monotonic() - died < 16
    assert err.splitlines()[-1] == "gaudi_spawn: rank 1 exited with 3; the others were ended"
    assert not any(map(psutil.pid_exists, pids))


@pytest.mark.distributed
def test_a_rank_that_does_not_listen_is_killed_in_time(launch, tmp_path):
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + DIES.replace("sys.exit(3)", "os.abort()")
    process = launch(deaf, *ENGINES[0], wait=False)
    pids = pids_of(tmp_path, 2)
    died = time.monotonic()
    err = process.communicate(timeout=60)[1]
    assert process.returncode == 128 + signal.SIGABRT
    assert time.monotonic() - died < 16
    assert "rank 1 was killed by SIGABRT" in err
    assert not any(map(psutil.pid_exists, pids))


@pytest.mark.distributed
@pytest.mark.parametrize(("options", "number"), [(ENGINES[0], signal.SIGINT), (ENGINES[1], signal.SIGTERM)])
def test_a_signal_ends_every_rank(launch, tmp_path, options, number):
    process = launch(WAITS, *options, wait=False)
    pids = pids_of(tmp_path, 2)
    process.send_signal(number)
    err = process.communicate(timeout=30)[1]
    assert process.returncode == 128 + number
    assert err.splitlines()[-1] == f"gaudi_spawn: stopped by {number.name}; every rank was ended"
    assert not any(map(psutil.pid_exists, pids))


def test_one_rank_hears_the_keyboard_itself_and_its_children_go_with_it(launch, tmp_path):
    script = """
import os, subprocess, sys, time
child = subprocess.Popen(["sleep", "120"], start_new_session=True)
open(f"{os.environ['OUT']}/pid0", "w").write(str(child.pid))
try:
    time.sleep(120)
except KeyboardInterrupt:
    sys.exit("goodbye")
"""
    process = launch(script, "--world_size", "1", wait=False)
    (child,) = pids_of(tmp_path, 1)
    process.send_signal(signal.SIGINT)
    assert "goodbye" in process.communicate(timeout=30)[1]
    assert process.returncode == 128 + signal.SIGINT
    assert not psutil.pid_exists(child)


def test_a_single_scripts_exit_status_is_returned_without_a_word(launch):
    done = launch("import sys; sys.exit(7)", "--world_size", "1")
    assert (done.returncode, done.stderr) == (7, "")


@pytest.mark.distributed
def test_hydra_gets_no_argument_of_the_launchers(launch):
    script = """
import hydra
@hydra.main(version_base="1.3", config_path=None, config_name=None)
def main(cfg):
    assert cfg == {"a": "it's x=1"}, cfg
main()
"""
    options = ["--world_size", "1", "--use_deepspeed"]  # the launcher that has --local_rank=0 to give
    done = launch(script, *options, arguments=["+a='it\\'s x=1'", "hydra.output_subdir=null"])
    assert done.returncode == 0, done.stderr


def test_the_users_threads_and_visible_devices_are_kept(launch, tmp_path):
    launch(WRITE_ARGUMENTS, "--world_size", "1", OMP_NUM_THREADS="5", CUDA_VISIBLE_DEVICES="1", RUN_STAMP="mine")
    variables = written(tmp_path)[1]
    assert (variables["OMP_NUM_THREADS"], variables["CUDA_VISIBLE_DEVICES"], variables["RUN_STAMP"]) == (
        "5",
        "1",
        "mine",
    )


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
    assert choose(hosts, "node-2.lan:3@node-1.lan@node-2.lan:0,3", None, "f") == {
        "node-1.lan": [0, 1],
        "node-2.lan": [0, 3],
    }
    assert next(iter(choose(hosts, "node-2.lan@node-1.lan", None, "f"))) == "node-1.lan"
    for include, said in (
        ("", "no host ''"),
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
        (["--world_size", "two", "x.py"], "invalid int value: 'two'"),
        (["--world_sise", "2", "x.py"], "--world_sise"),
        (["--use_mpi", "--use_deepspeed", "x.py"], "not allowed with"),
        (["--world_size", "2"], "script"),
        (["--hostfile", "local", "--use_deepspeed", "x.py"], "localhost is another server to every host"),
        (["--hostfile", "local", "--use_mpi", "--include", "other:1", "x.py"], "mpirun takes whole hosts"),
    ],
)
def test_wrong_options_end_in_one_line(tmp_path, options, said):
    (tmp_path / "x.py").write_text("")
    (tmp_path / "local").write_text("localhost slots=2\nother slots=2\n")
    done = subprocess.run([sys.executable, LAUNCHER, *options], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert said in done.stderr and len(done.stderr.strip().splitlines()) == 1


def started(monkeypatch, tmp_path, *options, cards=0, kind="cpu"):
    (tmp_path / "x.py").write_text("")
    monkeypatch.chdir(tmp_path)
    for name in ("OMP_NUM_THREADS", "DS_ACCELERATOR", "RUN_STAMP"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(gaudi_spawn, "hpu_installed", lambda: kind == "hpu")
    monkeypatch.setattr(gaudi_spawn, "hpu_cards", lambda: cards)
    monkeypatch.setattr(gaudi_spawn, "cards", lambda which: cards if which == kind else 0)
    starts, added = gaudi_spawn.build(gaudi_spawn.parse([*options, "x.py", "a b"]))
    return starts[0].command, added


def test_more_ranks_than_cards_are_refused(monkeypatch, tmp_path):
    with pytest.raises(InputError, match="--world_size 9: this server has 8 cards"):
        started(monkeypatch, tmp_path, "--world_size", "9", cards=8, kind="hpu")
    command, _ = started(monkeypatch, tmp_path, "--world_size", "8", cards=8, kind="hpu")
    assert "--nproc_per_node=8" in command and command[-2:] == ["x.py", "a b"]
    monkeypatch.setenv("HABANA_VISIBLE_MODULES", "0,1")
    with pytest.raises(InputError, match="HABANA_VISIBLE_MODULES shows 2 cards"):
        started(monkeypatch, tmp_path, "--world_size", "4", cards=8, kind="hpu")


def test_more_ranks_than_cores_are_a_warning_on_a_cpu(monkeypatch, tmp_path, capsys):
    _, added = started(monkeypatch, tmp_path, "--world_size", "4000")
    assert "4000 ranks" in capsys.readouterr().err
    assert added["OMP_NUM_THREADS"] == "1" and added["DS_ACCELERATOR"] == "cpu"


@pytest.mark.parametrize(("banner", "version"), [("mpirun (Open MPI) 4.1.4", 4), ("mpirun (Open MPI) 5.0.3", 5)])
@pytest.mark.parametrize(
    ("ranks", "sockets", "each"),
    [(8, [16, 16], 4), (3, [10, 10], 5), (1, [2], 2), (2, [2], 1), (4, [2], 0)],  # two of three ranks share a socket
)
def test_mpirun_is_given_what_its_version_takes(monkeypatch, tmp_path, banner, version, ranks, sockets, each):
    binaries = fake(tmp_path / "bin", "mpirun", f"echo '{banner}'")
    monkeypatch.setenv("PATH", f"{binaries}:{os.environ['PATH']}")
    monkeypatch.setenv("PT_HPU_LAZY_MODE", "1")
    monkeypatch.setattr(commands, "cores_by_socket", lambda: sockets)
    command, added = started(monkeypatch, tmp_path, "--world_size", str(ranks), "--use_mpi")
    assert command[:3] == ["mpirun", "-n", str(ranks)]
    assert command[-4:] == [sys.executable, "-u", "x.py", "a b"]
    assert {"--report-bindings", "--allow-run-as-root"} <= set(command)
    mapping = command[command.index("--map-by") + 1]
    if each:
        assert mapping == f"{'socket' if version == 4 else 'package'}:PE={each}"
        assert ("--rank-by" in command) is (version == 4)
    else:
        assert mapping == "slot:OVERSUBSCRIBE" and "none" in command
    assert added["MASTER_ADDR"] == "127.0.0.1" and added["MASTER_PORT"].isdigit()
    exported = {command[n + 1] for n, word in enumerate(command) if word == "-x"}
    assert {"MASTER_ADDR", "MASTER_PORT", "RUN_STAMP", "OMP_NUM_THREADS", "PT_HPU_LAZY_MODE"} <= exported


def test_mpirun_over_hosts_gets_the_chosen_ones(monkeypatch, tmp_path):
    binaries = fake(tmp_path / "bin", "mpirun", "echo 'mpirun (Open MPI) 4.1.4'")
    monkeypatch.setenv("PATH", f"{binaries}:{os.environ['PATH']}")
    monkeypatch.setattr(commands, "cores_by_socket", lambda: [8, 8])
    (tmp_path / "hosts").write_text("a slots=8\nb slots=8\nc slots=8\n")
    options = ["--hostfile", "hosts", "--include", "b@c", "--use_mpi"]
    command, added = started(monkeypatch, tmp_path, *options)
    assert command[:3] == ["mpirun", "-n", "16"] and command[command.index("--host") + 1] == "b:8,c:8"
    assert "socket:PE=2" in command and added["MASTER_ADDR"] == "b"
    assert added["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 8))


def test_mpi_receives_arguments_byte_for_byte(launch, tmp_path):
    # stands in for mpirun: drops its own options, runs the command once, as rank 0
    body = (
        'test "$1" = --version && { echo "mpirun (Open MPI) 4.1.4"; exit; }\n'
        f'while [ "$1" != "{sys.executable}" ]; do shift; done; exec "$@"'
    )
    done = launch(WRITE_ARGUMENTS, "--use_mpi", arguments=ARGUMENTS, path=fake(tmp_path / "bin", "mpirun", body))
    assert done.returncode == 0, done.stderr
    assert written(tmp_path)[0] == ARGUMENTS


def test_another_mpi_is_refused(monkeypatch, tmp_path):
    binaries = fake(tmp_path / "bin", "mpirun", "echo 'HYDRA build details: Version 4.0'")
    monkeypatch.setenv("PATH", f"{binaries}:{os.environ['PATH']}")
    with pytest.raises(InputError, match="not Open MPI"):
        started(monkeypatch, tmp_path, "--use_mpi")


def test_dry_run_shows_command_and_environment_and_starts_nothing(launch, tmp_path):
    done = launch(WRITE_ARGUMENTS, "--world_size", "8", "--use_deepspeed", "--dry_run", arguments=["it's"])
    assert done.returncode == 0
    assert "deepspeed_ranks.py" in done.stdout and "'it'\"'\"'s'" in done.stdout
    assert "RUN_STAMP=" in done.stdout
    assert not list(tmp_path.glob("rank*"))


def test_help_teaches():
    done = subprocess.run([sys.executable, LAUNCHER, "--help"], capture_output=True, text=True)
    assert "+experiment=70b" in done.stdout and "hostname slots=8" in done.stdout
