"""Judge a model's answers beside those of another, by default of the model that its training began from.

    dpo evaluate RUN_OR_MODEL [OTHER] --judge JUDGE [--prompts FILE]

JUDGE is one of: human (writes a page on which people judge), verdicts:FILE (what that page saved), reward_model:DIR,
function:FILE.py:NAME (scores answers), or the URL of a server with the chat completions protocol, whose key is in
JUDGE_API_KEY or OPENAI_API_KEY. The same command continues an interrupted evaluation. docs/evaluation.md explains it.
Exit status: 0, 1 a failure, 2 bad input, 130 Ctrl-C.
"""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from dpo import __version__
from dpo.checkpoint.files import EXPORTED
from dpo.commands import (
    add_model_options,
    add_sampling_options,
    command,
    make_parser,
    parse_as,
    parse_count,
    set_up_models,
)
from dpo.errors import InputError, RunError, explaining
from dpo.judging import judges
from dpo.judging.answers import Pair, draw_answers, encode_for, list_labelled, load_prompts
from dpo.judging.page import check_files, write_form, write_result
from dpo.judging.server import Server
from dpo.judging.statistics import find_rate, summarize_verdicts
from dpo.models.answers import Sampling, format_for_readers
from dpo.models.generation import LoadedModel, load_for_generation
from dpo.models.paths import CONFIG, ModelPath, find_model
from dpo.numbers import count, percent
from dpo.redaction import redact
from dpo.system.host import is_installed, python_process_options
from dpo.system.plain_files import read_json
from dpo.system.run_directory import timestamp

JUDGES = "human, verdicts:FILE, reward_model:DIR, function:FILE.py:NAME or a URL"
N_LABELLED = 100  # most labelled pairs on which a judge is tested
# These options decide which answers are drawn.
SAMPLING_OPTIONS = ("prompts", "limit", "seed", "temperature", "top_p", "top_k", "max_new_tokens")


@command
def main(arguments: list[str]) -> None:
    parser = make_parser("evaluate", __doc__)
    option = parser.add_argument
    option("model", metavar="RUN_OR_MODEL", help="a run, a checkpoint, a directory or a Hub id")
    option("other", metavar="OTHER", nargs="?", help="default: what training began from")
    option("--judge", help=JUDGES)
    option("--prompts", metavar="FILE", help="prompts, as in docs/formats.md; default: those that the run held out")
    option("--limit", type=parse_count, default=200, help="most prompts (default: 200)")
    option("--out", type=Path, metavar="DIR", help="default: RUN/evaluation, or evaluation")
    add_sampling_options(parser)
    option("--batch-size", type=parse_count, default=16, help="prompts answered at a time (default: 16)")
    option(
        "--template",
        default="helpful",
        help="what a server is asked: a file, or helpful, paper_dialogue, paper_summary or paper_summary_concise",
    )
    option("--judge-model", metavar="NAME", help="the server's model; a URL needs it")
    option("--parallel", type=parse_count, default=8, help="calls of a server at a time (default: 8)")
    option("--timeout", type=parse_as("collective_timeout_secs"), default=60, help="seconds for a call (default: 60)")
    option("--lm-eval", metavar="TASKS", help="tasks of lm-eval for the exported model, instead or as well")
    option("--include-path", metavar="DIR", help="your own tasks of lm-eval")
    add_model_options(parser)
    options = parser.parse_args(arguments)
    if not (options.judge or options.lm_eval):
        parser.error("pass --judge, --lm-eval or both")
    kind, _, source = (options.judge or "").partition(":")
    if kind in ("http", "https") and not options.judge_model:
        raise InputError(f"--judge {options.judge} needs --judge-model NAME, the name of the server's model")
    # The options recorded with the verdicts become defaults, so that the same answers are drawn; options of the command
    # line still override them.
    if kind == "verdicts" and source:
        for verdict in judges.read_verdicts(source).values():
            for name, value in verdict["drawn"].items():
                if name in SAMPLING_OPTIONS and value is not None:
                    parser.set_defaults(**{name: str(value)})
        options = parser.parse_args(arguments)
    set_up_models()
    if options.lm_eval:
        run_lm_eval(options)
    if options.judge:
        try:
            judge_answers(options)
        except KeyboardInterrupt:
            print("finished work is kept: the same command continues", file=sys.stderr)
            raise


