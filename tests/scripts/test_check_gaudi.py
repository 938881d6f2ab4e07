"""check_gaudi.py end to end under the double; what it measures on a card, only a card can tell."""

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
DOUBLES = REPOSITORY / "tests" / "doubles"
pytestmark = pytest.mark.slow


@pytest.fixture
def check(tmp_path):
    def run(*arguments: str, double: bool = True, **variables: str):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HABANA_DOUBLE_CARDS": "2", **variables}
        if double:
            path = [str(DOUBLES / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
            environment |= {"PATH": os.pathsep.join(path), "PYTHONPATH": str(DOUBLES)}
        # Each block of memory of its own: the process's size then is that of its tensors
        environment |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
        command = [sys.executable, str(REPOSITORY / "scripts" / "check_gaudi.py"), *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        written = tmp_path / "gaudi_check.json"
        return done, json.loads(written.read_text()) if written.exists() else None

    return run


def test_without_gaudi_it_says_what_is_missing(check):
    done, written = check(double=False)
    assert done.returncode == 2 and written is None
    assert done.stderr.startswith("error: no Gaudi here: habana_frameworks is not installed")
    done, _ = check(HABANA_DOUBLE_CARDS="0")
    assert done.returncode == 2
    assert done.stderr.strip() == (
        "error: no Gaudi here: no card found (neither /dev/accel/accel* nor hl-smi shows one)"
    )


def test_the_checks_of_one_card(check):
    done, written = check("--size", "tiny", "--parts", "versions", "device", "kernels", "memory")
    shipped = metadata.version("torch").startswith("2.10.")  # by the Gaudi release of the double
    assert done.returncode == (0 if shipped else 1), done.stderr
    rows = {row["check"]: row for row in written["rows"]}
    assert [name for name, row in rows.items() if not row["ok"]] == ([] if shipped else ["release and torch"])
    # One tensor, as bench.py has it to the byte; the double's memory is the process's, which moves by a quarter of one
    assert float(rows["in-place residual add saves"]["seen"]) == pytest.approx(1.0, abs=0.3)
    assert len([name for name in rows if name.startswith("Fused")]) == 17
    assert written["versions"]["habana-torch-plugin"] == "1.24.0"
    for row in written["rows"]:
        assert row["expected"] in done.stdout and row["seen"] in done.stdout


def test_graphs_on_torchs_lazy_engine(check):
    done, written = check("--size", "tiny", "--parts", "graphs", HABANA_DOUBLE_DEVICE="lazy")
    assert done.returncode == 0, done.stdout
    assert len(written["rows"]) == 2


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("part", "row"),
    [
        ("modes", "losses of 10 steps, lazy against eager"),
        ("ranks", "losses of 5 ZeRO-3 steps, 2 cards against 1"),
    ],
)
def test_modes_and_ranks(check, part, row):
    done, written = check("--size", "tiny", "--parts", part)
    assert done.returncode == 0, done.stdout
    assert [found["check"] for found in written["rows"]] == [row]


def test_a_part_that_dies_is_a_row_and_not_the_end(check, tmp_path):
    broken = tmp_path / "doubles" / "habana_frameworks" / "torch"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise RuntimeError('driver and software disagree')")
    path = os.pathsep.join([str(DOUBLES / "bin"), os.environ["PATH"]])
    done, written = check(
        "--parts", "device", "versions", double=False, PATH=path, PYTHONPATH=str(tmp_path / "doubles")
    )
    assert done.returncode == 1
    assert "driver and software disagree" in written["rows"][0]["seen"]
    assert written["rows"][-1]["part"] == "cards"
