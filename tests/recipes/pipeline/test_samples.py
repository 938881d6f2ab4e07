"""samples.md: its texts against transformers' generate on stock PEFT, its cells against a Markdown renderer, its ranks."""

import html.parser
import json
import sys
from pathlib import Path

import markdown
import pytest
import torch
from peft import PeftModel
from transformers import LlamaConfig, LlamaForCausalLM

from recipes.pipeline.data import held_out_records
from recipes.pipeline.prompts import encode_prompt
from recipes.pipeline.samples import cell, table
from recipes.pipeline.tokenizer import bytes_tokenizer

sys.path.insert(0, str(Path(__file__).parent))
SPECIAL = {"bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258}


class Cells(html.parser.HTMLParser):
    """Texts of the cells of all tables, a line break as \\n; any other tag inside a cell is an error."""

    def __init__(self, text):
        super().__init__()
        self.rows, self.inside = [], False
        self.feed(markdown.markdown(text, extensions=["tables"]))

    def handle_starttag(self, tag, attributes):
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
            self.inside = True
        elif self.inside and tag == "br":
            self.rows[-1][-1] += "\n"
        elif self.inside:
            raise AssertionError(f"<{tag}> in a cell")

    def handle_endtag(self, tag):
        self.inside = self.inside and tag not in ("td", "th")

    def handle_data(self, data):
        if self.inside:
            self.rows[-1][-1] += data


@pytest.mark.parametrize(
    "text",
    [
        "a | b || c", "one\ntwo\r\nthree", "*bold* _it_ **b** `code` ~~gone~~ $x$", "<b>tag</b> &amp; <script>", "[a](b) ![c](d)",
        "C:\\path \\| end\\", "# title", "- item\n- item", "| --- | --- |", "", "é ☃ 日本", "\u2028line\x0bfeed",
    ],
)  # fmt: skip
def test_a_cell_shows_the_text_and_nothing_else(text):
    records = [{"instruction": text or "x", "input": text, "output": text}]
    rows = Cells(table(records, [text], [text], "# Title")).rows
    assert len(rows) == 2 and len(rows[1]) == 4 and len(table(records, [text], [text], "t").splitlines()) == 5
    for found in rows[1][1:]:
        assert found.split() == text.split()  # a renderer joins runs of spaces
    assert "\n" not in cell(text) and "|" not in cell(text)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A tiny model on disk, so that both sides load the same weights."""
    torch.manual_seed(4)
    folder = tmp_path_factory.mktemp("base") / "tiny"
    config = LlamaConfig(
        vocab_size=259, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, **SPECIAL,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    bytes_tokenizer().save_pretrained(folder)
    return folder


def arguments(base, *more):
    return [
        "model=smollm2_135m", f"model.name_or_path={base}", "data.max_seq_length=256", "samples=3",
        "sample_tokens=10", *more,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def trained(base, tiny):
    run = tiny(*arguments(base))
    assert run.returncode == 0, run.stderr
    return run


def answers(model, record, data, tokenizer):
    ids = torch.tensor([encode_prompt(record, data, tokenizer)])
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=10,
        do_sample=False,
        eos_token_id=257,
        pad_token_id=258,
    )[0, ids.shape[1] :].tolist()
    text = tokenizer.decode(out, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text + ("" if 257 in out else " …")


def test_the_table_holds_what_transformers_generates(trained, base, compose, records):
    text = (trained.folder / "samples.md").read_text()
    header, *rows = Cells(text).rows
    assert header == ["prompt", "base", "adapter", "reference"] and len(rows) == 3
    cfg = compose("+experiment=tiny", *arguments(base, f"data.path={records}"))
    tokenizer = bytes_tokenizer()
    plain = LlamaForCausalLM.from_pretrained(base)
    wanted = held_out_records(cfg)[:3]
    before = [answers(plain, record, cfg.data, tokenizer) for record in wanted]
    adapted = PeftModel.from_pretrained(plain, trained.folder / "adapter")
    after = [answers(adapted, record, cfg.data, tokenizer) for record in wanted]
    for row, record, one, other in zip(rows, wanted, before, after, strict=True):
        assert row[0].split() == (record["instruction"] + "\n\n" + record["input"]).split()
        assert row[1].split() == one.split() and row[2].split() == other.split()
        assert row[3] == record["output"]
    assert before != after
    assert "samples       " in trained.stdout and not list(trained.folder.glob(".*.part"))


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("stage", ["none", "zero3"])
def test_two_ranks_write_the_same_table(trained, base, tiny, stage):
    launcher = () if stage == "none" else ("--use_deepspeed",)
    # The step as a whole is the same: half the rows on each rank
    run = tiny(
        *arguments(base, f"deepspeed={stage}", "train.per_device_train_batch_size=2"), ranks=2, launcher=launcher
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert (run.folder / "samples.md").read_text() == (trained.folder / "samples.md").read_text()


def generated(warm, folder, options, *more):
    """Lines of recipes/generate.py for the prompts of the table."""
    given = [
        "generate.held_out=true",
        "generate.max_prompts=3",
        "generate.max_new_tokens=10",
        "data.max_eval_samples=16",
    ]
    given += [
        "+experiment=tiny",
        "runtime=cpu",
        "memory_curve=false",
        *(o for o in options if not o.startswith("sample")),
    ]
    out = folder / f"{len(list(folder.iterdir()))}.jsonl"
    done = warm("recipes/generate.py", *given, *more, f"generate.output={out}", cwd=folder)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in out.read_text().splitlines()], done.stdout


def test_generating_gives_the_texts_of_the_table(trained, base, records, warm, tmp_path):
    options = arguments(base, f"data.path={records}")
    _, *rows = Cells((trained.folder / "samples.md").read_text()).rows
    for column, more in ((1, []), (2, [f"adapter.path={trained.folder}"])):  # of a run's folder it takes the adapter
        lines, said = generated(warm, tmp_path, options, *more)
        assert f"adapter       {trained.folder / 'adapter' if more else 'none'}" in said
        texts = [line["text"] + (" …" if line["finish_reason"] == "length" else "") for line in lines]
        assert [row[column].split() for row in rows] == [text.split() for text in texts]


def test_a_finished_adapter_gives_the_table_again(trained, base, tiny):
    run = tiny(*arguments(base, "train.do_train=false", f"adapter.path={trained.folder / 'adapter'}"))
    assert (run.folder / "samples.md").read_text() == (trained.folder / "samples.md").read_text()


@pytest.mark.slow
def test_training_evaluation_and_generation_stop_at_the_same_token(base, records, tiny, warm, tmp_path):
    loud = tmp_path / "base"  # its scores are far enough apart for 24 steps to teach where an answer ends
    model = LlamaForCausalLM.from_pretrained(base)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(4)
    model.save_pretrained(loud)
    bytes_tokenizer().save_pretrained(loud)
    short = tmp_path / "short.json"
    rows = json.loads(records.read_text())
    short.write_text(json.dumps([{**row, "output": row["output"][: n % 5 + 1]} for n, row in enumerate(rows)]))
    options = arguments(loud, f"data.path={short}", f"data.cache_dir={tmp_path / 'cache'}")
    run = tiny(*options, "train.max_steps=24", "train.eval_strategy=no")
    assert run.returncode == 0, run.stderr
    _, *rows = Cells((run.folder / "samples.md").read_text()).rows
    assert all(plain.endswith("…") and not adapted.endswith("…") for _, plain, adapted, _ in rows), rows
    again = tiny(*options, "train.do_train=false", f"adapter.path={run.folder / 'adapter'}")
    assert (again.folder / "samples.md").read_text() == (run.folder / "samples.md").read_text()
    lines, _ = generated(warm, tmp_path, options, f"adapter.path={run.folder}")
    assert [line["finish_reason"] for line in lines] == ["eos"] * 3
    assert [line["text"].split() for line in lines] == [row[2].split() for row in rows]
    assert all(line["new_tokens"] == len(line["text"].encode()) + 1 for line in lines)


def test_not_asked_for_not_written(base, tiny):
    run = tiny(*arguments(base, "train.max_steps=1", "samples=0"))
    assert run.returncode == 0 and not (run.folder / "samples.md").exists()


# Evaluation of what training has left


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ["adapter.use_dora=true", "adapter.modules_to_save=[lm_head]"],
        ["adapter.use_rslora=true", "train.gradient_checkpointing=true"],
        ["model.dtype=bfloat16"],
    ],
    ids=["dora", "rank-stabilised", "bfloat16"],
)
def test_a_finished_adapter_and_its_merged_model_give_the_runs_own_loss(base, tiny, tmp_path, options):
    from scripts import merge

    run = tiny(*arguments(base, "samples=0", *options))
    assert run.returncode == 0, run.stderr
    same = arguments(base, "samples=0", "train.do_train=false", *options)
    again = tiny(*same, f"adapter.path={run.folder / 'adapter'}")
    assert again.returncode == 0, again.stderr
    assert again.results["eval_loss"] == pytest.approx(run.results["eval_loss"], abs=1e-5)
    assert abs(run.results["eval_loss"] - run.results["eval_loss_before"]) > 0.01
    if "model.dtype=bfloat16" not in options:
        adapter = str(run.folder / "adapter")
        given = ["--base", str(base), "--adapter", adapter, "--output", str(tmp_path / "m"), "--dtype", "float32"]
        assert merge.main(given) == 0
        merged = tiny(*arguments(tmp_path / "m", "samples=0", "train.do_train=false", "adapter=none"))
        assert merged.returncode == 0, merged.stderr
        assert merged.results["eval_loss"] == pytest.approx(run.results["eval_loss"], abs=1e-4)
    assert json.loads((run.folder / "all_results.json").read_text())["eval_targets"] == again.results["eval_targets"]
