"""A program for the tests: evaluate whole texts with the real small model through the recipe's own stages.

Arguments: overrides of the configuration, then `--texts` and the texts' numbers. Rank 0 prints the figures as JSON.
"""

import json
import sys
import tempfile
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

REPOSITORY = Path(__file__).resolve().parents[3]
TEXTS = [
    "The capital of France is Paris, and the river that runs through it is the Seine.",
    "Blue.",
    "Water boils at one hundred degrees Celsius at sea level.",
    "Yes, it is.",
]


def evaluate(overrides: list[str], chosen: list[int]) -> dict:
    import datasets

    from recipes.pipeline import model, trainer
    from recipes.pipeline.batches import collator_for
    from recipes.pipeline.compose import resolve
    from recipes.pipeline.config import LoraRecipe
    from recipes.pipeline.data import Data
    from recipes.pipeline.runtime import start

    ConfigStore.instance().store("lora_schema", LoraRecipe)
    OmegaConf.register_new_resolver("run_stamp", lambda: "test", replace=True)
    OmegaConf.register_new_resolver("repository", lambda path: str(REPOSITORY / path), replace=True)
    with initialize_config_dir(str(REPOSITORY / "conf"), version_base="1.3"):
        fixed = ["train.do_train=false", "adapter=none", "runtime=cpu", "train.tensorboard=false"]
        cfg = resolve(compose("lora", overrides=[*fixed, *overrides]), LoraRecipe)
    runtime = start(cfg)
    with tempfile.TemporaryDirectory() as folder:
        arguments = trainer.training_arguments(cfg, runtime, Path(folder))
        tokenizer = model.load_tokenizer(cfg.model)
        rows = []
        for number in chosen:
            ids = tokenizer(TEXTS[number], add_special_tokens=False)["input_ids"]
            # A text's first token is no target: behind left padding, the model would be asked for it
            rows.append({"input_ids": ids, "labels": [-100, *ids[1:]], "length": len(ids)})
        texts = datasets.Dataset.from_list(rows)
        data = Data(texts, texts, collator_for(cfg, tokenizer.pad_token_id), {}, {}, 0)
        llama = model.build_model(cfg, tokenizer, runtime)
        figures = trainer.run(cfg, runtime, trainer.build_trainer(cfg, runtime, arguments, llama, tokenizer, data))
    return figures | {"rank": runtime.rank, "backend": runtime.backend}


if __name__ == "__main__":
    split = sys.argv.index("--texts")
    result = evaluate(sys.argv[1:split], [int(number) for number in sys.argv[split + 1 :]])
    if result["rank"] == 0:
        print("FIGURES " + json.dumps(result))
