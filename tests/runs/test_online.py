"""Online DPO: drawing and ranking answers, and what scorers may do.

That it is computed alike everywhere is in test_invariance.py.
"""

import math
import os
import re
import signal
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support import runs
from support.faults import kill_after_update, start_run
from support.models import save_reward_model
from support.pytests import refused, slow
from support.runs import assert_documented, find_differences, list_updates, read_metrics, read_rows, train, train_here
from support.trainers import compose, make, next_batch

from dpo.analysis.ledger import read_ledger
from dpo.analysis.runs import read_run
from dpo.checkpoint.files import read_state
from dpo.data.examples import Example
from dpo.models.answers import Answer, generate
from dpo.models.layouts import Padded
from dpo.models.scoring import ScorerFailed, load_scorer
from dpo.reporting.anomalies import NonFiniteGuard
from dpo.reporting.events import Update
from dpo.reporting.files import FileLogger
from dpo.settings.plan import resolve
from dpo.system.signals import Stopped
from dpo.training.online import Sampler, choose_pair, draw_label

ONLINE = (
    "online=online", "online.scorer=shorter", "online.max_new_tokens=8", "optimizer=SGD", "lr=0.3", "warmup_steps=0",
    "n_examples=12", "model.reference_dtype=null",
)  # fmt: skip
SHARDED = ("trainer=FSDPTrainer", "world_size=2")
DRAWN = ("online=online", "online.scorer=keyword", "online.keyword=e", "online.max_new_tokens=8", "lr=0.1")
WHY = SimpleNamespace(text="Why?")
IN_EIGHTS = ("batch_size=8", "eval_batch_size=8", "n_eval_examples=8")


@pytest.fixture
def seen(monkeypatch) -> list[Update]:
    """Each update of the runs in this process."""
    seen, log = [], FileLogger.on_update

    def log_and_keep(self: FileLogger, update) -> None:
        seen.append(update)
        log(self, update)

    monkeypatch.setattr(FileLogger, "on_update", log_and_keep)
    return seen


def write_scorer(folder: Path, body: str, name: str = "rewards.py") -> tuple[str, ...]:
    (folder / name).write_text(f"def score(prompts, completions):\n    {body}\n")
    return ("online.scorer=function", f"online.function={folder / name}:score")


# --- what is drawn -------------------------------------------------------------------------------------------------


def test_best_and_worst_of_what_the_policy_says_are_the_pair(run, seen, run_dir):
    run("run", *ONLINE, "online.n_samples=3", "online.ties=keep", "online.missing_eos_penalty=2.5")

    lines = read_metrics(run_dir, "train")
    assert lines[0]["loss/train"] == pytest.approx(math.log(2))
    assert lines[0]["online/kl"] == 0 != lines[-1]["online/kl"]
    for line, update in zip(lines, seen, strict=True):
        assert len({example.id for example in update.examples}) == len(update.drawn) == 4  # each prompt once
        answers = []
        for place, drawn in update.drawn.items():
            three = drawn.answers
            answers += three
            scores = [-len(one.tokens) - 2.5 * (not one.ended) for one in three]
            assert [one.score for one in three] == scores
            assert all(len(one.tokens) == 8 or one.ended for one in three)
            assert [side.score for side in drawn.pair] == [max(scores), min(scores)]
            assert update.examples[place].responses == tuple(side.tokens for side in drawn.pair)
        assert line["online/score"] == pytest.approx(sum(one.score for one in answers) / 12)
        assert line["online/length"] == pytest.approx(sum(len(one.tokens) for one in answers) / 12)
        assert line["online/eos"] == pytest.approx(sum(one.ended for one in answers) / 12)
    assert_documented(run_dir)
    assert len({one.tokens for one in answers}) > 6  # each has a seed of its own


