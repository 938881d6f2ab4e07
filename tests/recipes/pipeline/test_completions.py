"""The file of completions: order, one line a prompt, going on where a run was cut off; and the recipe as a program."""

import json
from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from recipes.pipeline import completion_file, completions, engine, questions
from recipes.pipeline.config import InputError
from recipes.pipeline.generation import Generator
from recipes.pipeline.model import build_model
from recipes.pipeline.runtime import Runtime
from recipes.pipeline.tokenizer import bytes_tokenizer

REPOSITORY = Path(__file__).resolve().parents[3]
PROMPTS = ["Name three colors.", "x", "What is the capital of Canada, and why?", "Add.", "y y y", "Say hello."]
CPU = Runtime("cpu", lazy=False)


@pytest.fixture
def complete(compose, tmp_path, monkeypatch):
    """complete("generate.seed=1") -> (records of the file, figures), as recipes/generate.py would."""
    monkeypatch.setattr(completions, "WINDOW", 1)
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))

    def go(*overrides: str, output: str = "out.jsonl"):
        fixed = [f"generate.file={tmp_path}/prompts.txt", "generate.max_new_tokens=4", "generate.batch_size=2"]
        fixed += [f"generate.output={tmp_path}/{output}", "+experiment=tiny", "runtime=cpu"]
        named = {override.partition("=")[0] for override in overrides}
        cfg = compose(*[f for f in fixed if f.partition("=")[0] not in named], *overrides, root="generate")
        tokenizer = bytes_tokenizer()
        asked = questions.load(cfg, tokenizer)
        opened = completion_file.find_output(cfg, CPU, tmp_path / "run", asked)
        model = build_model(cfg, tokenizer, CPU)
        completion_file.begin(cfg, CPU, opened)
        generator = engine.generator(cfg, model, tokenizer, CPU)
        figures = completions.run(generator, asked, opened)
        completions.report(CPU, opened, figures)
        return [json.loads(line) for line in opened.path.read_text().splitlines()], figures

    return go


def test_one_line_a_prompt_in_the_order_of_the_prompts(complete, tmp_path, capsys):
    lines, figures = complete()
    assert [line["prompt"] for line in lines] == PROMPTS
    assert [line["index"] for line in lines] == list(range(6))
    for line in lines:
        assert line["prompt_tokens"] == len(line["prompt"]) + 140
        assert line["finish_reason"] == "length" and line["new_tokens"] == 4
    assert figures["prefill_tokens"] == sum(line["prompt_tokens"] for line in lines)
    assert figures["decode_tokens"] == 6 * 3  # the first token of each comes with the prefill
    assert figures["time_to_first_token"] > 0 and figures["prefill_tokens_per_second"] > 0
    written = json.loads((tmp_path / "run" / "generation.json").read_text())
    assert written["prompts"] == 6 and written["max_memory_allocated (GB)"] > 0
    assert "tokens/s" in capsys.readouterr().out


@pytest.mark.parametrize("sampling", [[], ["generate.temperature=0.9"]])
def test_a_run_that_was_cut_off_goes_on(complete, tmp_path, sampling):
    whole, _ = complete(*sampling, output="whole.jsonl")
    content = (tmp_path / "whole.jsonl").read_bytes()
    third = content.split(b"\n")[2]
    cut = content[: content.index(third) + len(third) // 2]  # in the middle of the third line
    (tmp_path / "cut.jsonl").write_bytes(cut)
    again, figures = complete(*sampling, "generate.batch_size=1", output="cut.jsonl")
    assert again == whole and figures["prompts"] == 4
    assert (tmp_path / "cut.jsonl").read_bytes() == content
    written = (tmp_path / "run" / "generation.json").read_bytes()
    again, figures = complete(*sampling, output="cut.jsonl")  # nothing is left to do
    assert again == whole and figures["prompts"] == 0
    assert (tmp_path / "run" / "generation.json").read_bytes() == written


def test_a_run_that_was_stopped_keeps_each_finished_batch(complete, tmp_path, monkeypatch):
    """Lines are in order only when the longest and the shortest prompt of a window are there; batches are kept before."""
    whole, _ = complete(output="whole.jsonl")
    monkeypatch.setattr(completions, "WINDOW", 3)
    decode, batches = Generator._decode, []

    def stop_at_the_third(self, batch):
        if len(batches) == 2:
            raise KeyboardInterrupt
        batches.append(batch.places)
        return decode(self, batch)

    monkeypatch.setattr(Generator, "_decode", stop_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        complete()
    assert (tmp_path / "out.jsonl").read_bytes() == b""
    part = tmp_path / ".out.jsonl.0.part"
    with part.open("ab") as file:
        file.write(part.read_bytes()[:50])  # and killed while the next one was written
    monkeypatch.setattr(Generator, "_decode", decode)
    again, figures = complete()
    assert again == whole and figures["prompts"] == 2 and not part.exists()


@pytest.mark.parametrize("content", [b"precious text without a line's end", b"[1, 2]", b'{"index": 1, "prompt": "x'])
def test_a_file_of_something_else_is_left_alone_without_its_last_newline_too(complete, tmp_path, content):
    (tmp_path / "out.jsonl").write_bytes(content)
    with pytest.raises(InputError, match=r"out.jsonl line 1: not a completion"):
        complete()
    assert (tmp_path / "out.jsonl").read_bytes() == content


def test_lines_are_of_this_prompts_ids_and_seed(complete, tmp_path):
    rows = [{"instruction": "Water", "input": "boils"}, {"prompt": "x", "seed": 3}]
    source = tmp_path / "rows.jsonl"
    given = (f"generate.file={source}", "generate.temperature=0.9")
    for changed in ([{"prompt": "Water\n\nboils"}, rows[1]], [rows[0], {"prompt": "x", "seed": 4}]):
        (tmp_path / "out.jsonl").unlink(missing_ok=True)
        source.write_text("\n".join(map(json.dumps, rows)))
        complete(*given)
        source.write_text("\n".join(map(json.dumps, changed)))
        with pytest.raises(InputError, match="is of another prompt, model or setting"):
            complete(*given)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("generate.max_new_tokens=5", "line 1 is of another prompt, model or setting"),
        ("generate.max_prompts=3", "line 4 is of another prompt"),
        ("seed=7", "line 1 is of another prompt, model or setting"),
        ("model.dtype=bfloat16", "line 1 is of another prompt, model or setting"),
    ],
)
def test_a_file_of_other_settings_is_left_alone(complete, tmp_path, change, said):
    complete()
    before = (tmp_path / "out.jsonl").read_bytes()
    with pytest.raises(InputError, match=f"out.jsonl {said}"):
        complete(change)
    assert (tmp_path / "out.jsonl").read_bytes() == before


