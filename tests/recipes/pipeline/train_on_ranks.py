"""Run by the tests under a launcher: the stages of recipes/lora.py for several configurations, one after another.

train_on_ranks.py FOLDER CASES.json: for each case {name: [overrides]} each rank writes FOLDER/name.RANK.json. A process start
is most of what such a run costs. The first case's device is that of the process.
"""

import hashlib
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from recipes.pipeline.compose import compose_here
from recipes.pipeline.runtime import start


def main(folder: Path, cases: dict[str, list[str]]) -> None:
    configurations = {name: compose_here(overrides) for name, overrides in cases.items()}
    runtime = start(next(cfg for cfg in configurations.values() if cfg.deepspeed))
    for name, cfg in configurations.items():
        found = one(cfg, runtime, folder / name)
        (folder / f"{name}.{runtime.rank}.json").write_text(json.dumps(found), encoding="utf-8")
    runtime.leave()


def one(cfg, runtime, folder: Path) -> dict:
    from recipes.pipeline import data, model, trainer

    arguments = trainer.training_arguments(cfg, runtime, folder)
    tokenizer = model.load_tokenizer(cfg.model)
    records = data.build_data(cfg, tokenizer, runtime.rank0_first)
    llama = model.build_model(cfg, tokenizer, runtime)
    begun = digest(p for p in llama.parameters() if p.requires_grad)  # before an engine makes the ranks equal
    coach = trainer.build_trainer(cfg, runtime, arguments, llama, tokenizer, records)
    seen, batches = [], coach.get_batch_samples

    def watched(*given):
        found = batches(*given)
        seen.extend(digest([batch["input_ids"]]) for batch in found[0])
        return found

    coach.get_batch_samples = watched
    results = trainer.run(cfg, runtime, coach)
    logs = [line for line in coach.state.log_history if "loss" in line]
    series = {key: [line[key] for line in logs if key in line] for key in ("loss", "learning_rate", "grad_norm")}
    return {**series, "eval_loss": results["eval_loss"], "adapter": begun, "batches": seen}


def digest(tensors) -> str:
    """Of the whole values, also where ZeRO-3 has cut them."""
    from deepspeed.runtime.zero import GatheredParameters

    tensors = list(tensors)
    with GatheredParameters([t for t in tensors if hasattr(t, "ds_id")]):
        values = b"".join(t.detach().cpu().numpy().tobytes() for t in tensors)
    return hashlib.sha256(values).hexdigest()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text(encoding="utf-8")))
