"""LoRA training and evaluation of Llama.   python recipes/lora.py +experiment=smoke

Options: conf/lora.yaml and recipes/pipeline/config.py; `--help` lists them, `dry_run=true` shows the plan and stops.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone without an installation

from recipes.pipeline.compose import recipe, run_folder
from recipes.pipeline.config import LoraRecipe
from recipes.pipeline.preflight import dry_run, preflight
from recipes.pipeline.runtime import start


@recipe("lora")
def main(cfg: LoraRecipe) -> None:
    if cfg.dry_run:
        return dry_run(cfg)
    preflight(cfg)
    runtime = start(cfg)  # sets the environment: what imports torch comes after it
    from recipes.pipeline import data, memory_plan, model, report, samples, trainer

    folder = run_folder()
    report.open_run_folder(cfg, runtime, folder)
    checkpoint = trainer.find_checkpoint(cfg, runtime, folder)
    arguments = trainer.training_arguments(cfg, runtime, folder)  # before the model: registers ZeRO-3, patches on HPU
    memory_plan.warn(cfg, runtime)
    tokenizer = model.load_tokenizer(cfg.model)
    records = data.build_data(cfg, tokenizer, runtime.rank0_first)
    llama = model.build_model(cfg, tokenizer, runtime)
    report.introduce(runtime, folder, records, tokenizer, llama)
    coach = trainer.build_trainer(cfg, runtime, arguments, llama, tokenizer, records)
    report.finish(cfg, runtime, folder, trainer.run(cfg, runtime, coach, checkpoint))
    samples.write(cfg, runtime, folder, coach)
    runtime.leave()


if __name__ == "__main__":
    main()
