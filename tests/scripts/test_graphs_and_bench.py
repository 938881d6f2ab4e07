import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


def run(python: str, script: str, *arguments: str, timeout: float = 300):
    command = [python, str(REPOSITORY / "scripts" / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=REPOSITORY)


@pytest.mark.slow
def test_graphs_counts_what_the_configuration_says(warm_python):
    with_breaks, without = (
        run(warm_python, "graphs.py", "+experiment=tiny", f"runtime.mark_step={on}").stdout for on in ("true", "false")
    )
    found = [dict(re.findall(r"^(\w+) +\d+ +(\d+) ", text, flags=re.M)) for text in (with_breaks, without)]
    assert found[0] == {"training": "3", "evaluation": "2", "decoding": "2"}
    assert found[1] == {"training": "2", "evaluation": "1", "decoding": "1"}  # the loop's own are left
    for line in with_breaks.splitlines():
        if line.startswith(("training", "evaluation", "decoding")):
            assert line.endswith("0, 0, 0")  # nothing is compiled after two steps


def test_graphs_names_a_wrong_option(warm_python):
    done = run(warm_python, "graphs.py", "+experiment=tinny")
    assert done.returncode == 2 and "did you mean tiny" in done.stderr


def cells(text: str) -> list[list[str]]:
    """Rows of a Markdown table, without its head."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")][2:]


@pytest.mark.benchmark
def test_bench_prints_the_table():
    done = run(sys.executable, "bench.py", "--pairs", "3")
    ratios = {row[0]: float(row[3]) for row in cells(done.stdout) if row[3]}
    assert ratios["training: peak above weights, MiB"] <= 0.65
    assert next(ratio for name, ratio in ratios.items() if "step time" in name) <= 1.0


@pytest.mark.benchmark
def test_generation_is_faster_than_transformers_own_with_the_same_ids():
    done = run(sys.executable, "bench_generate.py", "--pairs", "3", timeout=1800)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = {row[0].split(" (")[0]: row for row in cells(done.stdout)}
    for batch, least in ((1, 1.5), (16, 1.2)):
        assert "ids equal" in rows[f"decode, batch {batch}"][0]
        assert float(rows[f"decode, batch {batch}"][3]) >= least
        assert float(rows[f"prefill, batch {batch}"][3]) >= 1.0
    assert float(rows["peak resident memory, batch 16, GiB"][3]) <= 1.01  # of two processes


@pytest.mark.benchmark
@pytest.mark.parametrize(
    ("arguments", "seconds"),
    [
        (["+experiment=70b"], 60),
        (["+experiment=70b_generate", "--quick"], 10),
        (["+experiment=70b_generate_no_flash", "--quick"], 10),
    ],
)
def test_a_plan_is_quick(arguments, seconds):
    """On two cores with nothing beside it; --quick leaves out what each option would change and the largest batch."""
    took = []
    for _ in range(3):
        start = time.monotonic()
        done = run(sys.executable, "plan.py", *arguments)
        took.append(time.monotonic() - start)
        assert done.returncode == 0 and ("largest on Gaudi2" in done.stdout) is ("--quick" not in arguments)
    assert min(took) < seconds, took
