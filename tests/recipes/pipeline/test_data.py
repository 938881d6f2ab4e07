"""Rows, labels, splits and batches: counted by hand, by the datasets library's own splits, by SmolLM2's known losses."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import datasets
import numpy as np
import pytest
from transformers import LlamaForCausalLM

from recipes.pipeline import batches, data, prompts
from recipes.pipeline.config import (
    Batching,
    Holdout,
    InputError,
    LoraRecipe,
    LossOn,
    Side,
    Template,
    TooLong,
)

COLOR = {"instruction": "Name a color.", "input": "", "output": "Blue"}
TEXTS = [
    "The capital of France is Paris, and the river that runs through it is the Seine.",
    "Blue.",
    "Water boils at one hundred degrees Celsius at sea level.",
    "Yes, it is.",
]


def numbered(count):
    """Records that differ, of 1 to 40 words of output."""
    return [
        {
            "instruction": f"Count to {n}.",
            "input": "in words" * (n % 2),
            "output": " ".join(["word"] * (n * 7 % 40 + 1)),
        }
        for n in range(count)
    ]


@pytest.fixture
def build(tmp_path, smol_tokenizer):
    """build(records or a file's path, option=value ...) -> Data; train options as train_NAME."""

    def make(content, tokenizer=None, rank0_first=None, **options):
        path = content
        if isinstance(content, list):
            path = tmp_path / f"records{abs(hash(json.dumps(content))) % 10**8}.json"
            path.write_text(json.dumps(content))
        cfg = LoraRecipe()
        cfg.data.path, cfg.data.cache_dir = str(path), str(tmp_path / "cache")
        for name, value in options.items():
            group, key = (cfg.train, name.removeprefix("train_")) if name.startswith("train_") else (cfg.data, name)
            assert hasattr(group, key)
            setattr(group, key, value)
        return data.build_data(cfg, tokenizer or smol_tokenizer, *([rank0_first] if rank0_first else []))

    return make


def rows(dataset):
    return [dict(row) for row in dataset]


# labels


def test_only_the_response_and_its_eos_are_targets(build, smol_tokenizer):
    made = build([COLOR], train_do_eval=False, validation_split_percentage=0)
    (row,) = rows(made.train)
    assert row["labels"] == [-100] * 34 + [23390, 2]
    assert row["input_ids"][34:] == [23390, 2]
    assert row["length"] == 36
    assert made.counts["train"]["targets"] == 2
    assert len(made.eval) == 0


def test_loss_on_all_has_every_token_but_the_first_as_target(build):
    made = build([COLOR], train_do_eval=False, validation_split_percentage=0, loss_on=LossOn.all)
    (row,) = rows(made.train)
    assert row["labels"] == [-100, *row["input_ids"][1:]]
    assert made.counts["train"]["targets"] == 35


def test_an_eos_that_is_the_pad_token_stays_a_target_in_a_padded_batch(build, smol_tokenizer):
    made = build(
        [COLOR, {**COLOR, "output": "Blue, or a very dark red."}], train_do_eval=False, validation_split_percentage=0
    )
    assert smol_tokenizer.pad_token_id == smol_tokenizer.eos_token_id == 2
    for side in ("left", "right"):
        collator = batches.Collator(2, 8, side, 512)
        batch = collator(rows(made.train))
        assert batch["input_ids"].shape == (2, 48)
        for row, ids, labels, mask in zip(
            rows(made.train), batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True
        ):
            size = row["length"]
            where = slice(48 - size, 48) if side == "left" else slice(size)
            assert ids[where].tolist() == row["input_ids"]
            assert labels[where].tolist() == row["labels"]
            assert labels[labels != -100].tolist()[-1] == 2
            assert mask.sum() == size
            assert mask[where].all()
            rest = np.ones(48, bool)
            rest[where] = False
            assert (labels.numpy()[rest] == -100).all()


def test_bos_is_in_training_and_inference_or_in_neither(build, smol_tokenizer):
    without = build([COLOR], train_do_eval=False, validation_split_percentage=0)
    smol_tokenizer.add_bos_token = True
    try:
        with_bos = build([COLOR], train_do_eval=False, validation_split_percentage=0)
        prompt = prompts.encode_prompt(COLOR, LoraRecipe().data, smol_tokenizer)
    finally:
        smol_tokenizer.add_bos_token = False
    assert with_bos.train[0]["input_ids"] == [1, *without.train[0]["input_ids"]]
    assert with_bos.train[0]["input_ids"][:35] == prompt
    assert with_bos.train[0]["labels"] == [-100] * 35 + [23390, 2]


# truncation and dropping


def test_truncation_cuts_the_response_and_its_eos_never_the_prompt(build, smol_tokenizer):
    record = {**COLOR, "output": "one two three four five six seven eight"}
    made = build([record], train_do_eval=False, validation_split_percentage=0, max_seq_length=37)
    (row,) = rows(made.train)
    assert row["input_ids"][:34] == prompts.encode_prompt(COLOR, LoraRecipe().data, smol_tokenizer)
    assert smol_tokenizer.decode([i for i in row["labels"] if i != -100]) == "one two three"
    assert made.counts["train"]["truncated"] == 1
    assert "1 responses cut at 37 tokens" in data.describe(made, smol_tokenizer)


def test_a_record_without_room_for_a_target_is_dropped_and_counted(build, smol_tokenizer):
    long = {"instruction": "word " * 300, "output": "Blue"}
    made = build([COLOR, long, COLOR], train_do_eval=False, validation_split_percentage=0, max_seq_length=64)
    assert made.counts["train"]["dropped"] == {"prompt alone fills 64 tokens": 1}
    assert [made.counts["train"][k] for k in ("records", "kept", "rows", "targets")] == [3, 2, 2, 4]
    assert "1 of 3 records dropped (prompt alone fills 64 tokens)" in data.describe(made, smol_tokenizer)


def test_no_record_left_is_an_error_that_names_the_file(build):
    long = {"instruction": "word " * 300, "output": "Blue"}
    with pytest.raises(InputError, match=r"records\d+\.json: no train record of 1 .*prompt alone fills 64 tokens: 1"):
        build([long], train_do_eval=False, validation_split_percentage=0, max_seq_length=64)


def test_too_long_drop_keeps_whole_records_only(build):
    made = build(numbered(40), max_seq_length=60, too_long=TooLong.drop)
    assert made.counts["train"]["truncated"] == 0
    assert made.counts["train"]["dropped"]["longer than 60 tokens"] > 0
    assert all(row["input_ids"][-1] == 2 for row in made.train)


def test_an_empty_output_teaches_nothing(build):
    blank = {"instruction": "Say nothing.", "output": " "}
    made = build([COLOR, blank], train_do_eval=False, validation_split_percentage=0)
    assert made.counts["train"]["dropped"] == {"empty output": 1}
    both = build([COLOR, blank], train_do_eval=False, validation_split_percentage=0, loss_on=LossOn.all)
    assert both.counts["train"]["kept"] == 2


# splits


def test_ten_percent_of_twenty_are_two_and_no_train_record(build):
    made = build(numbered(20))
    train, held_out = ({tuple(ids) for ids in split["input_ids"]} for split in (made.train, made.eval))
    assert (len(made.train), len(made.eval)) == (18, 2)
    assert len(train) == 18
    assert len(held_out) == 2
    assert not train & held_out
    assert made.counts["eval"]["overlap"] == 0


def test_the_held_out_records_follow_the_seed_and_not_the_order_of_the_file(build):
    content = numbered(60)
    usual = build(content)
    turned = build(content[::-1])
    other = build(content, holdout_seed=7)
    assert sorted(usual.eval["input_ids"]) == sorted(turned.eval["input_ids"])
    assert usual.fingerprint["held_out"] == turned.fingerprint["held_out"]
    assert usual.fingerprint["files"] != turned.fingerprint["files"]
    assert sorted(usual.eval["input_ids"]) != sorted(other.eval["input_ids"])


@pytest.mark.parametrize("count", [25, 37, 62, 63, 113])
def test_the_first_share_is_the_one_the_datasets_library_cuts(build, count):
    instruction = datasets.ReadInstruction("train", to=4, unit="%", rounding="closest")
    (part,) = instruction.to_absolute({"train": count})
    made = build(numbered(count), holdout=Holdout.first, validation_split_percentage=4)
    assert len(made.eval) == part.to
    whole = build(numbered(count), validation_split_percentage=0, train_do_eval=False)
    assert [*made.eval["input_ids"], *made.train["input_ids"]] == list(whole.train["input_ids"])


def test_the_measured_run_holds_out_2080_of_52002():
    parts = data._hold_out([{"n": n} for n in range(52002)], LoraRecipe().data, "alpaca")
    assert sum(map(len, parts)) == 52002
    cfg = LoraRecipe().data
    cfg.holdout, cfg.validation_split_percentage = Holdout.first, 4
    train, held_out = data._hold_out([{"n": n} for n in range(52002)], cfg, "alpaca")
    (part,) = datasets.ReadInstruction("train", to=4, unit="%").to_absolute({"train": 52002})
    assert [r["n"] for r in held_out] == list(range(part.to)) == list(range(2080))
    assert train[0] == {"n": 2080}


def test_a_file_of_its_own_is_the_eval_split(build, tmp_path):
    (tmp_path / "held.json").write_text(json.dumps(numbered(3)))
    made = build(numbered(10), eval_path=str(tmp_path / "held.json"))
    assert (len(made.train), len(made.eval)) == (10, 3)
    assert made.counts["eval"]["overlap"] == 3
    with pytest.raises(InputError, match=r"data.eval_path: holds the records of data.path"):
        build(tmp_path / "held.json", eval_path=str(tmp_path / "held.json"))


@pytest.mark.parametrize(("count", "percent", "word"), [(3, 10, "evaluate"), (2, 90, "train on")])
def test_a_share_that_leaves_nothing_is_refused(build, count, percent, word):
    with pytest.raises(InputError, match=f"of {count} records leaves none to {word}.*data.eval_path"):
        build(numbered(count), validation_split_percentage=percent)


def test_sample_limits_count_records(build):
    made = build(numbered(60), max_train_samples=5, max_eval_samples=2)
    assert (len(made.train), len(made.eval)) == (5, 2)


# joining and packing


def test_concatenation_joins_everything_and_drops_the_rest(build, smol_tokenizer):
    content = numbered(30)
    options = {"loss_on": LossOn.all, "holdout": Holdout.first, "batching": Batching.concatenated}
    made = build(content, template=Template.alpaca_joined, max_seq_length=128, **options)
    heads = {True: prompts.ALPACA["alpaca"][1], False: prompts.ALPACA["alpaca"][0]}
    joined = []
    for record in content[3:]:
        text = heads[bool(record["input"])].format(**record).rstrip("\n") + record["output"]
        joined += [*smol_tokenizer(text, add_special_tokens=False).input_ids, 2]
    blocks = len(joined) // 128
    assert blocks > 10
    assert [list(ids) for ids in made.train["input_ids"]] == [joined[128 * n : 128 * (n + 1)] for n in range(blocks)]
    assert all(row["labels"] == [-100, *row["input_ids"][1:]] for row in made.train)
    assert made.counts["train"]["remainder"] == len(joined) % 128
    assert made.counts["train"]["padding"] == 0


def test_too_few_tokens_for_a_block_are_named(build):
    options = {"batching": Batching.concatenated, "max_seq_length": 512, "validation_split_percentage": 8}
    with pytest.raises(InputError, match=r"the 2 eval records fill no block of data.max_seq_length=512 tokens.*packed"):
        build(numbered(24), **options)


def test_packing_keeps_records_whole_and_positions_restart(build):
    content = numbered(50)
    padded = build(content, max_seq_length=256)
    made = build(content, max_seq_length=256, batching=Batching.packed)
    whole = {tuple(row["input_ids"]): row["labels"] for row in padded.train}
    seen = []
    for row in made.train:
        starts = [n for n, position in enumerate(row["position_ids"]) if position == 0]
        assert starts[0] == 0
        for start, end in zip(starts, [*starts[1:], row["length"]], strict=True):
            ids = tuple(row["input_ids"][start:end])
            seen.append(ids)
            assert row["position_ids"][start:end] == list(range(end - start))
            assert row["labels"][start:end] == whole[ids]
        assert row["length"] <= 256
    assert sorted(seen) == sorted(whole)
    assert len(made.train) < len(padded.train) / 3
    assert made.counts["train"]["targets"] == padded.counts["train"]["targets"]


def test_first_fit_by_hand():
    assert batches.first_fit([6, 5, 4, 5, 3, 2, 10, 1], 10) == [0, 1, 0, 1, 2, 2, 3, 2]
    assert batches.first_fit([], 10) == []


def test_first_fit_is_the_plain_rule():
    lengths = np.random.default_rng(0).integers(1, 64, 400).tolist()
    room, expected = [], []
    for length in lengths:
        chosen = next((n for n, left in enumerate(room) if left >= length), len(room))
        room += [64] * (chosen == len(room))
        room[chosen] -= length
        expected.append(chosen)
    assert batches.first_fit(lengths, 64) == expected


def test_padding_of_a_pack_is_masked_and_no_part_of_a_sequence():
    row = {"input_ids": [5, 6, 7, 8, 9], "labels": [-100, 6, -100, 8, 9], "position_ids": [0, 1, 0, 1, 2], "length": 5}
    batch = batches.Collator(2, 8, "right", 512)([row])
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9, 2, 2, 2]]
    assert batch["labels"].tolist() == [[-100, 6, -100, 8, 9, -100, -100, -100]]
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1, 2, 0, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1, 0, 0, 0]]


