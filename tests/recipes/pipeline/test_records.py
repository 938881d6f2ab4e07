"""Files that load alike whatever their format, and one line for each kind of bad input."""

import csv
import gzip
import json

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from recipes.pipeline import records
from recipes.pipeline.config import ColumnsConfig, InputError

GOOD = [
    {"instruction": "Name a color.", "input": "", "output": "Blue"},
    {"instruction": "Add, please.", "input": 'two\nand "three"', "output": "fünf; 北京"},
    {"instruction": "Count.", "input": "", "output": "1, 2,\n3"},
]


def load(path, columns=None):
    return records.locate(str(path), "data.path").records(columns or ColumnsConfig())


def refused(path, *words, columns=None):
    with pytest.raises(InputError) as caught:
        load(path, columns)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


def write(path, content):
    name = path.name.removesuffix(".gz")
    if name.endswith(".parquet"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(content), path)
        return path
    if name.endswith(".csv"):
        with path.open("w", newline="", encoding="utf-8-sig") as file:
            writer = csv.DictWriter(file, list(content[0]))
            writer.writeheader()
            writer.writerows(content)
        text = path.read_text("utf-8")
    elif name.endswith(".jsonl"):
        text = "\n".join(json.dumps(record, ensure_ascii=False) for record in content) + "\n\n"
    else:
        text = json.dumps(content, indent=1)
    content = text.encode()
    path.write_bytes(gzip.compress(content) if path.name.endswith(".gz") else content)
    return path


@pytest.mark.parametrize("ending", records.ENDINGS)
def test_every_accepted_ending_gives_the_same_records(tmp_path, ending):
    assert load(write(tmp_path / f"alpaca{ending}", GOOD)) == GOOD


def test_the_content_decides_between_a_list_and_lines(tmp_path):
    lines = "\n".join(map(json.dumps, GOOD))
    for name, text in {
        "lines.json": lines,
        "list.jsonl": json.dumps(GOOD),
        "under_a_key.json": json.dumps({"version": "1", "data": GOOD}),
        "lines.txt": lines,
        "bom.json": "\ufeff" + json.dumps(GOOD),
    }.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        assert load(tmp_path / name) == GOOD, name


def test_a_folder_is_its_files_in_the_order_of_their_names(tmp_path):
    write(tmp_path / "b.jsonl", GOOD[2:])
    write(tmp_path / "a.csv", GOOD[:2])
    (tmp_path / "README.md").write_text("no data")
    assert load(tmp_path) == GOOD


def test_a_held_out_file_among_training_files_is_not_trained_on(tmp_path):
    write(tmp_path / "train.json", GOOD)
    write(tmp_path / "test.json", GOOD)
    refused(tmp_path, "test.json looks like a held-out part", "data.eval_path")


def test_the_hash_is_of_the_content(tmp_path):
    first, second, other = (
        write(tmp_path / n, c) for n, c in {"a.json": GOOD, "b.json": GOOD, "c.json": GOOD[:2]}.items()
    )
    digests = [records.locate(str(path), "data.path").sha256() for path in (first, second, other)]
    assert digests[0] == digests[1] != digests[2]


