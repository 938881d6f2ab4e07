"""The order of the run, which Gaudi's software depends on."""

from types import SimpleNamespace

from recipes import lora
from recipes.pipeline import data, memory_plan, model, report, samples, trainer


def test_environment_then_arguments_then_model(compose, monkeypatch):
    order = []

    def stage(module, name, result=None):
        monkeypatch.setattr(module, name, lambda *arguments, **options: (order.append(name), result)[1])

    stage(lora, "preflight")
    stage(lora, "start", SimpleNamespace(rank0_first=None, leave=lambda: order.append("leave")))
    stage(lora, "run_folder")
    for module, names in {
        report: ("open_run_folder", "introduce", "finish"),
        trainer: ("find_checkpoint", "training_arguments", "build_trainer", "run"),
        model: ("load_tokenizer", "build_model"),
        data: ("build_data",),
        samples: ("write",),
        memory_plan: ("warn",),
    }.items():
        for name in names:
            stage(module, name)
    cfg = compose("+experiment=tiny", "runtime=gaudi_lazy")
    lora.main.recipe(cfg)
    assert order.index("warn") < order.index("build_model")  # before anything large is loaded
    assert order[:3] == ["preflight", "start", "run_folder"]  # what imports torch comes after start
    assert order.index("training_arguments") < order.index("build_model") < order.index("build_trainer")
    assert order[-3:] == ["finish", "write", "leave"]  # results are safe before anything is generated
