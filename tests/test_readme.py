"""The commands of the README and of --help work, and what the README names exists."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from recipes.pipeline.compose import compose_here
from recipes.pipeline.options import USAGE
from scripts import arms, parity, results

REPOSITORY = Path(__file__).resolve().parents[1]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
BLOCKS = [line for block in re.findall(r"```bash\n(.*?)```", README, flags=re.S) for line in block.splitlines() if line]
TAUGHT = [line for text in USAGE.values() for line in re.findall(r"^  (python .+?)(?:  .*)?$", text, re.MULTILINE)]
COMMANDS = sorted({*BLOCKS, *re.findall(r"`(python [^`]+)`", README), *TAUGHT})


def run(words, cwd):
    return subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("python")])
def test_every_command_is_understood(command, tmp_path, warm):
    words = [str(REPOSITORY / w) if w.endswith(".py") else w for w in shlex.split(command)[1:]]
    script = Path(words[0]).name
    if script in ("bench.py", "bench_generate.py", "check_gaudi.py", "merge.py"):
        words.append("--help")
    elif script == "plan.py" and "--quick" not in words and "--measured" not in words:
        words.append("--quick")
    elif script == "gaudi_spawn.py":
        words.insert(1, "--dry_run")
    elif script in ("lora.py", "generate.py") and "--help" not in words:
        words.append("dry_run=true")
    elif script == "parity.py":
        return _parity_is_understood(words[1:])
    done = warm(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    if script == "gaudi_spawn.py":  # and what it would start is a configuration; plans of all: tests/conf
        start = next(n for n, word in enumerate(words) if "/recipes/" in word)
        assert compose_here(words[start + 1 :], Path(words[start]).stem)


def _parity_is_understood(words):
    options = parity.parse(words)
    if options.ab or options.arms or options.stock:
        assert all(compose_here([*arm, *options.arguments]) for arm in arms._arms(options))
    else:
        assert len(options.arguments) == 1 and (options.record or options.baseline)
        assert options.baseline is None or options.baseline in results.baselines()


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("make")])
def test_make_knows_its_targets(command):
    assert run([*shlex.split(command), "-n"], REPOSITORY).returncode == 0


def test_every_command_is_of_a_kind_that_is_tested():
    assert all(command.startswith(("python ", "make ")) for command in COMMANDS) and len(COMMANDS) >= 12


def test_named_files_and_pictures_exist():
    for name in re.findall(r"\]\(([^)]+)\)", README) + re.findall(
        r"`((?:conf|recipes|scripts|modeling)/[\w./]+)`", README
    ):
        assert (REPOSITORY / name).exists(), name


def test_every_experiment_is_in_the_table():
    for path in (REPOSITORY / "conf" / "experiment").glob("*.yaml"):
        assert f"| {path.stem} |" in README
