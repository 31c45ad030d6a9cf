"""The page of the report: one file, every text escaped."""

import base64
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path

import pytest
from support.records import evaluation, rewards, sample, update, write_run
from support.runs import write_rows

from dpo.analysis.curves import plan_charts
from dpo.analysis.page import list_settings, render, write_report
from dpo.analysis.runs import read_runs

EVIL = "<script>alert(1)</script><img src=x onerror=\"alert('2')\">{{ 7 * 7 }}</p></style>&lt;\u202e"


def lines(n: int = 40) -> list[dict]:
    logged = [evaluation(0, 0.69, **{**rewards("eval", 0, 0, 0), "logps_eval/chosen": -50, "logps_eval/rejected": -50})]
    for k in range(1, n + 1):
        metrics = rewards("train", -0.01 * k, -0.03 * k, min(1.0, 0.5 + k / 50))
        logged.append(update(k, **metrics, **{"logps_train/chosen": -50 - k, "logps_train/rejected": -50 - 3 * k}))
    last = {**rewards("eval", -0.4, -1.2, 0.8), "logps_eval/chosen": -54, "logps_eval/rejected": -62}
    return [*logged, evaluation(n, 0.5, **last)]


def made(folder: Path, *, name: str = "made", n: int = 40, **more) -> Path:
    config = {"exp_name": name, "seed": 0, **more.pop("config", {})}
    samples = [sample(n, text, "the reference", prompt="Why?") for n, text in ((0, "before"), (160, "after"))]
    return write_run(folder, lines(n), config=config, **{"samples": samples, **more})