def judge_answers(options: Any) -> None:
    """Draw the answers of both models, let the judge compare them, and write the result."""
    policy, other = load_pair(options)
    folder = find_folder(options, policy.path)
    with explaining(OSError, lambda why: InputError(f"{folder} cannot be written: {why}; choose another --out")):
        folder.mkdir(parents=True, exist_ok=True)
    kind = "server" if options.judge.startswith("http") else options.judge.partition(":")[0]
    name = kind  # is a part of the names of files
    if options.other and kind != "human":
        name += "-" + re.sub(r"\W+", "-", options.other)[-60:]
    check_files(folder, name)
    judge = make_judge(options, folder)  # before answers are drawn, which may take long
    prompts = load_prompts(policy, options)
    sampling = policy.choose_sampling(options)
    pairs = answer_both([policy, other], prompts, sampling, folder, options)
    if judge is None:  # people judge later
        write_form(folder / "judge.html", pairs, {name: getattr(options, name) for name in SAMPLING_OPTIONS})
        print(f"judge {count(len(pairs), 'pair')} in a browser: {folder / 'judge.html'}")
        print("then repeat this command with --judge verdicts:SAVED_FILE (without --lm-eval, if it has that)")
        return
    verdicts = judge(pairs)
    scores = []
    differences = []  # in length, in characters
    n_flipped = 0
    for pair, verdict in zip(pairs, verdicts, strict=True):
        if verdict.score is not None:
            scores.append(verdict.score)
            differences.append(len(pair.first.text) - len(pair.second.text))
            n_flipped += verdict.is_flipped
    if not scores:
        raise InputError(f"the judge gave no valid verdict on {count(len(pairs), 'pair')}: {verdicts[0].reason}")
    summary = summarize_verdicts(scores, differences)
    sentences = [summary.describe(policy.name, other.name)]
    rates = {"Win rate": summary.rate}
    if summary.controlled:
        rates["Length-controlled win rate"] = summary.controlled
    if n_flipped:
        share = percent(n_flipped / len(scores))
        sentences.append(f"In {share} of the pairs the order of the answers decided, which counts as a tie.")
    n_invalid = len(pairs) - len(scores)
    if n_invalid:
        sentences.append(f"{count(n_invalid, 'pair')} without a valid verdict did not count.")
    agreement = None
    labelled = list_labelled(prompts, policy.tokenizer)[:N_LABELLED]
    if labelled and kind != "verdicts":  # a file has verdicts only on the answers that were drawn
        # The chosen response comes first, so that 1 is agreement with the label.
        label_scores = [verdict.score for verdict in judge(labelled) if verdict.score is not None]
        if label_scores:
            agreement = find_rate(np.array(label_scores), np.random.default_rng(0))
            compared = count(len(label_scores), "labelled pair")
            sentences.append(f"On {compared} the judge agrees with the labels: {agreement}.")
            rates["The judge's agreement with labels"] = agreement
    settings = {
        "model": str(policy.path.policy_file or options.model),
        "other": options.other,
        "judge": options.judge,
        "template": options.template if kind == "server" else None,
        "prompts": options.prompts or f"held out by {options.model}",
        "answers": str(sampling),
        "longest answer": f"{options.max_new_tokens} tokens",
        "made": f"{timestamp()} by dpo {__version__}",
    }
    facts = {
        "policy": policy.name,
        "other": other.name,
        "settings": {key: redact(value) for key, value in settings.items() if value},
        "sentences": sentences,
        "rates": rates,
    }
    numbers = {**summary._asdict(), "agreement": agreement, "invalid": n_invalid, "flipped": n_flipped}
    page = write_result(folder, name, facts, numbers, pairs, verdicts)
    print(*sentences, f"page: {page}", sep="\n")


def find_folder(options: Any, source: ModelPath) -> Path:
    """Return the directory of the results: --out, else `evaluation` in the model's run or the current directory."""
    return options.out or (source.run_dir or Path()) / "evaluation"


def load_pair(options: Any) -> list[LoadedModel]:
    """Load the policy and the model that it is compared with, each with its name in the result."""
    trust = options.trust_remote_code
    models = load_for_generation(
        options.model,
        reference="none" if options.other else None,  # None: what the policy's training began from
        template=options.chat_template,
        trust_remote_code=trust,
    )
    if options.other:
        models += load_for_generation(options.other, reference="none", trust_remote_code=trust)
    elif len(models) < 2:
        raise InputError(f"{options.model} does not say what it was trained from: add OTHER")
    names = [name_model(model.path) for model in models]
    if not options.other:
        names[1] = "its start"
    elif names[0] == names[1]:  # then they are too short
        names = [options.model, options.other]
    return [model._replace(name=name) for model, name in zip(models, names, strict=True)]


