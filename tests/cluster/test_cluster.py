"""The batch script and the manifest are well formed, and what they start exists and is understood."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
SLURM = REPOSITORY / "cluster" / "slurm.sh"
MANIFEST = REPOSITORY / "cluster" / "mpijob.yaml"
SHELL = [SLURM, REPOSITORY / ".ci" / "run", REPOSITORY / "tests" / "doubles" / "bin" / "hl-smi"]


@pytest.mark.parametrize("path", SHELL, ids=lambda path: path.name)
def test_shell_scripts_parse_and_shellcheck_has_nothing_to_say(path):
    for command in (["bash", "-n"], [str(Path(sys.executable).parent / "shellcheck")]):
        done = subprocess.run([*command, str(path)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("nodes", "wanted"), [(1, "--world_size 8 --use_deepspeed"), (2, "--hostfile")])
def test_slurm_starts_every_server_of_the_allocation(tmp_path, nodes, wanted):
    """The batch script as Slurm would run it, with a `python` that writes down what it is asked for."""
    (tmp_path / "bin").mkdir()
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    programs = {
        tmp_path / "bin" / "scontrol": f'test "$*" = "show hostnames gaudi[1-{nodes}]" && seq -f gaudi%g {nodes}',
        tmp_path / ".venv" / "bin" / "python": 'echo "$@" >command; test -f "$3" && cat "$3" >hosts; exit 3',
    }
    for path, text in programs.items():
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    variables = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_NODELIST": f"gaudi[1-{nodes}]"}
    environment = {**os.environ, **variables, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", str(SLURM), "+experiment=7b"], env=environment, capture_output=True, text=True)
    assert done.returncode == 3, done.stderr  # the run's own exit status
    command = (tmp_path / "command").read_text().strip()
    assert command.startswith("scripts/gaudi_spawn.py") and command.endswith("recipes/lora.py +experiment=7b")
    assert wanted in command
    if nodes > 1:
        assert (tmp_path / "hosts").read_text() == "gaudi1 slots=8\ngaudi2 slots=8\n"
    assert not list(tmp_path.glob("hosts.*"))


def test_slurms_defaults_are_understood(tmp_path):
    text = SLURM.read_text(encoding="utf-8")
    assert re.search(r"^#SBATCH --nodes=1$", text, re.MULTILINE)
    spawn = [str(REPOSITORY / "scripts/gaudi_spawn.py"), "--dry_run"]
    for experiment in re.findall(r"\+experiment=(\w+)", text):
        command = [*spawn, "--world_size", "8", "--use_deepspeed", str(REPOSITORY / "recipes/lora.py")]
        command += [f"+experiment={experiment}"]
        done = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def job():
    return yaml.safe_load(MANIFEST.read_text(encoding="utf-8"))


@pytest.mark.parametrize("kind", ["Launcher", "Worker"])
def test_pods_are_valid_kubernetes(job, kind):
    spec = job["spec"]["mpiReplicaSpecs"][kind]["template"]["spec"]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": kind.lower()}, "spec": spec}
    kubernetes_validate.validate(pod, "1.30", strict=True)


def test_the_job_asks_for_as_many_cards_as_it_starts_ranks(job):
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    specs = job["spec"]["mpiReplicaSpecs"]
    worker = specs["Worker"]["template"]["spec"]["containers"][0]
    cards = specs["Worker"]["replicas"] * worker["resources"]["limits"]["habana.ai/gaudi"]
    launcher = specs["Launcher"]["template"]["spec"]["containers"][0]
    words = shlex.split(launcher["args"][0])
    assert int(words[words.index("-np") + 1]) == cards == job["spec"]["slotsPerWorker"] * specs["Worker"]["replicas"]
    assert f"runtime.cards={cards}" in words
    environment = {item["name"]: item["value"] for item in launcher["env"]}
    for name in [words[n + 1] for n, word in enumerate(words) if word == "-x"]:
        assert name in environment or f"{name}=" in launcher["args"][0], name
    # Lazy mode is said in conf; what the job exports must be what the recipe would set
    assert environment["PT_HPU_LAZY_MODE"] == "1"


def test_the_jobs_recipe_is_understood(job, tmp_path, warm):
    text = job["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]["args"][0]
    words = shlex.split(text[text.index("recipes/lora.py") :])
    environment = {"PT_HPU_LAZY_MODE": "1", "PT_HPU_MAX_COMPOUND_OP_SIZE": "10"}
    done = warm(*words[:-1], "dry_run=true", cwd=tmp_path, **environment)
    assert done.returncode == 0, done.stderr
    assert "16" in done.stdout
