import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


def run(script: str, *arguments: str):
    command = [sys.executable, str(REPOSITORY / "scripts" / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=REPOSITORY)


@pytest.mark.slow
def test_graphs_counts_what_the_configuration_says():
    with_breaks, without = (
        run("graphs.py", "+experiment=tiny", f"runtime.mark_step={on}").stdout for on in ("true", "false")
    )
    found = [dict(re.findall(r"^(\w+) +\d+ +(\d+) ", text, flags=re.M)) for text in (with_breaks, without)]
    assert found[0] == {"training": "3", "evaluation": "2", "decoding": "2"}
    assert found[1] == {"training": "2", "evaluation": "1", "decoding": "1"}  # the loop's own are left
    for line in with_breaks.splitlines():
        if line.startswith(("training", "evaluation", "decoding")):
            assert line.endswith("0, 0, 0")  # nothing is compiled after two steps


def test_graphs_names_a_wrong_option():
    done = run("graphs.py", "+experiment=tinny")
    assert done.returncode == 2 and "did you mean tiny" in done.stderr


@pytest.mark.benchmark
def test_bench_prints_the_table():
    done = run("bench.py", "--pairs", "3")
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines()[2:]]
    ratios = {row[0]: float(row[3]) for row in cells if row[3]}
    assert ratios["training: peak above weights, MiB"] <= 0.65
    assert next(ratio for name, ratio in ratios.items() if "step time" in name) <= 1.0
