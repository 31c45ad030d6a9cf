"""One process of a machine does the work; the others wait as long as it takes and share what it made."""

from __future__ import annotations

import gc
import gzip
import json
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist
from support import warm
from support.runs import GOLDEN, make_environment, train, write_rows

import preference_datasets
from benchmarks.harness import compose
from dpo.data import preflight
from dpo.data.tokenizer import load_tokenizer
from dpo.settings.plan import resolve
from dpo.system import sharing
from dpo.system.launching import launch
from dpo.system.sharing import once_per_machine

N_ROWS, TEXT_BYTES = 2000, 10_000


class Interrupted(Exception):
    pass


def own_memory() -> int:
    """Bytes of this process that no other one has, and that no file holds."""
    gc.collect()
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss_Anon"))


def share_a_word(rank, world_size, folder):
    """Three calls: on one machine, on two, and one that a signal breaks off where it is waited for."""

    def make(seconds: float = 0.0) -> str:
        with (folder / "makers").open("a") as file:
            file.write(f"{rank} ")
        time.sleep(seconds)
        return f"{rank}'s"

    share = partial(once_per_machine, give=str, take="taken: {}".format, silence_secs=60)
    got = [share(make)]
    sharing._machine = f"machine {rank // 2}".format
    got.append(share(make))
    signal.signal(signal.SIGALRM, interrupt)
    if rank == 1:
        signal.setitimer(signal.ITIMER_REAL, 1.0)
    start = time.monotonic()
    try:
        got.append(share(partial(make, 4.0 if rank == 0 else 0.0)))
    except Interrupted:
        got.append(f"broken off: {time.monotonic() - start < 3}")
    (folder / f"{rank}.json").write_text(json.dumps(got))


def interrupt(number, frame):
    raise Interrupted


def test_the_first_process_of_each_machine_makes_it_and_a_signal_reaches_those_that_wait(tmp_path):
    warm.launch(share_a_word, 3, tmp_path, process_group=True)

    got = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    assert [one for one, *_ in got] == ["0's", "taken: 0's", "taken: 0's"]
    assert [two for _, two, _ in got] == ["0's", "taken: 0's", "2's"]
    assert [three for *_, three in got] == ["0's", "broken off: True", "2's"]
    assert sorted((tmp_path / "makers").read_text().split()) == ["0", "0", "0", "2", "2"]


def test_who_shows_signs_of_life_may_take_longer_than_the_timeout():
    store, key, made = dist.HashStore(), "rank 0", []
    work = partial(sharing._make, lambda: time.sleep(2) or "word", str, store, key, 0.05)
    thread = threading.Thread(target=lambda: made.append(work()))
    thread.start()
    assert sharing._wait(store, {0: key}, silence_secs=0.5) == {0: "word"}
    thread.join()
    assert made == ["word"]


def test_silence_ends_the_wait():
    with pytest.raises(dist.DistError, match=r"rank 3 sent no heartbeat for 0\.3 s"):
        sharing._wait(dist.HashStore(), {3: "rank 3"}, silence_secs=0.3)


def test_a_failure_ends_the_wait_of_the_others_and_is_raised_where_it_happened():
    store = dist.HashStore()
    with pytest.raises(ZeroDivisionError):
        sharing._make(lambda: 1 / 0, str, store, "rank 0", 0.05)
    with pytest.raises(dist.DistError, match="rank 0 failed while the others waited for it"):
        sharing._wait(store, {0: "rank 0", 1: "rank 1"}, silence_secs=60)


def test_alone_nothing_is_shared():
    assert once_per_machine(lambda: 3, give=pytest.fail, take=pytest.fail, silence_secs=0) == 3


# --- the data of a run ---------------------------------------------------------------------------------------------


def load_and_weigh(rank, world_size, config, folder):
    calls, load_rows = [], preference_datasets.load_rows
    preference_datasets.load_rows = lambda *arguments: calls.append(arguments) or load_rows(*arguments)
    preflight.inspect_split = partial(preflight.inspect_split, sample_size=10)  # or it would mostly tokenize
    load_tokenizer(str(GOLDEN / "tiny-llama"))("a")
    before = own_memory()
    data = preference_datasets.load_data(resolve(config), silent=True)
    first = next(iter(data.train))
    found = {
        "loads": len(calls),
        "bytes": own_memory() - before,
        "digest": data.digest,
        "updates": data.report.updates,
        "largest": data.encode.largest,
        "first": [len(first.text), first.examples(False)[0]["chosen"][:5]],
    }
    (folder / f"{rank}.json").write_text(json.dumps(found))