# batches


@pytest.mark.parametrize(
    ("longest", "multiple", "limit", "full", "expected"),
    [
        (33, 8, 512, False, 40),
        (40, 8, 512, False, 40),
        (61, 8, 63, False, 63),
        (5, 8, 64, True, 64),
        (7, 1, 64, False, 7),
    ],
)
def test_padded_length(longest, multiple, limit, full, expected):
    collator = batches.Collator(0, multiple, "right", limit, full)
    row = {"input_ids": [1] * longest, "labels": [1] * longest}
    assert collator([row, {"input_ids": [1], "labels": [1]}])["input_ids"].shape == (2, expected)


def test_the_collator_reaches_loader_workers(build):
    made = build(numbered(20), padding_side=Side.left)
    copy = pickle.loads(pickle.dumps(made.collator))
    assert copy == made.collator
    assert copy.padding_side == "left"


def test_labels_reach_the_batch_as_the_data_has_them():
    row = {"input_ids": [2, 2, 7, 2], "labels": [-100, 9, -100, 11]}  # labels that no id could give
    assert batches.Collator(2, 1, "right", 64)([row])["labels"].tolist() == [row["labels"]]


@pytest.mark.parametrize(("count", "multiple", "total"), [(3, 2, 4), (1, 8, 8), (4, 2, 4)])
def test_blank_rows_add_no_target(build, count, multiple, total):
    made = build(numbered(count), validation_split_percentage=0, train_do_eval=False)
    filled = batches.blank_rows(made.train, multiple)
    assert len(filled) == total
    assert rows(filled)[:count] == rows(made.train)
    for row in rows(filled)[count:]:
        assert row["input_ids"] == made.train[0]["input_ids"]
        assert set(row["labels"]) == {-100}


