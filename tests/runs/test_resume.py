"""A resumed run is the uninterrupted one, or refused in words."""

import json
import shutil
from datetime import date
from types import SimpleNamespace

import pytest
from support.pytests import refused, slow
from support.runs import TINY, append_text, change_json, find_differences, flip_a_bit, read_metrics, write_rows

from dpo.checkpoint.files import find_checkpoints
from dpo.errors import InputError
from dpo.system.plain_files import read_yaml
from dpo.training.evaluation import Evaluator

WAYS = {
    "in the middle of an epoch": (3, ()),
    "at an epoch's edge": (5, ("n_examples=40",)),
    "in the third epoch": (6, ("n_examples=64", "batch_size=8", "eval_every=32")),
    "at an evaluation": (4, ()),
    "after the last update": (6, ()),
    "after the first update": (1, ("do_first_eval=false",)),
}
QUICK = ("in the third epoch",)


@pytest.mark.parametrize("way", [w if w in QUICK else slow(w) for w in WAYS])
def test_stopped_and_continued_is_never_stopped_bit_for_bit(way, run, run_and_stop, finished, tmp_path, printed):
    updates, settings = WAYS[way]
    whole = finished(*settings)
    run_and_stop("stopped", *settings, after=updates)
    step = f"step-{updates * (8 if 'batch_size=8' in settings else 4)}"
    assert find_checkpoints(tmp_path / "stopped")[0].name == step

    run("stopped", *settings, "resume=auto")

    assert f"continuing from {tmp_path}/stopped/{step}" in printed()
    assert find_differences(whole, tmp_path / "stopped") == []


def test_the_comparison_sees_what_differs(finished):
    found = find_differences(finished("n_examples=8"), finished("n_examples=8", "seed=1"))

    assert {"metrics.jsonl", "policy.lm_head.weight"} <= set(found)
    assert any(place.startswith("optimizer.state") for place in found)


@pytest.mark.slow
def test_samples_that_were_due_are_drawn_first_by_the_run_that_continues(run, finished, run_dir, monkeypatch):
    settings = ("sample_during_eval=true", "n_eval_model_samples=4", "do_first_sampling=false")
    whole, samples = finished(*settings), Evaluator.samples

    def killed_at(n_examples):
        def sample(self, **options):
            if options["n_examples"] == n_examples:
                raise LookupError("the run ends here")
            return samples(self, **options)

        return sample

    for n_examples in (16, 24):  # in the middle, and at the end
        monkeypatch.setattr(Evaluator, "samples", killed_at(n_examples))
        with pytest.raises(LookupError):
            run("run", *settings, "resume=auto")
        assert find_checkpoints(run_dir)[0].name == f"step-{n_examples}"
    monkeypatch.undo()
    run("run", *settings, "resume=auto")
    for name in ("samples.jsonl", "answers.jsonl"):
        assert (run_dir / name).read_bytes() == (whole / name).read_bytes()
    assert find_differences(whole, run_dir) == []