def test_files_that_cannot_be_written(complete, tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match="folder: is a folder; give the name of a file"):
        complete(output="folder")
    (tmp_path / "notes.jsonl").write_text("my notes\n")
    with pytest.raises(InputError, match=r"notes.jsonl line 1: not a completion"):
        complete(output="notes.jsonl")
    assert (tmp_path / "notes.jsonl").read_text() == "my notes\n"
    with pytest.raises(InputError, match="choose another"):
        complete(output="prompts.txt/out.jsonl")
    with pytest.raises(InputError, match="stream=true shows the text of one prompt, 6 are given"):
        complete("generate.stream=true")


def test_skipped_prompts_have_their_line(complete):
    lines, figures = complete("generate.max_prompt_tokens=148", "generate.too_long=skip")
    kept = [line["finish_reason"] != "too_long" for line in lines]
    assert kept == [len(prompt) + 140 <= 148 for prompt in PROMPTS] and sum(kept) == 3
    assert lines[0]["text"] == "" and lines[0]["prompt_tokens"] == 158
    assert figures["decode_tokens"] == 9


@pytest.mark.slow
def test_the_program_streams_a_single_prompt_and_says_what_is_wrong(tmp_path, warm):
    def recipe(*arguments):
        return warm("recipes/generate.py", "+experiment=tiny", "runtime=cpu", *arguments, cwd=tmp_path, timeout=120)

    done = recipe("generate.prompt=['Name three colors.']", "generate.max_new_tokens=5", "hydra.run.dir=out")
    assert done.returncode == 0, done.stderr
    line = json.loads((tmp_path / "out" / "completions.jsonl").read_text())
    assert done.stdout.startswith(line["text"] + "\n") and "first token" in done.stdout
    assert done.stderr == ""  # no bar beside streamed text
    assert {"config.yaml", "versions.json", "generation.json"} <= {path.name for path in (tmp_path / "out").iterdir()}
    done = recipe("generate.max_new_tokens=0", "generate.prompt=[a]", "hydra.run.dir=other")
    assert (done.returncode, done.stdout) == (2, "") and not (tmp_path / "other").exists()
    assert done.stderr == "error: generate.max_new_tokens=0: takes 1 or more\n"
    other = LlamaForCausalLM(LlamaConfig(vocab_size=259, hidden_size=32, intermediate_size=64, num_hidden_layers=2))
    get_peft_model(other, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    done = recipe("generate.prompt=[a]", f"adapter.path={tmp_path / 'adapter'}", "hydra.run.dir=other")
    assert done.returncode == 2 and not (tmp_path / "other").exists()
    assert done.stderr.startswith("error: ") and "is of another base model" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_digest_is_of_the_adapters_content(compose, tmp_path):
    cfg = compose("+experiment=tiny", f"adapter.path={tmp_path}", "generate.prompt=[a]", root="generate")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"one")
    before = completion_file.settings_digest(cfg)
    assert completion_file.settings_digest(cfg) == before
    (tmp_path / "adapter_model.safetensors").write_bytes(b"two")
    assert completion_file.settings_digest(cfg) != before