def name_model(source: ModelPath) -> str:
    """Name a model briefly, such as `mine/step-240` for a run's checkpoint."""
    file = source.policy_file
    if file and source.run_dir:
        return str(file.parent.relative_to(source.run_dir.parent))
    return Path(source.adapter or file or source.name).name


def make_judge(options: Any, folder: Path) -> judges.Judge | None:
    """Make the judge that the options name; None for people, who judge later."""
    if options.judge == "human":
        return None
    kind, _, source = options.judge.partition(":")
    if kind == "verdicts" and source:
        return judges.make_file_judge(source)
    if kind in ("http", "https"):
        template = judges.read_template(options.template)
        replies = folder / "replies.jsonl"
        server = Server(options.judge, options.judge_model, replies, parallel=options.parallel, timeout=options.timeout)
        return judges.make_server_judge(server, template)
    if kind in ("reward_model", "function") and source:
        return judges.make_scoring_judge(scorer=kind, **{kind: source})
    raise InputError(f"--judge {options.judge} is not known: choose {JUDGES}")


def answer_both(models: list[LoadedModel], prompts: list, sampling: Sampling, folder: Path, options: Any) -> list[Pair]:
    """Return a pair of answers to each prompt that, with an answer, fits into the positions of both models."""
    tokenizer = models[0].tokenizer
    # The tokenizer that the prompts' texts were made with: the policy's, for prompts that its run held out. A file has
    # none, so each model writes the messages of its prompts in its own form.
    text_tokenizer = tokenizer if options.prompts is None else None
    fitting = []
    encoded = []  # a prompt's token ids for each model, by prompt
    for prompt in prompts:
        tokens = [encode_for(model, prompt, text_tokenizer, n_new=options.max_new_tokens) for model in models]
        if None not in tokens:
            fitting.append(prompt)
            encoded.append(tokens)
    if len(fitting) < len(prompts):
        print(f"{count(len(prompts) - len(fitting), 'prompt')} left out, too long for the model with an answer")
    if not fitting:
        raise InputError("no prompt is left: choose others, or a smaller --max-new-tokens")
    questions = [format_for_readers(prompt, prompt.text, tokenizer) for prompt in fitting]
    answers = []  # to all prompts, by model
    for model, tokens in zip(models, zip(*encoded, strict=True), strict=True):
        answers.append(draw_answers(model, questions, tokens, sampling, folder, batch_size=options.batch_size))
    return list(map(Pair, fitting, questions, *answers))


def run_lm_eval(options: Any) -> None:
    """Run lm-eval's own command on the model of transformers that a run exported."""
    if not is_installed("lm_eval"):
        raise InputError("--lm-eval needs lm-eval: pip install 'lm-eval[hf]'")
    source = find_model(
        options.model, hub=True, template=options.chat_template, trust_remote_code=options.trust_remote_code
    )
    # lm-eval reads a checkpoint's export, as it cannot read a policy.pt.
    model = source.policy_file.parent / EXPORTED if source.policy_file else Path(options.model)
    base = model
    peft = ""
    if (model / CONFIG).exists():  # an adapter, whose base may be the export of another run
        base = read_json(model / CONFIG)["base_model_name_or_path"]
        peft = f",peft={model}"
    if (source.policy_file and not model.exists()) or "," in f"{base}{model}":  # lm-eval splits its arguments at commas
        raise InputError(
            f"{model} cannot be evaluated: run dpo export {options.model} DIR, for LoRA with --merge, and evaluate DIR"
        )
    arguments = f"pretrained={base}{peft},trust_remote_code={options.trust_remote_code}"
    out = find_folder(options, source) / "lm-eval"
    command = ["lm_eval", "--model", "hf", "--model_args", arguments, "--tasks", options.lm_eval]
    command += ["--output_path", str(out), "--batch_size", str(options.batch_size)]
    if options.include_path:
        command += ["--include_path", options.include_path]
    if subprocess.run(**python_process_options("-m", *command), check=False).returncode:
        raise RunError("lm-eval failed: its output above says why")