def test_a_complete_run_with_samples_is_complete_and_without_their_key_none_are_drawn(
    run, run_dir, printed, monkeypatch
):
    settings = ("sample_during_eval=true", "n_eval_model_samples=4", "do_first_sampling=false", "n_examples=8",
                "model.cache_implementation=static", "model.autocast=bfloat16")  # fmt: skip
    monkeypatch.setattr(Evaluator, "samples", lambda *_, **options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run("run", *settings)
    run("run", *settings, "resume=auto", "sample_during_eval=false")  # draws none
    assert "this run is already complete" in printed()
    monkeypatch.undo()
    for is_complete in (False, True):
        run("run", *settings, "resume=auto")
        assert ("this run is already complete" in printed()) == is_complete
        assert len((run_dir / "samples.jsonl").read_text().splitlines()) == 4


# --- where to continue ---------------------------------------------------------------------------------------------


def test_a_damaged_checkpoint_is_skipped_with_a_message_and_the_one_before_it_continues(run, copied, finished, printed):
    file = copied("damaged") / "step-24" / "optimizer.pt"
    flip_a_bit(file)

    run("damaged", "resume=auto")

    said = printed()
    assert f"warning: checkpoint skipped: {file}: checksum mismatch" in said
    assert "continuing from" in said
    assert "step-16" in said
    assert find_differences(finished(), file.parents[1]) == []


def test_a_template_writes_the_date_on_which_the_run_began(run, run_dir, tmp_path, monkeypatch):
    """A copy of a checkpoint keeps it too; an export writes the date on which it is used."""
    model = shutil.copytree(TINY, tmp_path / "model")
    template = "{{ strftime_now('%d %b %Y') }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    (model / "chat_template.jinja").write_text(template)
    rows = [{"prompt": f"What is {i}?", "chosen": f"It is {i}.", "rejected": f"Not {i}, but more."} for i in range(20)]
    settings = (
        f"model.name_or_path={model}",
        f"datasets=[{write_rows(tmp_path / 'mine.jsonl', rows)}]",
        "do_first_eval=false",
    )
    days = iter(["2026-01-31", "2026-02-01", "2026-02-02"])
    monkeypatch.setattr("dpo.checkpoint.resume.date", SimpleNamespace(today=lambda: date.fromisoformat(next(days))))
    run("run", *settings, "n_examples=4")
    run("run", *settings, "n_examples=8", "resume=auto", "export=true")
    run("copy", *settings, "n_examples=12", f"resume={run_dir}/step-8")

    assert read_yaml(tmp_path / "copy" / "config.yaml")["chat_template_date"] == "2026-01-31"
    assert (run_dir / "LATEST" / "hf" / "chat_template.jinja").read_text() == template


def test_a_run_keeps_the_autocast_that_it_began_with(run, run_dir):
    run("run", "n_examples=8", "model.autocast=bfloat16")  # as auto chooses on a GPU
    run("run", "n_examples=12", "model.autocast=auto", "resume=auto")
    assert read_yaml(run_dir / "config.yaml")["model"]["autocast"] == "bfloat16"


def test_with_fewer_processes_a_backward_pass_has_no_more_examples_than_when_the_run_began(run, run_dir):
    def train(n_examples: int, *settings: str) -> str:
        run("run", "batch_size=8", f"n_examples={n_examples}", "resume=auto", *settings)
        return (run_dir / "log.txt").read_text().rpartition("updates of 8 examples will run")[2]

    uneven = "batch_size=8 is split over 3 backward passes of all processes, with 2.7 examples on average"
    assert uneven in train(8, "trainer=FSDPTrainer", "world_size=3")
    assert uneven in train(16)
    in_four = "gradient_accumulation_steps=4"
    assert "backward passes" not in train(24, in_four)  # as it was asked for
    said = "8 backward passes of all processes, with 1.0 examples on average (microbatch_size=1)"
    assert said in train(32, in_four, "microbatch_size=1")


def test_a_run_that_ended_before_its_first_checkpoint_keeps_the_rate_of_its_processes(run, run_dir):
    run("run", "n_examples=4")
    change_json(run_dir / "env.json", data_size=4)
    for _ in range(2):  # also at a third attempt
        for path in run_dir.iterdir():
            if path.name != "env.json":
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        run("run", "n_examples=4", "lr=1e-4", "lr_scaling=linear", "warmup_steps=0", "resume=auto")
        assert [metrics["lr"] for metrics in read_metrics(run_dir, "train")] == [4e-4]


def test_a_path_continues_elsewhere_and_takes_the_logs_along(run, copied, finished, tmp_path):
    whole = finished()
    before = (whole / "metrics.jsonl").read_bytes()
    copied("other", "n_examples=8", "seed=1")

    run("fork", f"resume={whole}/step-8")

    assert find_differences(whole, tmp_path / "fork") == []
    assert (whole / "metrics.jsonl").read_bytes() == before
    with refused("already holds a run"):
        run("other", f"resume={whole}/step-8")


def test_a_run_may_be_in_a_directory_that_is_named_like_a_checkpoint(run, tmp_path, printed):
    for n_examples in (4, 8):
        run("step-1", f"n_examples={n_examples}", "resume=auto")
    assert f"continuing from {tmp_path}/step-1/step-4" in printed()


@pytest.mark.parametrize(
    ("place", "refusal"),
    [
        ("nowhere", "finds no complete checkpoint"),
        ("run/step-16", r"would overwrite a later checkpoint of its run \(step-24\)"),
        ("auto", r"finds no complete checkpoint; .*step-24 has no manifest"),
    ],
)
def test_what_cannot_be_continued_is_refused_and_nothing_is_thrown_away(place, refusal, run, copied, run_dir, tmp_path):
    copied("run")
    if place == "auto":
        for manifest in run_dir.glob("step-*/manifest.json"):
            manifest.unlink()
    with refused(refusal):
        run("new" if place == "nowhere" else "run", f"resume={'auto' if place == 'auto' else tmp_path / place}")
    assert not (tmp_path / "new").exists()
    assert len(read_metrics(run_dir, "train")) == 6


# --- what must not change ------------------------------------------------------------------------------------------


def test_settings_that_a_run_keeps_for_life_cannot_change_when_it_continues(run, copied):
    copied("run", "n_examples=8")
    with pytest.raises(InputError) as refused:
        run("run", "resume=auto", "lr=1e-4", "loss.beta=0.5", "batch_size=8", "datasets=[hh,more]", "eval_every=16")
    for change in ("lr=0.0001 (was 0.001)", "loss.beta=0.5 (was 0.1)", "batch_size=8 (was 4)", "datasets="):
        assert change in str(refused.value)
    assert "eval_every" not in str(refused.value)


@pytest.mark.parametrize("loss", ["dpo", slow("sft")])
def test_a_changed_tokenizer_or_model_config_is_noticed_and_weights_that_are_replaced_are_not_read(
    loss, run, run_dir, tmp_path
):
    model = shutil.copytree(TINY, tmp_path / "model")
    settings = (f"loss={loss}", f"model.name_or_path={model}")
    run("run", *settings, "n_examples=8")
    tokenizer, config = ((model / name).read_text() for name in ("tokenizer.json", "config.json"))
    content = json.loads(tokenizer)
    vocabulary = content["model"]["vocab"]
    first, second = [token for token in vocabulary if len(token) == 1][10:12]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (model / "tokenizer.json").write_text(json.dumps(content))
    with refused(r"the tokenizer has changed since .*step-8;"):
        run("run", *settings, "n_examples=12", "resume=auto")
    (model / "tokenizer.json").write_text(tokenizer)

    change_json(model / "config.json", rms_norm_eps=0.5, attention_dropout=0.1)
    with refused(r"rms_norm_eps=0.5 \(was 1e-06\) in the .*config.json has changed since .*step-8;"):
        run("run", *settings, "n_examples=12", "resume=auto")
    (model / "config.json").write_text(config)
    change_json(model / "config.json", use_cache=False)  # has no effect here
    if loss == "sft":  # without a reference
        (model / "model.safetensors").unlink()
    run("run", *settings, "n_examples=12", "resume=auto")
    assert len(read_metrics(run_dir, "train")) == 3


@pytest.mark.slow
def test_models_that_differ_by_less_than_the_references_dtype_shows_still_differ_after_a_resume(run, tmp_path):
    settings = ("optimizer=SGD", "lr=1e-12", "model.reference_dtype=float16", "do_first_eval=false")
    run("whole", *settings, "n_examples=32")
    run("run", *settings, "n_examples=8")
    run("run", *settings, "n_examples=32", "resume=auto")
    whole, resumed = (read_metrics(tmp_path / name, "train")[2:] for name in ("whole", "run"))
    accuracies = [line["rewards_train/accuracies"] for line in whole]
    assert [line["rewards_train/accuracies"] for line in resumed] == accuracies
    assert any(accuracies)


@pytest.mark.parametrize("split", ["train", slow("test")])
def test_changed_data_is_noticed(split, run, rows, run_dir, tmp_path):
    own = shutil.copytree(rows / "hh", tmp_path / "own")
    run("run", "n_examples=8", f"dataset_sources.hh={own}")
    run("run", "n_examples=12", "resume=auto")  # the same texts in another place
    new = {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant: c"}
    append_text(own / f"{split}.jsonl", json.dumps(new))
    records = [run_dir / name for name in ("config.yaml", "preflight.json")]
    before = [record.read_text() for record in records]
    changed = {"train": "training", "test": "test"}[split]
    with refused(rf"the {changed} data has changed since .*step-12"):
        run("run", "resume=auto", f"dataset_sources.hh={own}")
    assert [record.read_text() for record in records] == before