class Page(HTMLParser):
    """The elements of a page, and the text in each kind, on one line."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: dict[str, str] = {}
        self.feed(text)
        assert self.open == []
        self.texts = {tag: " ".join(text.split()) for tag, text in self.texts.items()}

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data):
        for tag in self.open:
            self.texts[tag] = self.texts.get(tag, "") + data


def page_of(*runs: Path) -> Page:
    """The page without curves."""
    return Page(render(read_runs(runs), []).decode())


def drawn_charts(runs: Sequence[Path]) -> dict[str, list[str]]:
    """The labels of the lines of each chart."""
    return {chart.title: [line.label for line in lines] for chart, lines in plan_charts(read_runs(runs))}


@pytest.mark.slow
def test_the_page_has_a_curve_of_each_metric_that_was_logged_and_has_a_chart(run_dir, tmp_path):
    page = Page(write_report([made(run_dir)], tmp_path / "out").read_text())

    assert {file.name for file in (tmp_path / "out").iterdir()} == {"report.html", "loss.png", "rewards.png"}
    images = {attributes["src"] for tag, attributes in page.elements if tag == "img"}
    assert len(images) == len(drawn_charts([run_dir])) == 8
    png = base64.b64encode(b"\x89PNG").decode()[:5]  # whose last bits are of the next byte
    assert all(image.startswith(f"data:image/png;base64,{png}") for image in images)


def test_the_page_needs_nothing_else_and_runs_no_code(run_dir):
    page = page_of(made(run_dir))

    assert {tag for tag, _ in page.elements} & {"script", "link", "iframe", "object", "embed", "form", "base"} == set()
    for _, attributes in page.elements:
        assert not any(name.startswith("on") for name in attributes)
        assert attributes.get("src", "data:image/").startswith("data:image/")
    policy = next(a["content"] for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; img-src data:; ")
    assert not re.search(r"url\(|@import", page.texts["style"])


def test_texts_of_models_and_settings_cannot_become_markup(run_dir, tmp_path):
    run = made(
        run_dir,
        name=EVIL,
        config={EVIL: EVIL, "datasets": [EVIL], "model": {"name_or_path": EVIL}},
        env={"platform": EVIL, "gpus": [EVIL], "packages": {"torch": EVIL}, "git_commit": EVIL, "python": EVIL},
        samples=[sample(160, EVIL, EVIL, prompt=EVIL), sample(160, "\ud800 half a letter", None, prompt="p")],
    )
    for page in page_of(run), page_of(run, made(tmp_path / "other", name=f"other {EVIL}", config={"lr": 1})):
        assert {tag for tag, _ in page.elements} & {"script", "img"} == set()
        assert page.texts["body"].count(EVIL) > 3


def test_an_online_run_shows_its_scores(run_dir, tmp_path):
    online = {"online/score": 1.5, "online/kl": 4.0, "online/eos": 0.5, "online_eval/win_rate": 0.625}
    config = {"online": {"name": "online", "n_samples": 3, "scorer": "keyword"}}
    run = write_run(run_dir, [line | online for line in lines()], config=config)
    assert "was 1.5 at first and is 1.5 now, at online/kl 4" in page_of(run).texts["main"]
    charts = {"Scores of answers", "Answers that end, prompts that tie", "Win rate against the reference"}
    assert charts <= drawn_charts([run]).keys()
    assert not charts & drawn_charts([made(tmp_path / "other")]).keys()


def test_newest_samples_are_beside_the_references_as_turns_without_control_tokens(run_dir, tmp_path):
    text = page_of(made(run_dir)).texts["section"]
    assert "Why? Policy after 160 examples after Reference the reference" in text

    prompt = "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    alone = [{**sample(160, "because", prompt=prompt), "turns": "user: Why?"}]  # there is no reference
    text = page_of(made(tmp_path / "alone", samples=alone)).texts["section"]
    assert "user: Why? Policy after 160 examples because" in text
    assert "<|im_" not in text


def test_several_runs_are_a_table_their_settings_that_differ_and_curves_with_one_line_each(tmp_path):
    rates = {"a": 1e-6, "b": 2e-6}
    runs = [made(tmp_path / name, name=name, n=30, config={"lr": rate}) for name, rate in rates.items()]

    assert list_settings(read_runs(runs)) == [("exp_name", ["a", "b"]), ("lr", ["1e-06", "2e-06"])]
    page = page_of(*runs)
    assert "2 runs compared" in page.texts["h1"]
    assert page.texts["td"].count("30 of 30 updates") == 2
    # A color stands for a run, a style for chosen or rejected.
    charts = {
        chart.title: [(line.label, line.color, line.style) for line in each]
        for chart, each in plan_charts(read_runs(runs))
    }
    assert charts["Loss"] == [("a", 0, 0), ("b", 1, 0)]
    assert charts["Rewards"] == [
        ("a chosen", 0, 0), ("a rejected", 0, 1), ("b chosen", 1, 0), ("b rejected", 1, 1)
    ]  # fmt: skip

    alone = dict(list_settings(read_runs(runs[1:])))  # from the defaults
    assert alone["lr"] == ["2e-06"]
    assert not {"seed", "batch_size"} & alone.keys()


@pytest.mark.parametrize("n_lines", [0, 1, 2, 3])
def test_a_run_that_has_just_begun_has_a_page(run_dir, n_lines):
    run = write_run(run_dir, lines()[:n_lines], updates=40)
    texts = [page_of(run).texts["main"]]
    assert "No rule found a fault" in texts[0]
    for name in ("env.json", "config.yaml", "preflight.json", "samples.jsonl"):
        (run / name).unlink()
        texts.append(page_of(run).texts["main"])
    assert "config.yaml is missing" in texts[-1]
    assert not [text for text in texts if re.search("nan|unknown", text)]


def test_all_warnings_of_all_runs_are_listed(tmp_path):
    one, other = made(tmp_path / "a"), made(tmp_path / "b", name="b")
    write_rows(
        one / "warnings.jsonl", [{"warning": text} for text in ("a cable is loose", "a cable is loose", "it rains")]
    )
    assert "a cable is loose (2 times)it rains" in page_of(one).texts["li"]
    write_rows(other / "warnings.jsonl", [{"warning": "it snows"}])
    assert "made: it rains" in page_of(one, other).texts["li"]
    assert "b: it snows" in page_of(one, other).texts["li"]


def test_examples_are_shown_and_long_prompts_are_folded(run_dir):
    rows = [{"prompt": "Long " * 200, "chosen": "the good", "rejected": "the bad"}, {"prompt": 3}]
    write_rows(made(run_dir) / "examples.jsonl", rows)
    page = page_of(run_dir)
    assert "chosen the good rejected the bad" in page.texts["section"]
    assert [attributes for tag, attributes in page.elements if tag == "details"][-2] == {}


def test_answers_are_shown_beside_those_before_training(run_dir):
    answers = [{"examples": n, "prompt": "Who?", "answer": text} for n, text in ((0, "Me."), (160, "You."))]
    write_rows(made(run_dir) / "answers.jsonl", answers)
    assert "Who? Policy now You. Before Me." in page_of(run_dir).texts["section"]


def test_the_next_commands_are_named(tmp_path):
    run = made(tmp_path / "a run")
    (run / "LATEST").mkdir()
    shown = page_of(run).texts["code"]
    assert f"dpo report '{run}' OTHER_RUN" in shown
    assert f"dpo sample '{run}'" in shown
    reward_model = made(tmp_path / "rewards", config={"loss": {"name": "bradley_terry"}})
    (reward_model / "LATEST").mkdir()
    assert not re.search("dpo (sample|evaluate)", page_of(reward_model).texts["code"])  # it gives no answers
