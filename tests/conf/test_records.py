"""The repository's own records are what the smoke experiment says they are."""

import json
from pathlib import Path

RECORDS = [
    json.loads(line)
    for line in (Path(__file__).resolve().parents[2] / "conf" / "data" / "smoke.jsonl").read_text("utf-8").splitlines()
]


def test_there_are_enough_and_each_is_an_alpaca_record():
    assert len(RECORDS) >= 400
    for record in RECORDS:
        assert list(record) == ["instruction", "input", "output"]
        assert all(isinstance(value, str) and value == value.strip() for value in record.values())
        assert record["instruction"] and record["output"]


def test_no_task_is_given_twice():
    tasks = [(record["instruction"].lower(), record["input"].lower()) for record in RECORDS]
    assert len(set(tasks)) == len(tasks)
    assert len({record["instruction"] for record in RECORDS}) >= 0.9 * len(RECORDS)


def test_about_half_have_an_input_and_none_is_long():
    share = sum(bool(record["input"]) for record in RECORDS) / len(RECORDS)
    assert 0.45 <= share <= 0.55
    assert max(sum(map(len, record.values())) for record in RECORDS) <= 350
