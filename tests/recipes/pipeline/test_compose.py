import re
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.pipeline import compose as module

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("train.max_stepz=3", "train.max_stepz: unknown key; did you mean train.max_steps"),
        ("tran.max_steps=3", "tran: unknown key; did you mean train?"),
        ("+train.foo=1", "train.foo: unknown key"),
        ("data.columns.instruktion=q", "did you mean data.columns.instruction"),
        ("train.max_steps=abc", "train.max_steps: 'abc' is not a whole number"),
        ("train.learning_rate=fast", "train.learning_rate: 'fast' is not a number"),
        ("model.dtype=fp8", "model.dtype: 'fp8' is not one of its values; there is float32, bfloat16"),
        ("model.dtype=1", "model.dtype: '1' is not one of its values"),
        ("data.batching=pakced", "did you mean packed"),
        ("runtime.lazy=maybe", "runtime.lazy: 'maybe' is not true or false"),
        ("adapter.target_modules=q_proj", "adapter.target_modules: takes a list: adapter.target_modules=[a,b]"),
        ("train=3", "train: is a group of keys"),
        ("+experiment=smok", "experiment=smok: no such file in conf/experiment; did you mean smoke"),
        ("model=nope", "model=nope: no such file in conf/model"),
        ("experiment=smoke", "+experiment=NAME"),
        ("data.path=a,b", "quote a value"),
        ("data.path=a=b", "quote a value"),
        ("hydra.run.dir=/proc/nothing/here", "hydra.run.dir: cannot make /proc/nothing"),
    ],
)
def test_one_line_for_each_wrong_argument(run_recipe, tmp_path, argument, said):
    done = run_recipe(argument)
    assert done.returncode == 2
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), done.stderr
    assert said in lines[0]
    assert not list(tmp_path.rglob("*.json*"))


def test_a_key_in_an_experiment_file_is_named_with_its_file(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\ntrain:\n  max_stepz: 3\n")
    command = [sys.executable, REPOSITORY / "recipes/lora.py", "--config-dir", tmp_path, "+experiment=mine"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == (
        "error: conf/experiment/mine.yaml: train.max_stepz: unknown key;"
        " did you mean train.max_steps or train.save_steps or train.eval_steps?\n"
    )


def test_a_launchers_rank_argument_is_understood(run_recipe):
    done = run_recipe("--local_rank=0", "+experiment=tiny", "dry_run=true")
    assert done.returncode == 0, done.stderr
    assert "1 rank(s)" in done.stdout


def test_run_folders_of_one_second_differ(monkeypatch):
    monkeypatch.delenv("RUN_STAMP", raising=False)
    monkeypatch.setattr(module.time, "strftime", lambda *_: "2026-01-01_00-00-00")
    stamps = {module._run_stamp() for _ in range(20)}
    assert len(stamps) > 10


def test_ranks_of_one_parent_share_a_folder(monkeypatch):
    monkeypatch.delenv("RUN_STAMP", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert module._run_stamp() == module._run_stamp()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d-[0-9a-f]{4}", module._run_stamp())


def test_the_launchers_stamp_is_taken(monkeypatch):
    monkeypatch.setenv("RUN_STAMP", "mine")
    assert module._run_stamp() == "mine"


def test_open_mpis_ranks_are_taken(monkeypatch):
    for name in module.RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    monkeypatch.setattr(sys, "argv", ["lora.py"])
    module._take_launcher_arguments()
    import os

    assert os.environ.pop("RANK") == "3"


def test_the_written_configuration_runs_again(compose, run_recipe, tmp_path):
    (tmp_path / "config.yaml").write_text(module.to_yaml(compose("+experiment=70b")))
    again = run_recipe("--config-path", str(tmp_path), "--config-name", "config", "dry_run=true")
    first = run_recipe("+experiment=70b", "dry_run=true")
    assert again.returncode == 0, again.stderr
    for one, other in zip(again.stdout.splitlines(), first.stdout.splitlines(), strict=True):
        assert one == other or one.startswith("command")
    wrong = run_recipe("--config-path", str(tmp_path), "--config-name", "config", "+train.max_stepz=1")
    assert (wrong.returncode, wrong.stdout) == (2, "") and "train.max_stepz" in wrong.stderr