@pytest.fixture
def large_texts(tmp_path):
    """2,000 pairs of 20 KB: 40 MB."""
    dialogue = "\n\nHuman: {}\n\nAssistant: {}"
    for split, n in (("train", N_ROWS), ("test", 4)):
        rows = [
            {key: dialogue.format(i, f"{key} {i} " + "x" * TEXT_BYTES) for key in ("chosen", "rejected")}
            for i in range(n)
        ]
        write_rows(tmp_path / "rows" / f"{split}.jsonl", rows)
    return tmp_path / "rows"


@pytest.mark.slow
def test_processes_load_once_and_hold_no_texts_of_their_own(large_texts, tmp_path):
    config = compose(
        [f"model.name_or_path={GOLDEN / 'tiny-llama'}", "model.block_name=null", "datasets=[hh]", "loss=dpo",
         "loss.beta=0.1", f"dataset_sources.hh={large_texts}", "trainer=FSDPTrainer", "batch_size=4", "max_length=64",
         "max_prompt_length=32", "eval_batch_size=4", "n_epochs=1", "n_examples=null", f"local_dirs=[{tmp_path}]"]
    )  # fmt: skip
    launch(load_and_weigh, 2, config, tmp_path, process_group=True)

    one, two = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert (one.pop("loads"), two.pop("loads")) == (2, 0)  # two splits
    bytes_of = [found.pop("bytes") for found in (one, two)]
    assert max(bytes_of) < N_ROWS * 2 * TEXT_BYTES / 2, bytes_of
    assert one == two
    assert one["updates"] == 500
    assert one["first"] == [len("\n\nHuman: 0\n\nAssistant:"), " chos"]


def test_a_bad_row_ends_all_processes_with_one_sentence(rows, command, tmp_path):
    good = [json.loads(line) for line in (rows / "hh" / "train.jsonl").read_text().splitlines()]
    write_rows(tmp_path / "bad" / "train.jsonl", [*good, {"chosen": "\n\nAssistant: a"}])
    write_rows(tmp_path / "bad" / "test.jsonl", good)

    sharded = ("trainer=FSDPTrainer", "world_size=2", f"dataset_sources.hh={tmp_path / 'bad'}")
    result = train(*command("run", *sharded))

    assert result.returncode == 2, result.stderr
    assert [line for line in result.stderr.splitlines() if "error" in line.lower()] == [
        f"error: record 23 of {tmp_path / 'bad'} (train): rejected is missing, and must be text; "
        "there is chosen: add it, or remove the record"
    ]
    assert "Traceback" not in result.stderr


def test_asked_to_stop_while_the_data_is_loaded_all_processes_stop_at_once(rows, command, tmp_path):
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "train.jsonl.gz").write_bytes(gzip.compress(b"\n" * 2**28))  # takes a minute
    overrides = command("run", "trainer=FSDPTrainer", "world_size=2", f"dataset_sources.hh={tmp_path / 'slow'}")
    process = warm.Python("train.py", *overrides, environment=make_environment(), merge=True)
    try:
        said = ""
        while "reading the data of" not in said and process.poll() is None:
            time.sleep(0.1)
            said += process.stdout.read()
        process.send_signal(signal.SIGTERM)
        start = time.monotonic()
        assert process.wait(60) == 143, process.stdout.read()
        assert time.monotonic() - start < 20
    finally:
        process.kill()


def test_large_data_goes_to_the_local_directory_and_leaves_nothing_there(tmp_path, monkeypatch, run):
    monkeypatch.setattr("dpo.data.prompts.IN_MEMORY", 100)
    run("run", f"local_dirs=[{tmp_path / 'scratch'}]")
    assert os.path.exists(tmp_path / "scratch")
    assert [path for path in (tmp_path / "scratch").rglob("*") if path.is_file()] == []
