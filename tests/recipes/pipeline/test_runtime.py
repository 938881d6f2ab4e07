import gc
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from recipes.pipeline.config import InputError
from recipes.pipeline.runtime import Runtime, environment, start

REPOSITORY = Path(__file__).resolve().parents[3]


def test_cpu_is_found_and_eager(compose):
    runtime = start(compose(), connect=False)
    assert (runtime.kind, runtime.lazy, runtime.backend, runtime.world_size) == ("cpu", False, "gloo", 1)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["runtime=cpu", "runtime.lazy=true"], "not lazy"),
        (["runtime.device=lazy", "runtime.lazy=false"], "always lazy"),
    ],
)
def test_contradictions_of_device_and_mode(compose, overrides, said):
    with pytest.raises(InputError, match=said):
        start(compose(*overrides), connect=False)


def test_lazy_mode_is_said_once_and_derived(compose):
    assert environment(compose("runtime=gaudi_lazy"), "hpu", lazy=True)["PT_HPU_LAZY_MODE"] == "1"
    assert environment(compose("runtime=gaudi_eager"), "hpu", lazy=False)["PT_HPU_LAZY_MODE"] == "0"
    assert "PT_HPU_LAZY_MODE" not in environment(compose(), "cpu", lazy=False)


def test_an_exported_variable_must_agree(compose, monkeypatch):
    monkeypatch.setenv("PT_HPU_LAZY_MODE", "0")
    with pytest.raises(InputError, match=r"PT_HPU_LAZY_MODE=0 in the environment, but runtime\.lazy needs 1"):
        environment(compose("runtime=gaudi_lazy"), "hpu", lazy=True)
    monkeypatch.setenv("PT_HPU_LAZY_MODE", "1")
    environment(compose("runtime=gaudi_lazy"), "hpu", lazy=True)


def test_memory_is_the_process_in_gib():
    import torch

    runtime = Runtime("cpu", lazy=False)
    gc.collect()  # other tests' models; one that goes between the two readings would hide the block
    before = runtime.memory()
    assert set(before) == {"memory_allocated (GB)", "max_memory_allocated (GB)", "total_memory_available (GB)"}
    block = torch.ones(64 * 2**20)  # 0.25 GiB
    after = runtime.memory()
    assert after["memory_allocated (GB)"] - before["memory_allocated (GB)"] == pytest.approx(0.25, abs=0.03)
    assert after["total_memory_available (GB)"] == pytest.approx(psutil.virtual_memory().total / 1024**3, abs=0.01)
    del block


def test_nothing_imports_torch_before_the_environment_is_set():
    # Gaudi's bridge, and in eager mode `import torch` itself, reads PT_HPU_* once
    code = (
        "import sys; import recipes.pipeline.runtime, recipes.pipeline.compose, recipes.pipeline.preflight, recipes.lora;"
        "print([m for m in ('torch', 'transformers', 'habana_frameworks') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_ranks_without_a_rendezvous_are_told_of_the_launcher(run_recipe):
    clean = {k: "" for k in ("MASTER_ADDR", "MASTER_PORT") if k in os.environ}
    done = run_recipe("+experiment=tiny", WORLD_SIZE="2", RANK="0", RUN_STAMP="x", **clean)
    assert done.returncode == 2
    assert "scripts/gaudi_spawn.py" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_torchs_lazy_engine_defers_and_runs():
    code = (
        "import torch; from recipes.pipeline.runtime import Runtime, start_lazy_engine; start_lazy_engine(); start_lazy_engine();"
        "import torch._lazy.metrics as m; r = Runtime('lazy', lazy=True); x = torch.ones(2, device=r.device) + 1; m.reset();"
        "r.mark_step(); print(m.counter_value('MarkStep'), x.cpu().tolist()); r.synchronize()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.stdout.strip() == "1 [2.0, 2.0]", done.stderr