@pytest.mark.parametrize(
    ("answers", "pair"),
    [
        ("a1 b3 c2 d1", "b3 d1"),  # among equal scores the last is the worst
        ("a1 b3 c3 d1", "b3 d1"),  # and the first the best
        ("a1 a0", "a1 a0"),
        ("a3 b1 a0", "a3 b1"),  # of a scorer that is noisy: another answer than the best
        ("a3 a1 a0", "a3 a0"),
        ("a2 a2 b2 a2", "a2 b2"),
    ],
)
def test_the_worst_is_another_answer_than_the_best(answers, pair):
    drawn = choose_pair(WHY, [Answer(one[0], (ord(one[0]),), True, float(one[1])) for one in answers.split()])
    assert " ".join(f"{one.text}{one.score:.0f}" for one in drawn.pair) == pair


@pytest.mark.parametrize("difference", [0.0, 1.0, 3.0, 2000.0])
def test_bradley_terry_labels_prefer_the_best_as_often_as_their_model_says(difference):
    hard = choose_pair(WHY, [Answer("a", (1,), True, difference), Answer("b", (2,), True, 0.0)])
    labelled = [draw_label(hard, (0, update, 4, prompt)) for update in range(20) for prompt in range(100)]
    expected = 1 / (1 + math.exp(-difference))
    assert sum(not one.is_flipped for one in labelled) / 2000 == pytest.approx(expected, abs=0.03)
    assert {one.pair for one in labelled if one.is_flipped} <= {hard.pair[::-1]}
    assert labelled[:9] == [draw_label(hard, (0, 0, 4, prompt)) for prompt in range(9)]


def test_a_flipped_label_is_trained_on_and_logged(run, seen, run_dir, tmp_path):
    settings = ("online.labels=bradley_terry", "online.n_samples=3", "online.ties=keep", "ledger=true")
    scorer = write_scorer(tmp_path, "return [len(c) / 20 for c in completions]")
    run("run", *ONLINE, *scorer, *settings, *IN_EIGHTS, "n_examples=32")
    flipped = [drawn for update in seen for drawn in update.drawn.values() if drawn.is_flipped]
    assert 0 < len(flipped) < 16
    for update in seen:
        for place, drawn in update.drawn.items():
            assert update.examples[place].responses == tuple(side.tokens for side in drawn.pair)
    shares = [line["online/flipped"] for line in read_metrics(run_dir, "train")]
    assert sum(shares) * 8 == pytest.approx(len(flipped))
    rows = read_ledger(run_dir).to_pylist()
    preferred_less = [row for row in rows if row["split"] == "train" and row["score_chosen"] < row["score_rejected"]]
    assert len(preferred_less) == sum(drawn.pair[0].score < drawn.pair[1].score for drawn in flipped)
    assert any(row.get("flipped") for row in read_rows(run_dir / "samples.jsonl"))


# --- held-out prompts ----------------------------------------------------------------------------------------------


