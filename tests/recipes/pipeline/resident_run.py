"""A program for the tests: a recipe's training, or one evaluation, and its resident memory at its highest, beyond what was there
before the model: resident_run.py FOLDER OVERRIDE... Linux, glibc: the kernel's high-water mark is reset between."""

import ctypes
import gc
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from recipes.pipeline.compose import compose_here
from recipes.pipeline.runtime import start


def status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith(name + ":"))
    return int(line.split()[1]) * 1024


def keep_no_freed_blocks() -> None:
    """glibc keeps freed blocks of up to 32 MiB for itself otherwise, and how many it keeps is chance."""
    library, trim_threshold, mmap_threshold = ctypes.CDLL(None), -1, -3
    library.mallopt(trim_threshold, 0)
    library.mallopt(mmap_threshold, 65536)


def main() -> None:
    keep_no_freed_blocks()
    folder, *overrides = sys.argv[1:]
    cfg = compose_here(overrides)
    runtime = start(cfg)
    from recipes.pipeline import data, model, trainer

    def run(cfg) -> int:
        """Resident bytes before the model."""
        arguments = trainer.training_arguments(cfg, runtime, Path(folder))
        tokenizer = model.load_tokenizer(cfg.model)
        records = data.build_data(cfg, tokenizer, runtime.rank0_first)
        before = status("VmRSS")
        llama = model.build_model(cfg, tokenizer, runtime)
        coach = trainer.build_trainer(cfg, runtime, arguments, llama, tokenizer, records)
        Path("/proc/self/clear_refs").write_text("5")  # loading has a peak of its own
        coach.train() if cfg.train.do_train else coach.evaluate()
        return before

    # What the libraries take once, at their first use, is none of the run's; of DeepSpeed's engines a process makes one
    warm = compose_here([o for o in overrides if not o.lstrip("+").startswith(("model.config.", "deepspeed"))])
    run(warm)
    gc.collect()
    before = run(cfg)
    Path(folder, f"resident-{runtime.rank}").write_text(str(status("VmHWM") - before))
    runtime.leave()


if __name__ == "__main__":
    main()
