"""`dpo estimate` ranks the ways to divide a model over GPUs that are not here."""

import json
import re
import shlex

import pytest
from support.pytests import succeeded
from support.runs import TINY, run_script, small_run

from dpo.commands.estimate import main
from dpo.training.estimate import RATES

SETTINGS = ("batch_size=16", "debug=true")
MODEL = (f"model.name_or_path={TINY}", "loss=dpo", "loss.beta=0.1", "datasets=[demo]")


@pytest.fixture
def settings(rows, run_dir):
    return [text for text in small_run(rows, run_dir, *SETTINGS) if not text.startswith("local_run_dir")]


def test_the_fastest_way_that_fits_comes_first_with_its_command(settings, capsys):
    assert main([*settings, "--gpus", "h100:2"]) == 0
    text = capsys.readouterr().out
    header, first, *_ = text.partition("h100:2, ")[2].splitlines()[1:]
    assert header.split() == ["passes", "GB", "s/update", "waits", "hours"]
    assert first.split()[:2] == ["FSDPTrainer", "1"]
    command = re.search("the first: dpo (.+)", text)[1]
    assert " trainer=FSDPTrainer gradient_accumulation_steps=1 activation_checkpointing=" in command
    succeeded(run_script("-m", "dpo", *shlex.split(command), "dry_run=true"))


@pytest.mark.slow
def test_several_machines_are_divided_in_more_ways(settings, capsys):
    assert main([*settings, "--gpus", "a100:16"]) == 0
    text = capsys.readouterr().out
    assert "FSDPTrainer fsdp_shard_size=8" in text
    assert "the first: NNODES=2 NODE_RANK=... MASTER_ADDR=... scripts/run_distributed.sh " in text


@pytest.mark.slow
def test_with_less_memory_it_takes_more_backward_passes_and_says_what_is_lacking(settings, tmp_path, capsys):
    ways = []
    needed_gb = 1.0
    for share in (1.0, 0.8, 0.2):  # of what the way before needs
        memory_gb = share * needed_gb
        file = tmp_path / "rates.json"
        file.write_text(json.dumps({"mine": {**RATES["h100"]._asdict(), "memory_gb": memory_gb}}))
        assert main([*settings, "--gpus", "mine:2", "--rates", str(file), "--json"]) == 0
        [cluster] = json.loads(capsys.readouterr().out)
        kind = {"trainer": "FSDPTrainer", "activation_checkpointing": False}
        [fsdp] = [way for way in cluster["ways"] if kind.items() <= way["settings"].items()]
        ways.append(fsdp)
        needed_gb = sum(fsdp["memory_gb"].values())
    passes = [way["settings"]["gradient_accumulation_steps"] for way in ways]
    assert passes[0] < passes[1] <= passes[2]
    assert [way["lacking_gb"] > 0 for way in ways] == [False, False, True]


@pytest.mark.slow
def test_a_run_is_compared_with_what_it_measured(finished, capsys):
    run_dir = finished("trainer=FSDPTrainer", "world_size=2", "n_examples=16")
    assert main(["--run", str(run_dir), "--gpus", "h100:2"]) == 0
    assert re.search(r"the run measured \d\.\d GB and \S+ s/update", capsys.readouterr().out)


def test_a_run_of_one_process_is_refused(finished, capsys):
    assert main(["--run", str(finished("n_examples=8")), "--gpus", "h100:1"]) == 2
    assert "is a run of trainer=BasicTrainer: estimates are for several processes" in capsys.readouterr().err


def test_an_option_with_a_typo_is_refused_with_the_options_that_there_are(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--gpus", "h100:8", "--jsn"])
    assert "unrecognized arguments: --jsn" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--gpus", "h100"], "--gpus h100 must be NAME:N, such as h100:8; NAME is one of a100, h100"),
        (["--gpus", "tpu:8"], "--gpus tpu:8 must be NAME:N"),
        (["--gpus", "h100:8", "world_size=8"], "estimate tries trainer, fsdp_shard_size, "),
        (["--gpus", "h100:8", "online=online", "online.scorer=shorter", *MODEL], "online=online is not estimated"),
        (["--gpus", "h100:8", "--rates", "missing.json"], "missing.json does not exist"),
        (["--gpus", "h100:8", "--run", "missing"], "missing"),
        (["--gpus", "h100:8", "--run", "somewhere", "lr=1"], "--run has settings already: leave out lr=1"),
    ],
)
def test_what_it_cannot_estimate_is_refused(arguments, problem, capsys):
    assert main(arguments) == 2
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize(
    "rates",
    [
        '{"h100": {"tflops": {"bfloat16": 400}}}',
        '{"h100": {"memory_bg": 80}}',
        "[]",
        '{"mine": 5}',
        '{"mine": {"memory_gb": 80}}',
        '{"h100": {"memory_gb": "80"}}',
        '{"h100": {"memory_gb": 0}}',
    ],
)
def test_rates_that_are_not_are_refused(rates, tmp_path, capsys):
    (tmp_path / "rates.json").write_text(rates)
    assert main(["--gpus", "h100:8", "--rates", str(tmp_path / "rates.json")]) == 2
    assert capsys.readouterr().err.startswith(f"error: --rates {tmp_path}/rates.json")