def test_an_evaluation_measures_an_answer_to_each_held_out_prompt(tmp_path):
    """The metrics are computed by hand from the answers of the two models."""
    trainer = make(compose(tmp_path, "run", *DRAWN, "online.missing_eos_penalty=0.5"))
    for _ in range(2):
        trainer.train_step(next_batch(trainer))
    metrics, batches = trainer.batches.evaluate(), trainer.batches
    assert batches.evaluate() == metrics  # the same answers again

    models = {"policy": trainer.policy.eval(), "reference": trainer.reference_model}
    prompts = [example.prompt for group in batches.held_out_examples() for example in group]
    answers, scores = {}, {}
    for who, model in enumerate(models.values()):
        numbers = [2**62 + 2 * prompt.index_in_split + who for prompt in batches.held_out]
        answers[who] = generate(model, trainer.tokenizer, prompts, numbers, batches.sampling)
        scores[who] = np.array([one.text.count("e") - 0.5 * (not one.ended) for one in answers[who]])
    [microbatch] = Padded().split([Example(p, (a.tokens,)) for p, a in zip(prompts, answers[0], strict=True)], 1)
    with torch.no_grad():
        ours, theirs = (Padded().forward(model, microbatch.inputs).logps[0].sum(-1) for model in models.values())
    expected = {"win_rate": (scores[0] > scores[1]) + (scores[0] == scores[1]) / 2, "kl": (ours - theirs).numpy()}
    for who, prefix in enumerate(("", "reference_")):
        expected[f"{prefix}score"] = scores[who]
        expected[f"{prefix}length"] = [len(one.tokens) for one in answers[who]]
        expected[f"{prefix}eos"] = [one.ended for one in answers[who]]
    assert len(prompts) == 4
    assert {one.tokens for one in answers[0]}.isdisjoint(one.tokens for one in answers[1])
    assert metrics.keys() == {f"online_eval/{name}{suffix}" for name in expected for suffix in ("", "_se")}
    for name, values in expected.items():
        assert metrics[f"online_eval/{name}"] == pytest.approx(np.mean(values), abs=1e-5), name
        error = np.std(values, ddof=1) / 2
        assert metrics[f"online_eval/{name}_se"] == pytest.approx(error, abs=1e-5), name


@pytest.mark.slow
def test_prompts_without_responses_are_enough(run, printed, run_dir, tmp_path):
    prompts_alone = runs.write_prompts(tmp_path / "prompts")
    settings = (*ONLINE, f"datasets={prompts_alone}", "sample_during_eval=true", "ledger=true", "eval_every=4")
    run("run", *settings)
    assert "train: prompts 22, " in printed()
    evaluations = read_metrics(run_dir, "eval")
    assert all(name.partition("/")[0] == "online_eval" for name in [*evaluations[-1]][3:])
    assert_documented(run_dir)
    best = max(evaluations[1:], key=lambda line: line["online_eval/score"])  # the first of them
    assert (run_dir / "BEST").resolve().name == f"step-{best['examples']}"
    found = read_run(run_dir)
    assert (len(found.samples), found.problems) == (12, [])  # the first are not drawn: they cost too much
    with refused(r"mix_offline=0.25 trains on the data's pairs, and 22 of 22 prompts"):
        run("mixed", *settings, "online.mix_offline=0.25")


# --- ties and offline pairs ----------------------------------------------------------------------------------------