def test_blank_rows_of_nothing_are_nothing(build):
    made = build(numbered(4), validation_split_percentage=0, train_do_eval=False)
    assert len(batches.blank_rows(made.eval, 4)) == 0


def test_padding_share_by_hand(build):
    cfg = LoraRecipe()
    cfg.train.group_by_length = False
    collator = batches.Collator(0, 4, "right", 512)
    # batches (3, 5) and (9): 8 + 8 + 12 positions for 17 tokens
    assert batches.padding_share([3, 5, 9], cfg, collator, 2) == pytest.approx(1 - 17 / 28)


def test_padding_share_follows_the_trainers_grouping(build):
    cfg = LoraRecipe()
    collator = batches.Collator(0, 1, "right", 512)
    lengths = np.random.default_rng(0).integers(1, 500, 2000).tolist()
    grouped = batches.padding_share(lengths, cfg, collator, 8)
    cfg.train.group_by_length = False
    assert grouped < 0.1 < batches.padding_share(lengths, cfg, collator, 8)


# what is shown


def test_describe_marks_the_trained_tokens_and_says_the_setting(build, smol_tokenizer):
    text = data.describe(build([COLOR] * 3 + numbered(10), show_samples=1), smol_tokenizer)
    assert "loss on response tokens, padded, up to 512 tokens a row" in text
    assert text.count("sample ") == 1
    assert "### Response:\n  | ⟦Blue<|im_end|>⟧" in text


