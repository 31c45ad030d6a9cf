"""The table of all rules, and their findings on a run."""

from __future__ import annotations

from dpo.analysis import rules_on_answers as on_answers
from dpo.analysis import rules_on_pairs as on_pairs
from dpo.analysis import rules_on_training as on_training
from dpo.analysis.rules import ANY, EVAL_ACCURACY, FIXED, ONLINE, PAIRS, TRAIN_ACCURACY, WARNING, Finding, Rule
from dpo.analysis.runs import Run

RULES = (  # in the order of the page: the rule, the kinds of data it is for, what it needs
    Rule(on_training.skipped_updates, ANY),
    Rule(on_training.collapse, PAIRS | ONLINE),
    Rule(on_training.best_checkpoint, ANY),
    Rule(on_answers.empty_samples, ANY, ("samples",)),
    Rule(on_answers.cut_off_samples, ANY, ("samples",)),
    Rule(on_answers.sample_lengths, PAIRS | ONLINE, ("samples",)),
    Rule(on_training.warmup, ANY, ("lr",)),
    Rule(on_training.clipping, ANY, ("grad_norm",)),
    Rule(on_pairs.data_counts, ANY),
    Rule(on_pairs.leakage, ANY),
    # these are not for online runs, whose pairs change with the policy, and whose scorer may contradict held-out labels
    Rule(on_training.worse_than_reference, PAIRS, ("loss/eval", "ledger")),
    Rule(on_training.worse_than_start, FIXED, ("loss/eval",)),
    Rule(on_training.reward_accuracy, PAIRS, (EVAL_ACCURACY,)),
    Rule(on_training.no_better_than_chance, PAIRS, (EVAL_ACCURACY,)),
    Rule(on_training.new_training_pairs, PAIRS, (EVAL_ACCURACY, TRAIN_ACCURACY)),
    Rule(on_training.rate_too_high, FIXED),
    Rule(on_training.saturation, PAIRS, (TRAIN_ACCURACY,)),
    Rule(on_training.evaluation_turns, FIXED),
    Rule(on_training.epoch_step, FIXED, ("loss/train",)),
    Rule(on_pairs.margin_sides, PAIRS),
    Rule(on_pairs.length_in_margin, PAIRS),
    Rule(on_pairs.lengths_in_data, PAIRS),
    Rule(on_pairs.accuracy_by_length, PAIRS, (EVAL_ACCURACY, "ledger")),
    Rule(on_training.accuracy_gap, PAIRS, (TRAIN_ACCURACY, EVAL_ACCURACY)),
    Rule(on_pairs.label_noise, PAIRS, ("ledger",)),
    Rule(on_training.slowing, FIXED, ("tokens_per_second",)),  # the time of an online update includes sampling
    Rule(on_answers.accuracies_online, ONLINE),
    Rule(on_answers.win_rate, ONLINE, ("online_eval/win_rate",)),
    Rule(on_answers.unfinished_answers, ONLINE, ("online/eos",)),
    Rule(on_answers.ties, ONLINE, ("online/ties",)),
    Rule(on_answers.scores, ONLINE, ("online/score",)),
    Rule(on_answers.scores_with_length, ONLINE, ("online/score", "online/length")),
    Rule(on_answers.divergence, ONLINE, ("online/kl",)),
    Rule(on_answers.time_to_draw, ONLINE, ("online/sampling_share",)),
)


def find_all(run: Run) -> list[Finding]:
    """Find everything that the rules tell about a run, warnings first."""
    findings = [finding for rule in RULES for finding in rule.apply(run)]
    return sorted(findings, key=lambda finding: finding.level != WARNING)  # stable: each level keeps the table's order
