"""Run by the tests, alone or under a launcher: completions of one model in several modes, as JSON from rank 0.

generate_on_ranks.py FOLDER_WITH_MODEL_AND_CASES MODE...
"""

import json
import os
import resource
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from recipes.pipeline.compose import compose_here
from recipes.pipeline.runtime import start

MODES = {
    "plain": ["deepspeed=none"],
    "data": ["deepspeed=none"],
    "tensor": ["deepspeed=none", "generate.tensor_parallel=2"],
    "zero3": ["deepspeed=zero3"],
}


def main() -> None:
    folder, *modes = sys.argv[1:]
    modes = [mode for mode in modes if mode in MODES]
    cases = json.loads((Path(folder) / "cases.json").read_text())
    results, runtime = {}, None
    for mode in modes:
        for name, case in cases.items():
            if case.get("only", mode) != mode:
                continue
            arguments = [
                f"model.name_or_path={folder}/{case['model']}", "model.tokenizer=bytes", "runtime=cpu", *MODES[mode],
                f"generate.file={folder}/nothing.txt", f"generate.batch_size={case.get('rows', 2)}",
                f"generate.max_new_tokens={case['tokens']}", *case.get("options", []),
            ]  # fmt: skip
            cfg = compose_here(arguments, "generate")
            runtime = runtime or start(
                compose_here([*arguments, "deepspeed=zero3"] if "zero3" in modes else arguments, "generate")
            )
            results[f"{mode} {name}"] = run(cfg, case, runtime)
    if runtime.is_main:
        (Path(folder) / f"{'_'.join(modes)}.json").write_text(json.dumps(results))
    runtime.leave()


def run(cfg, case, runtime):
    from recipes.pipeline import engine, model
    from recipes.pipeline.generation import Request

    before = resident()
    engine.register(cfg)
    tokenizer = model.load_tokenizer(cfg.model)
    llama = engine.distribute(cfg, model.build_model(cfg, tokenizer, runtime), runtime)
    generator = engine.generator(cfg, llama, tokenizer, runtime)
    generator.ends = case["ends"]
    requests = [Request(ids, place) for place, ids in enumerate(case["prompts"])]
    done = generator.ranks.gather(generator.run(requests))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    above = generator.ranks.gather({runtime.rank: peak - before})
    return {
        "ids": [done[n].ids for n in range(len(requests))],
        "bytes": above,
        "forwards": generator.decoder is not None,
    }


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