# cache


def test_another_template_makes_other_rows_in_the_same_cache(build, monkeypatch):
    content = numbered(20)
    before = build(content)
    monkeypatch.setitem(
        prompts.ALPACA, "alpaca", tuple(text.replace("Response:\n", "Answer:\n") for text in prompts.ALPACA["alpaca"])
    )
    after = build(content)
    assert list(before.train["input_ids"]) != list(after.train["input_ids"])
    assert before.fingerprint["template"] != after.fingerprint["template"]


def test_every_setting_of_the_rows_has_an_entry_of_its_own(build, smol_tokenizer, tmp_path):
    content = numbered(20)
    variants = [
        {},
        {"max_seq_length": 48},
        {"loss_on": LossOn.all},
        {"batching": Batching.packed},
        {"holdout_seed": 1},
        {"template": Template.tokenizer},
        {"validation_split_percentage": 20},
    ]
    made = [build(content, **options) for options in variants]
    assert len(list((tmp_path / "cache").iterdir())) == len(variants)
    again = build(content)
    assert len(list((tmp_path / "cache").iterdir())) == len(variants)
    assert rows(again.train) == rows(made[0].train)
    assert again.counts == made[0].counts
    assert again.fingerprint == made[0].fingerprint


def test_a_changed_file_and_a_changed_tokenizer_are_not_taken_from_the_cache(build, smol_tokenizer, tmp_path):
    path = tmp_path / "own.json"
    path.write_text(json.dumps(numbered(20)))
    before = build(path)
    path.write_text(json.dumps(numbered(20)).replace("word", "term"))
    assert list(build(path).train["input_ids"]) != list(before.train["input_ids"])
    eos = smol_tokenizer.eos_token
    smol_tokenizer.eos_token = "<|endoftext|>"
    try:
        assert all(row["input_ids"][-1] == 0 for row in build(path).train)
    finally:
        smol_tokenizer.eos_token = eos


