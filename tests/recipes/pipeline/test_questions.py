"""Where prompts come from, and what happens to those that are too long or damaged."""

import json

import pytest

from recipes.pipeline import questions
from recipes.pipeline.config import InputError
from recipes.pipeline.data import build_data
from recipes.pipeline.prompts import encode_prompt
from recipes.pipeline.tokenizer import bytes_tokenizer

TINY = ["model=random_tiny", "data.max_seq_length=512"]
RECORDS = [
    {"instruction": "Name three colors.", "input": "", "output": "red, green, blue"},
    {"instruction": "Add.", "input": "2 and 3", "output": "5"},
]


@pytest.fixture
def load(compose, tmp_path):
    def go(*overrides: str, name: str | None = None, content: str = ""):
        options = list(overrides)
        if name:
            (tmp_path / name).write_text(content, encoding="utf-8")
            options.append(f"generate.file={tmp_path / name}")
        cfg = compose(*TINY, *options, root="generate")
        return cfg, questions.load(cfg, bytes_tokenizer())

    return go


def test_texts_of_the_command_line_in_the_template_and_as_they_stand(load):
    cfg, (one, two) = load("generate.prompt=['Name three colors.','Once, upon']")
    assert one.ids == encode_prompt({"instruction": "Name three colors."}, cfg.data, bytes_tokenizer())
    assert bytes(one.ids).decode().endswith("### Instruction:\nName three colors.\n\n### Response:\n")
    assert (one.prompt, two.prompt, one.reference) == ("Name three colors.", "Once, upon", None)
    assert one.seed != two.seed
    _, (raw, _) = load("generate.prompt=['Name three colors.','x']", "generate.template=false")
    assert bytes(raw.ids).decode() == "Name three colors."


def test_files_of_every_kind(load):
    lines = "Name three colors.\n\n  \nAdd.\n"
    _, found = load(name="a.txt", content=lines)
    assert [question.prompt for question in found] == ["Name three colors.", "Add."]
    _, found = load(name="b.json", content=json.dumps(RECORDS))
    assert [question.prompt for question in found] == ["Name three colors.", "Add.\n\n2 and 3"]
    assert [question.reference for question in found] == ["red, green, blue", "5"]
    rows = ['"Name three colors."', '{"prompt": "Add.", "seed": 7}', json.dumps(RECORDS[1])]
    _, found = load(name="c.jsonl", content="\n".join(rows))
    assert [question.prompt for question in found] == ["Name three colors.", "Add.", "Add.\n\n2 and 3"]
    assert found[1].seed == 7
    _, found = load(name="d.csv", content="instruction,input,output\nAdd.,2 and 3,5\n")
    assert found[0].prompt == "Add.\n\n2 and 3"
    _, found = load("data.columns.instruction=q", name="e.jsonl", content='{"q": "Add."}')
    assert found[0].prompt == "Add."
    _, found = load("generate.max_prompts=1", name="f.txt", content=lines)
    assert len(found) == 1
    odd = ["a\u2028b", "c\fd", "e\vf", "g\x85h"]  # what str.splitlines takes for ends of lines
    _, found = load(name="g.txt", content="\r\n".join(odd))
    assert [question.prompt for question in found] == odd


def test_a_record_that_is_continued_as_it_stands_has_its_input(load):
    _, (one, two) = load("generate.template=false", name="b.json", content=json.dumps(RECORDS))
    assert [bytes(question.ids).decode() for question in (one, two)] == ["Name three colors.", "Add.\n\n2 and 3"]


def test_held_out_records_follow_the_template_option(load, tmp_path):
    (tmp_path / "data.json").write_text(json.dumps(RECORDS * 10))
    given = (f"data.path={tmp_path / 'data.json'}", "generate.held_out=true", "generate.max_prompts=1")
    _, (plain,) = load(*given, "generate.template=false")
    _, (wrapped,) = load(*given)
    assert bytes(plain.ids).decode() == plain.prompt == wrapped.prompt
    assert bytes(wrapped.ids).decode().startswith("Below is")


@pytest.mark.parametrize("template", ["alpaca", "llama2_chat"])
def test_held_out_records_are_those_of_training_and_their_prompts_begin_the_samples(compose, template, tmp_path):
    options = [*TINY, f"data.template={template}", f"data.cache_dir={tmp_path}", "data.max_eval_samples=6"]
    cfg = compose(*options, "generate.held_out=true", root="generate")
    found = questions.load(cfg, bytes_tokenizer())
    data = build_data(compose(*options), bytes_tokenizer())
    assert len(found) == len(data.eval) == 6
    for question, row in zip(found, data.eval, strict=True):
        masked = row["labels"].count(-100)
        assert question.ids == row["input_ids"][:masked] and question.tokens == masked
        answer = bytes(i for i in row["input_ids"][masked:] if i < 256).decode()
        assert answer.strip() == question.reference.strip()


@pytest.mark.slow
def test_the_prompt_of_a_known_record_is_the_first_34_ids_of_its_sample(compose, tmp_path):
    from recipes.pipeline.tokenizer import load_tokenizer

    path = tmp_path / "records.json"
    path.write_text(json.dumps(RECORDS * 2))
    options = [
        "model=smollm2_135m",
        f"data.path={path}",
        f"data.cache_dir={tmp_path}",
        "data.validation_split_percentage=50",
    ]
    cfg = compose(*options, f"generate.file={path}", root="generate")
    tokenizer = load_tokenizer(cfg.model)
    question = questions.load(cfg, tokenizer)[0]
    data = build_data(compose(*options), tokenizer)
    samples = [row["input_ids"] for row in (*data.train, *data.eval)]
    assert len(question.ids) == 34
    assert question.ids in [sample[:34] for sample in samples]
    assert questions.ends(cfg, tokenizer, [99])[0] == samples[0][-1] and 99 in questions.ends(cfg, tokenizer, [99])


