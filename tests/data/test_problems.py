"""Records that cannot be used are all named, and refused or left out; other problems name their records."""

import json

import pytest
from support.pytests import refused
from support.runs import read_rows, write_rows

from dpo.data.loading import load_splits
from dpo.data.schema import LISTED
from dpo.errors import InputError

GOOD = {"prompt": "Is it?", "chosen": " Yes.", "rejected": " No."}
NAMED = {"prompt": "Is it?", "response_a": " a", "response_b": " b", "winner": "a"}


@pytest.mark.parametrize(
    ("good", "bad", "reason"),
    [
        (GOOD, {**GOOD, "chosen": " \n"}, "the response to learn is empty"),
        (GOOD, {**GOOD, "rejected": " No.<|endoftext|> Yes."}, "contains the EOS token"),
        (GOOD, 7, "is 7, not an object with fields"),
        (GOOD, "{broken", "is not JSON"),
        (NAMED, {**NAMED, "winner": "x"}, "does not say whether response_a or response_b is better"),
    ],
)
def test_a_bad_record_is_refused_by_number_or_left_out(good, bad, reason, tokenizer, tmp_path):
    file = tmp_path / "mine.jsonl"
    text = bad if isinstance(bad, str) else json.dumps(bad)
    goods = [json.dumps(good).replace("Is it?", f"Is it {i}?") for i in range(3)]
    file.write_text("\n".join([goods[0], text, goods[1], text, goods[2]]) + "\n")
    sources = {"mine": str(file)}
    with pytest.raises(InputError) as error:
        load_splits("mine", tokenizer, sources)
    assert str(error.value).startswith("dataset 'mine': 2 records that cannot be used")
    assert str(error.value).count(reason) == 2
    assert [f"{n} of {file}" in str(error.value) for n in range(1, 6)] == [False, True, False, True, False]

    splits = load_splits("mine", tokenizer, sources, bad_records="skip")
    kept = {row for split in splits for prompt in split.values() for row in prompt.rows}
    assert (kept, [number for number, _ in splits[0].bad_records]) == ({1, 3, 5}, [2, 4])
    notes = [*splits[0].notes, *splits[1].notes]
    assert sum("left out: dataset 'mine': 2 records" in note for note in notes) == 1

    file.write_text(text + "\n")
    with refused(r"record|line"):
        load_splits("mine", tokenizer, sources, bad_records="skip")


def test_a_run_names_all_its_problems_in_a_file(run, tmp_path, printed):
    rows = [{**GOOD, "prompt": f"What is {i}?"} for i in range(40)]
    bad = [{**rows[0], "chosen": ""}] * (LISTED + 2)
    pairs = [rows[0], {**rows[1], "chosen": rows[1]["rejected"], "rejected": rows[1]["chosen"]}]
    file = write_rows(tmp_path / "mine.jsonl", [*rows, *bad, *pairs])
    own = ("datasets=[mine]", f"dataset_sources.mine={file}", "n_examples=4", f"local_dirs=[{tmp_path}/cache]")

    with pytest.raises(InputError) as error:
        run("refused", *own)
    assert str(error.value).count("is empty") == LISTED

    for name in ("run", "again"):  # the second run finds the table of the first
        run(name, *own, "bad_records=skip")
        problems = read_rows(tmp_path / name / "data_problems.jsonl")
        expected = {("bad record", n) for n in range(41, 63)} | {("duplicated pair", 63), ("contradictory example", 64)}
        found = {(each["problem"], each["record"]) for each in problems}
        assert {
            (kind, n) for kind, n in found if kind in ("bad record", "duplicated pair", "contradictory example")
        } == expected
        assert "duplicated pairs 1, contradictory examples 1, " in printed()
