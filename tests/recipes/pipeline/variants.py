"""Program of test_gaudi.py: the stages of recipes/lora.py for several configurations, one after another in one process.

python variants.py FOLDER CASES.json: for each case {name: [overrides]} it writes FOLDER/name.json (losses, gradient norms,
evaluation, graph breaks a step, what the double heard) and FOLDER/name.safetensors (the adapter). The first case's device and
mode are those of the process.
"""

import json
import sys
from pathlib import Path

from recipes.pipeline.compose import compose_here
from recipes.pipeline.runtime import start


def main(folder: Path, cases: dict[str, list[str]]) -> None:
    configurations = {name: compose_here(overrides) for name, overrides in cases.items()}
    runtime = start(next(iter(configurations.values())))
    for name, cfg in configurations.items():
        found = one(cfg, runtime, folder / name)
        (folder / f"{name}.json").write_text(json.dumps(found), encoding="utf-8")


def one(cfg, runtime, folder: Path) -> dict:
    from transformers import TrainerCallback

    from recipes.pipeline import data, model, trainer

    arguments = trainer.training_arguments(cfg, runtime, folder)
    tokenizer = model.load_tokenizer(cfg.model)
    records = data.build_data(cfg, tokenizer, runtime.rank0_first)
    llama = model.build_model(cfg, tokenizer, runtime)
    coach = trainer.build_trainer(cfg, runtime, arguments, llama, tokenizer, records)
    heard, steps, compiled = counts(), [], []

    class Counter(TrainerCallback):
        def on_step_begin(self, *unused, **others):
            self.before = counts().get("mark_step", 0)

        def on_step_end(self, *unused, **others):
            steps.append(counts().get("mark_step", 0) - self.before)
            compiled.append(compilations())

    coach.add_callback(Counter())
    before = counts()
    results = trainer.run(cfg, runtime, coach)
    after_training = counts()
    again = coach.evaluate()
    evaluation = {key: value - after_training.get(key, 0) for key, value in counts().items()}
    folder.with_suffix(".safetensors").write_bytes((folder / "adapter/adapter_model.safetensors").read_bytes())
    logs = [line for line in coach.state.log_history if "loss" in line]
    return {
        "trainer": [base.__name__ for base in type(coach).__mro__],
        "generation_config": type(llama.generation_config).__name__,
        "losses": [line["loss"] for line in logs],
        "grad_norms": [float(line["grad_norm"]) if "grad_norm" in line else None for line in logs],
        "learning_rates": [line["learning_rate"] for line in logs],
        "memory_keys": sorted(key for key in logs[-1] if "memory" in key),
        "results": results,
        "eval_again": again["eval_loss"],
        "marks": steps,
        "compiled": compiled,
        "evaluation": evaluation,
        "heard": {key: value - before.get(key, heard.get(key, 0)) for key, value in after_training.items()},
        "optimizer": type(coach.optimizer).__mro__[0].__name__,
    }


def counts() -> dict[str, int]:
    double = sys.modules.get("habana_double")
    return dict(double.calls) if double else {}


def compilations() -> int:
    import torch._lazy.metrics as metrics

    return metrics.counter_value("UncachedCompile") if "UncachedCompile" in metrics.counter_names() else 0


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text(encoding="utf-8")))