def test_a_missing_or_null_input_is_an_empty_one(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(
        json.dumps([{"instruction": "a", "output": "b"}, {"instruction": "a", "input": None, "output": "b"}])
    )
    assert load(path) == [{"instruction": "a", "input": "", "output": "b"}] * 2


def test_columns_are_mapped(tmp_path):
    path = write(tmp_path / "a.json", [{"question": "Why?", "context": "c", "answer": "So."}])
    columns = ColumnsConfig(instruction="question", input="context", output="answer")
    assert load(path, columns) == [{"instruction": "Why?", "input": "c", "output": "So."}]
    assert load(path, ColumnsConfig(instruction="question", input=None, output="answer"))[0]["input"] == ""


def test_wrong_columns_list_what_is_there_and_what_is_wanted(tmp_path):
    path = write(tmp_path / "a.json", [{"question": "Why?", "answer": "So."}])
    refused(path, str(path), "found: question, answer", "wanted: instruction, output", "data.columns.instruction=NAME")
    columns = ColumnsConfig(instruction="question", input="context", output="answer")
    refused(path, "no column context", columns=columns)


@pytest.mark.parametrize(
    ("value", "kind"), [({"text": "x"}, "dict"), (["x"], "list"), (None, "null"), (3, "number"), (True, "boolean")]
)
@pytest.mark.parametrize("ending", [".json", ".jsonl"])
def test_an_output_that_is_no_text_is_named_by_row_and_field(tmp_path, value, kind, ending):
    path = write(tmp_path / f"a{ending}", [*GOOD, {**GOOD[0], "output": value}])
    row = "record 4" if ending == ".json" else "line 4"
    refused(path, f"{path} {row}: field 'output' is a {kind}", "1 of 4 records are bad")


def test_a_missing_field_and_a_row_that_is_no_record_are_named(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps([GOOD[0], {"instruction": "a"}, "text"]))
    refused(path, "record 2: field 'output' is missing", "2 of 3 records are bad")
    path.write_text(json.dumps(["text", "more"]))
    refused(path, "record 1: a text where an object", "no valid record")
    path.write_text(json.dumps([{"instruction": "\ud83d", "output": "half of a pair"}]))
    refused(path, "record 1: field 'instruction' holds half a surrogate pair")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.json", b"", ["the file is empty"]),
        ("a.json", b" \n", ["the file is empty"]),
        ("a.json", b"[]", ["no record in it"]),
        ("a.jsonl", b"\n\n", ["the file is empty"]),
        ("a.csv", b"instruction,output\n", ["no record in it"]),
        ("a.json", b"3", ["holds a number where a list of records should be"]),
        ("a.json", b'[\n{"instruction": "a",\n "output" "b"}]', ["line 3 column 11", "broken JSON"]),
        ("a.jsonl", b'{"instruction": "a", "output": "b"}\n{"instr', ["line 2", "broken JSON"]),
        ("a.json", b'[{"instruction":\n "a", "output": "b\xff"}]', ["line 2", "byte 0xff at offset 35", "UTF-8"]),
        ("a.csv", b"instruction,output\na,b\nc,d,e\n", ["line 3", "more cells than the header names"]),
        ("a.csv", b"instruction,output\na,b\nc\n", ["line 3", "field 'output' is missing"]),
        ("a.csv", b'instruction,output\na,"b\n', ["broken CSV"]),
        ("a.csv", b"a,a\n1,2\n", ["names a column twice"]),
        ("a.parquet", b"PAR1 not really", ["damaged Parquet file"]),
        ("a.json.gz", b"not gzip", ["damaged gzip file"]),
        ("a.txt", b"Once upon a time", ["a .txt file must hold JSON", ".jsonl", ".parquet"]),
        ("a.xlsx", b"PK", ["unknown ending", ".json", ".csv"]),
        ("a.json", b"[" * 100_000, ["a.json"]),
    ],
)
def test_a_bad_file_is_one_line_with_its_name(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    refused(tmp_path / name, str(tmp_path / name), *words)


def test_a_missing_file_lists_near_misses(tmp_path):
    write(tmp_path / "alpaca_en.json", GOOD)
    refused(tmp_path / "alpaca_eng.json", "data.path=", "no such file or folder", "near it", "alpaca_en.json")
    refused(tmp_path / "nowhere" / "x.json", "looked in")


def test_an_empty_folder_is_named(tmp_path):
    refused(tmp_path, "no data file in this folder", ".parquet")


@pytest.fixture
def hub(monkeypatch):
    """A hub that holds one data set, owner/colors, with splits train and test."""
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: None)
    splits = {name: datasets.Dataset.from_list(GOOD[:n]) for name, n in {"train": 3, "test": 1}.items()}
    monkeypatch.setattr(datasets, "load_dataset", {"owner/colors": datasets.DatasetDict(splits)}.__getitem__)


def test_a_hub_data_set_is_read_by_split(hub):
    train = records.locate("owner/colors", "data.path", "train")
    assert train.records(ColumnsConfig()) == GOOD
    test = records.locate("owner/colors", "data.eval_split", "test")
    assert test.records(ColumnsConfig()) == GOOD[:1]
    assert train.sha256() != test.sha256()


def test_a_missing_split_lists_those_present(hub):
    with pytest.raises(InputError, match="no split 'validation'; present: train, test"):
        records.locate("owner/colors", "data.eval_split", "validation").records(ColumnsConfig())


def test_a_path_that_exists_is_never_asked_of_the_hub(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "colors").mkdir(parents=True)
    write(tmp_path / "owner" / "colors" / "a.json", GOOD[1:])
    assert load("owner/colors") == GOOD[1:]


def test_a_missing_file_in_a_folder_that_exists_is_not_asked_of_the_hub(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner").mkdir()
    refused("owner/colors", "no such file or folder")


def test_an_unreachable_hub_is_one_line_in_seconds(tmp_path, monkeypatch):
    """Offline as on a cluster without network: no retries, a line that says both readings of the name."""
    import time

    import huggingface_hub

    def unreachable(*_, **__):
        raise OSError("no route")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", unreachable)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    before = datasets.config.HF_HUB_OFFLINE
    start = time.monotonic()
    refused("owner/absent", "data.path=owner/absent", "not readable from the hub", "give a local file")
    assert time.monotonic() - start < 5
    assert before == datasets.config.HF_HUB_OFFLINE
