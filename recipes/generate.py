"""Completions of prompts by Llama and its adapter.   python recipes/generate.py "generate.prompt=['Name three colors.']"

Options: conf/generate.yaml and recipes/pipeline/config.py; `--help` lists them, `dry_run=true` shows the plan and stops.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone without an installation

from recipes.pipeline.compose import recipe, run_folder
from recipes.pipeline.config import GenerateRecipe
from recipes.pipeline.preflight import dry_run, preflight
from recipes.pipeline.runtime import start


@recipe("generate")
def main(cfg: GenerateRecipe) -> None:
    if cfg.dry_run:
        return dry_run(cfg)
    preflight(cfg)
    runtime = start(cfg)  # sets the environment: what imports torch comes after it
    from recipes.pipeline import completion_file, completions, engine, memory_plan, model, questions

    engine.register(cfg)  # before the model: ZeRO-3 cuts weights while they are read
    tokenizer = model.load_tokenizer(cfg.model)
    asked = questions.load(cfg, tokenizer)
    output = completion_file.find_output(cfg, runtime, run_folder(), asked)
    memory_plan.warn(cfg, runtime)
    llama = engine.distribute(cfg, model.build_model(cfg, tokenizer, runtime), runtime)
    completion_file.begin(cfg, runtime, output)
    generator = engine.generator(cfg, llama, tokenizer, runtime)
    completions.report(runtime, output, completions.run(generator, asked, output, cfg))
    runtime.leave()


if __name__ == "__main__":
    main()