def test_a_batch_of_ties_alone_changes_nothing(run, run_dir, tmp_path):
    """Nor does the momentum of an earlier batch with one pair."""
    calls = tmp_path / "calls"
    scorer = write_scorer(
        tmp_path,
        # The calls before are for held-out answers of policy and reference.
        f"open({str(calls)!r}, 'a').write('.')\n    first = len(open({str(calls)!r}).read()) == 3\n"
        "    return [float(first and i == 0) for i in range(len(completions))]",
    )
    run("run", *ONLINE, *scorer, "optimizer=AdamW", "lr=1e-2", "eval_every=4")
    first, *others = read_metrics(run_dir, "train")
    assert (first["online/ties"], [line["online/ties"] for line in others]) == (0.75, [1, 1])
    assert first["grad_norm"] > 0
    assert [line["grad_norm"] for line in others] == [0, 0]
    states = [read_state(run_dir / f"step-{n}" / "policy.pt") for n in (4, 12)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    before, after = (line["logps_eval/chosen"] for line in read_metrics(run_dir, "eval")[:2])
    assert before != after  # the first batch was trained on


def test_what_does_not_count_leaves_the_gradient_of_the_rest(tmp_path):
    """Half of a batch without weight is as if left out."""
    for loss in ("dpo", "aot"):
        settings = (f"loss={loss}", "loss.beta=0.1", "batch_size=4", "gradient_accumulation_steps=2")
        config = compose(tmp_path, loss, *settings)
        trainers = [make(config) for _ in range(2)]
        batch = next(trainers[0].train_iterator)
        weights, some = [1.0, 0.0, 1.0, 0.0], batch.examples[::2]
        alone = trainers[1].batches.lay_out(some, 2)
        ours = trainers[0].train_step(batch._replace(weights=weights, cache_rows=()))
        theirs = trainers[1].train_step(alone)
        for name in ("loss/train", "grad_norm", "rewards_train/margins", "logps_train/chosen"):
            assert ours.metrics[name] == pytest.approx(theirs.metrics[name], rel=1e-4), (loss, name)


# --- what continues ------------------------------------------------------------------------------------------------

RANDOM = "from random import random; from numpy.random import rand; import torch\n"
RANDOM += "    return [random() + rand() + torch.rand(1) for c in completions]"


@pytest.mark.slow
def test_a_random_scorer_gives_a_killed_run_and_several_processes_the_scores_of_one(finished, command, run, tmp_path):
    """The update that dies had drawn and scored its pairs."""
    settings = (*ONLINE, *IN_EIGHTS, *write_scorer(tmp_path, RANDOM), "n_examples=32", "eval_every=16")
    whole = finished(*settings)
    killed = start_run(command("killed", *settings), partial(kill_after_update, 3))
    assert killed.wait() == -signal.SIGKILL, killed.text
    assert (tmp_path / "killed" / "LATEST").resolve().name == "step-16"
    run("killed", *settings, "resume=auto")
    assert find_differences(whole, tmp_path / "killed") == []

    train_here(command("two", *settings, *SHARDED, "do_first_eval=false"))
    one, two = ([line["online/score"] for line in read_metrics(d, "train")] for d in (whole, tmp_path / "two"))
    assert one == two
    assert len({*one}) == 4


@pytest.mark.parametrize("during", ["an update", slow("an evaluation")])
def test_a_stop_breaks_sampling_off_and_saves(during, finished, run, run_dir, monkeypatch):
    """The run continues as if it had not been stopped."""
    settings = (*ONLINE, "do_first_eval=false", "eval_every=8", "eval_batch_size=8")
    stopping_call = {"an update": 2, "an evaluation": 4}[during]  # the reference's answers
    whole = finished(*settings)
    answer_batch, calls = Sampler.answer, []

    def stop_then_answer(self: Sampler, *asked):
        calls.append(asked)
        if len(calls) == stopping_call:
            os.kill(os.getpid(), signal.SIGTERM)
        return answer_batch(self, *asked)

    monkeypatch.setattr(Sampler, "answer", stop_then_answer)
    with pytest.raises(Stopped):
        run("run", *settings)
    assert len(calls) == stopping_call
    assert (run_dir / "LATEST").resolve().name == ("step-4" if during == "an update" else "step-8")
    run("run", *settings, "resume=auto")
    assert find_differences(whole, run_dir) == []


SYNC = (*ONLINE, "online.sync_reference_every=2", "loss.beta=0.1", "optimizer=AdamW", "lr=1e-2", "eval_every=12")


@pytest.mark.slow
def test_a_sync_comes_at_its_time_though_the_update_was_not_taken(run, run_dir, tmp_path, monkeypatch):
    """The reference is a copy after update 2, which is not taken.

    Update 3, of a resumed run, begins at a KL of 0, where nothing is ranked.
    """
    scorer = write_scorer(tmp_path, "return range(len(completions))")
    monkeypatch.setattr(NonFiniteGuard, "allows", lambda self, update: update.number != 2)
    run("run", *SYNC, *scorer, "n_examples=8")
    run("run", *SYNC, *scorer, "resume=auto")

    first, second, third = read_metrics(run_dir, "train")
    assert first["online/kl"] == third["online/kl"] == 0 != second["online/kl"]
    assert third["loss/train"] == pytest.approx(math.log(2))
    assert ["rewards_train/accuracies" in line for line in (first, second, third)] == [False, True, False]


# --- scorers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return [1 / 0 for c in completions]", r"failed: ZeroDivisionError: .* \(.*rewards.py, line 2\)"),
        ("return [0.0]", "gave 1 scores to 8 answers"),
        ("return [float('nan')] * len(completions)", "gave the score nan, which is not finite"),
        ("return ['12'] * len(completions)", "failed: TypeError: the score '12' is text"),
        ("raise SystemExit(0)", r"failed: SystemExit: 0 \(.*rewards.py, line 2\)"),
        ("next(iter([]))", "failed: StopIteration: "),
    ],
)
def test_whatever_a_function_does_wrong_is_a_sentence(body, said, command, tmp_path):
    plan = resolve(runs.compose(*command("run", *ONLINE, *write_scorer(tmp_path, body))))
    score = load_scorer(plan, torch.device("cpu"), rows=8)
    with pytest.raises(ScorerFailed, match=f"rewards.py:score {said}"):
        score([WHY] * 8, [SimpleNamespace(text="So.")] * 8)


