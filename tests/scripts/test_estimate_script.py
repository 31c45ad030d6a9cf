"""`dpo estimate` ranks the ways to divide a model over GPUs that are not here."""

import json
import re

import pytest
from support.runs import small_run

from dpo.commands.estimate import main
from dpo.training.estimate import RATES

SETTINGS = ("batch_size=16", "debug=true")


@pytest.fixture
def settings(rows, run_dir):
    return [text for text in small_run(rows, run_dir, *SETTINGS) if not text.startswith(("exp_name", "local_run_dir"))]


def test_the_fastest_way_that_fits_comes_first_with_its_command(settings, capsys):
    assert main([*settings, "--gpus", "h100:2"]) == 0
    text = capsys.readouterr().out
    header, first, *_ = text.partition("h100:2, ")[2].splitlines()[1:]
    assert header.split() == ["passes", "GB", "s/update", "waits", "hours"]
    assert first.split()[:2] == ["FSDPTrainer", "1"]
    assert f"the first: dpo train {' '.join(settings)} trainer=FSDPTrainer gradient_accumulation_steps=1" in text


@pytest.mark.slow
def test_several_machines_are_divided_in_more_ways(settings, capsys):
    assert main([*settings, "--gpus", "a100:16"]) == 0
    assert "FSDPTrainer fsdp_shard_size=8" in capsys.readouterr().out


@pytest.mark.slow
def test_with_less_memory_it_takes_more_backward_passes_and_says_what_is_lacking(settings, tmp_path, capsys):
    ways = []
    for memory_gb in (1.0, 0.006, 0.0004):
        file = tmp_path / "rates.json"
        file.write_text(json.dumps({"mine": {**RATES["h100"]._asdict(), "memory_gb": memory_gb}}))
        assert main([*settings, "--gpus", "mine:2", "--rates", str(file), "--json"]) == 0
        [cluster] = json.loads(capsys.readouterr().out)
        [fsdp] = [way for way in cluster["ways"] if way["settings"][0] == "trainer=FSDPTrainer"][:1]
        ways.append(fsdp)
    passes = [int(way["settings"][1].removeprefix("gradient_accumulation_steps=")) for way in ways]
    assert passes == sorted(set(passes))
    assert [way["lacking_gb"] > 0 for way in ways] == [False, False, True]


@pytest.mark.slow
def test_a_run_is_compared_with_what_it_measured(finished, capsys):
    run_dir = finished("trainer=FSDPTrainer", "world_size=2", "n_examples=16")
    assert main(["--run", str(run_dir), "--gpus", "h100:2"]) == 0
    assert re.search(r"the run measured \d\.\d GB and \S+ s/update", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--gpus", "h100"], "--gpus h100 must be NAME:N, such as h100:8; NAME is one of a100, h100"),
        (["--gpus", "tpu:8"], "--gpus tpu:8 must be NAME:N"),
        (["--gpus", "h100:8", "--run", "somewhere", "lr=1"], "--run has settings already: leave out lr=1"),
    ],
)
def test_what_it_cannot_estimate_is_refused(arguments, problem, capsys):
    assert main(arguments) == 2
    assert problem in capsys.readouterr().err