@pytest.mark.parametrize("damage", ["flip", "cut", "no meta", "meta"])
def test_a_damaged_entry_is_made_again(build, tmp_path, damage):
    before = rows(build(numbered(20)).train)
    (entry,) = (tmp_path / "cache").iterdir()
    (table,) = (entry / "train").glob("*.arrow")
    content = table.read_bytes()
    if damage == "flip":
        table.write_bytes(content[:-300] + bytes([content[-300] ^ 1]) + content[-299:])
    elif damage == "cut":
        table.write_bytes(content[: len(content) // 2])
    elif damage == "no meta":
        (entry / "meta.json").unlink()
    else:
        (entry / "meta.json").write_text("[]")
    assert rows(build(numbered(20)).train) == before
    assert table.read_bytes() == content
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [entry.name]


def test_an_unwritable_cache_is_named(build, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"data.cache_dir=.*file.*set it to a writable folder"):
        build(numbered(20), cache_dir=str(tmp_path / "file" / "cache"))


def test_rank0_first_guards_the_cache(build, tmp_path):
    import contextlib

    found = []

    @contextlib.contextmanager
    def rank0_first():
        found.append((tmp_path / "cache").exists())
        yield
        found.append(len(list((tmp_path / "cache").iterdir())))

    build(numbered(20), rank0_first=rank0_first)
    assert found == [False, 1]


@pytest.mark.distributed
def test_processes_that_fill_one_cache_at_once_all_get_the_rows(tmp_path):
    program = (
        "import sys, datasets\n"
        "from recipes.pipeline.cache import Entry\n"
        "split = datasets.Dataset.from_dict({'a': list(range(1000))})\n"
        "print('ready', flush=True)\n"
        "sys.stdin.readline()\n"
        "for n in range(8):\n"
        "    entry = Entry(sys.argv[1], f'{n:032}')\n"
        "    splits, meta = entry.read() or entry.fill({'train': split}, {'n': n})\n"
        "    assert list(splits['train']['a']) == list(range(1000)) and meta == {'n': n}\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "cache")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    children = [subprocess.Popen(command, cwd=Path(data.__file__).parents[2], **pipes) for _ in range(3)]
    assert [child.stdout.readline() for child in children] == ["ready\n"] * 3
    for child in children:
        child.stdin.write("go\n")
        child.stdin.flush()
    assert [child.wait(120) for child in children] == [0] * 3
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == [f"{n:032}" for n in range(8)]


# against the known losses


@pytest.fixture(scope="module")
def reference(smol_folder):
    return LlamaForCausalLM.from_pretrained(smol_folder, torch_dtype="float32").eval()


def sample(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False).input_ids
    return {"input_ids": ids, "labels": ids}


@pytest.mark.slow
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("size", [1, 3, 4])
def test_a_batch_changes_no_loss(smol_tokenizer, reference, side, size):
    """33 targets, 2.85270 nats each, whatever the batch and the side of its padding."""
    import torch

    made = batches.plain([sample(smol_tokenizer, text) for text in TEXTS])
    nats = targets = 0
    for start in range(0, 4, size):
        batch = batches.Collator(2, 8, side, 512)(made[start : start + size])
        count = int((batch["labels"][:, 1:] != -100).sum())
        with torch.no_grad():
            nats += reference(**batch, num_items_in_batch=count).loss.item() * count
        targets += count
    assert targets == 33
    assert nats / targets == pytest.approx(2.85270, abs=2e-5)


@pytest.mark.slow
def test_packed_texts_do_not_see_each_other(smol_tokenizer, reference):
    """transformers' own Llama separates sequences by restarting positions when it is given no mask."""
    import torch

    (row,) = batches.packed([sample(smol_tokenizer, TEXTS[0]), sample(smol_tokenizer, TEXTS[2])], 64)
    batch = batches.Collator(2, 1, "right", 64)([row])
    del batch["attention_mask"]
    with torch.no_grad():
        loss = reference(**batch, use_cache=False).loss.item()
    assert loss == pytest.approx(2.77888, abs=2e-5)