@pytest.mark.parametrize("grid", [(), slow(SHARDED)])
def test_what_was_trained_is_saved_when_the_scorer_fails_and_it_continues_from_there(grid, command, run_dir, tmp_path):
    """The scorer fails once, as a service would."""
    body = f"""
    with open({str(tmp_path / "calls")!r}, "a+") as calls:
        calls.write(".")
        calls.seek(0)
        if len(calls.read()) == 3:
            raise ConnectionError("no answer from the scorer's server")
    return [-len(c) for c in completions]"""
    settings = (*ONLINE, *write_scorer(tmp_path, body), *IN_EIGHTS, "n_examples=32", *grid)
    result = train(*command("run", *settings, "do_first_eval=false", "eval_every=32"))
    assert result.returncode == 1
    [sentence] = [line for line in result.stderr.splitlines() if "ConnectionError: no answer" in line]
    assert f"{tmp_path}/rewards.py:score failed" in sentence
    assert "Traceback" not in result.stderr
    assert (run_dir / "LATEST").resolve().name == "step-16"
    train_here(command("run", *settings, "resume=auto"))
    assert list_updates(run_dir) == [8, 16, 24, 32]


def test_a_function_whose_helper_has_changed_does_not_continue_the_run(run, tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    helper = tmp_path / "package" / "deep.py"
    helper.touch()
    settings = (*ONLINE, *write_scorer(tmp_path, "from package import deep; return [0.0] * len(completions)"))
    run("run", *settings, "n_examples=4")
    helper.write_text("more = 1\n")
    with refused(r"rewards.py:score has changed since the checkpoint"):
        run("run", *settings, "resume=auto")


@pytest.mark.parametrize(
    ("code", "said"), [("score = 5", "has no function score"), ("def(", "cannot be run: SyntaxError")]
)
def test_a_file_without_the_function_is_refused_before_the_run_trains(code, said, run, run_dir, tmp_path):
    (tmp_path / "rewards.py").write_text(code)
    with refused(re.escape(said)):
        run("run", *ONLINE, "online.scorer=function", f"online.function={tmp_path / 'rewards.py'}:score")
    assert not (run_dir / "metrics.jsonl").exists()


# --- reward models -------------------------------------------------------------------------------------------------

REWARDED = (*ONLINE, "online.scorer=reward_model", "max_length=44")


def test_a_template_that_rejects_a_prompt_of_the_data_ends_the_run_before_it_trains(tokenizer, run, run_dir, tmp_path):
    """Gemma's template rejects system messages. The prompt is the last one of the data."""
    template = "{% for m in messages %}{% if 'number 10' in m['content'] %}{{ raise_exception('not ten') }}{% endif %}"
    model = save_reward_model(tmp_path / "reward", "llama", tokenizer, template=template + "{% endfor %}ok")
    with refused(r"its tokenizer's chat template rejects the prompt.*not ten"):
        run("run", *REWARDED, f"online.reward_model={model}")
    assert not (run_dir / "metrics.jsonl").exists()