LONG = "x" * 300
CAP = ["generate.max_prompt_tokens=200"]


def test_a_prompt_that_is_too_long_is_refused_with_both_numbers(load):
    wrapped = 140  # bytes of the template around an instruction
    with pytest.raises(
        InputError, match=f"a.txt line 2: a prompt of {300 + wrapped} tokens, 200 fit .*truncate or skip"
    ):
        load(*CAP, name="a.txt", content=f"short\n{LONG}\n")
    with pytest.raises(InputError, match="a prompt of 1240 tokens, 896 fit"):  # 1024 positions, 128 new tokens
        load(name="b.txt", content="x" * 1100)


def test_truncation_keeps_the_whole_template_and_says_both_numbers(load, capsys):
    _, (cut,) = load(*CAP, "generate.too_long=truncate", name="a.txt", content=LONG)
    text = bytes(cut.ids).decode()
    assert len(cut.ids) == 200 and text.startswith("Below is") and text.endswith("xx\n\n### Response:\n")
    said = capsys.readouterr().err
    assert "440 tokens, 200 fit" in said and "60 of 300 characters stay" in said
    record = {"instruction": "Sum it up.", "input": LONG}
    _, (cut,) = load(
        "generate.max_prompt_tokens=300", "generate.too_long=truncate", name="b.json", content=json.dumps([record])
    )
    text = bytes(cut.ids).decode()
    assert "### Instruction:\nSum it up.\n" in text and text.endswith("xx\n\n### Response:\n") and len(cut.ids) == 300
    raw = ["generate.template=false", "generate.too_long=truncate", "generate.max_prompt_tokens=4"]
    _, (cut,) = load(*raw, name="c.txt", content="abcdefgh")
    assert bytes(cut.ids).decode() == "efgh"  # what comes next follows the end


def test_truncation_that_would_cut_the_template_is_refused(load):
    with pytest.raises(
        InputError, match=r"440 tokens, 100 fit .* even without its instruction the template does not fit"
    ):
        load("generate.max_prompt_tokens=100", "generate.too_long=truncate", name="a.txt", content=LONG)


def test_skipped_prompts_keep_their_place(load, capsys):
    _, found = load(*CAP, "generate.too_long=skip", name="a.txt", content=f"{LONG}\nshort\n")
    assert [question.ids is None for question in found] == [True, False] and found[0].tokens == 440
    assert "a.txt line 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", "", "no prompt in it"),
        ("b.jsonl", "", "b.jsonl: the file is empty"),
        ("c.json", "[]", "no prompt in it"),
        ("d.jsonl", '{"prompt": "a"}\n{"prompt": 3}', "d.jsonl line 2: neither a text, nor an object"),
        ("e.jsonl", '{"prompt": "a", "seed": -1}', "seed -1 is not a whole number"),
        ("f.jsonl", '{"prompt": ', "line 1 column"),
        ("g.jsonl", '{"prompt": "  "}', "line 1: an empty text"),
        ("h.pdf", "x", "unknown ending; accepted: .txt"),
        ("i.jsonl", '{"instruction": "a", "input": 5}', "line 1: input is 5, not a text"),
        ("j.jsonl", '{"instruction": "a", "output": {"b": 1}}', "line 1: output is {'b': 1}, not a text"),
        ("k.jsonl", '{"prompt": "a", "seed": true}', "seed True is not a whole number"),
        ("l.jsonl", '{"instruction": " ", "input": "x"}', "line 1: an empty text"),
        ("m.json", '["ok", "a\\ud83db"]', "half of a surrogate pair"),
        ("n.jsonl", '{"instruction": "a", "output": "\\ud83d"}', "half of a surrogate pair"),
    ],
)
def test_damaged_sources(load, name, content, said):
    with pytest.raises(InputError, match=said):
        load(name=name, content=content)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "give one of generate.prompt"),
        (["generate.prompt=[a]", "generate.held_out=true"], "more than one is given"),
        (["generate.prompt=[a]", "generate.max_new_tokens=0"], "generate.max_new_tokens=0: takes 1 or more"),
        (["generate.prompt=[a]", "generate.top_p=0"], "generate.top_p=0"),
        (
            ["generate.prompt=[a]", "generate.batch_size=many"],
            "generate.batch_size=many: takes 1 or more rows, or auto",
        ),
        (["generate.prompt=[a]", "generate.stop=['']"], "empty text"),
        (["generate.prompt=[a]", "generate.temperature=-1"], "generate.temperature=-1"),
        (["generate.prompt=[a]", "generate.temperature=1e-40"], "takes 0.001 to 1000, or 0"),
        (["generate.prompt=[a]", "generate.temperature=inf"], "takes 0.001 to 1000, or 0"),
        (["generate.prompt=[a]", "generate.repetition_penalty=inf"], "takes 0.001 to 1000; 1 changes nothing"),
        (["generate.file=/tmp"], "generate.file=/tmp: a folder, give a file in it"),
        (["generate.prompt=[a]", "generate.tensor_parallel=2", "deepspeed=zero3"], "both cut the weights"),
        (["generate.prompt=[a]", "generate.max_new_tokens=1024"], "leaves no room for a prompt in the model's 1024"),
        (["generate.file=/nowhere/a.txt"], "generate.file=/nowhere/a.txt: no such file"),
        (["generate.prompt=[a]", "model.implementation=stock"], "stock does not generate"),
    ],
)
def test_impossible_options(load, options, said):
    with pytest.raises(InputError, match=said):
        load(*options)
