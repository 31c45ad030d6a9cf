"""All findings on a run, in plain language."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from dpo.analysis import findings, online_findings, pair_findings
from dpo.analysis.findings import WARNING, Finding
from dpo.analysis.runs import Run

OF_ALL: tuple[Callable[[Run], Iterator[Finding]], ...] = (
    findings.nan_skips,
    findings.collapse,
    findings.best_checkpoint,
    findings.spikes,
    pair_findings.empty_samples,
    pair_findings.lengths_of_samples,
    findings.learning_rate,
    findings.clipping,
    findings.data,
)
OF_GIVEN_EXAMPLES = (  # not for drawn pairs, which change with the policy and follow the scorer, not held-out labels
    findings.no_better_than_chance,
    findings.saturation,
    findings.evaluation_turns,
    pair_findings.margin_story,
    pair_findings.length_in_margin,
    pair_findings.lengths_in_data,
    findings.gap,
    findings.slowing,
)
OF_DRAWN_PAIRS = (
    online_findings.accuracies,
    online_findings.cut_off,
    online_findings.ties,
    online_findings.scores,
    online_findings.length_of_scores,
    online_findings.divergence,
    online_findings.time_to_draw,
)


def find_all(run: Run) -> list[Finding]:
    """All findings on a run, warnings first."""
    found = [f for rule in (*OF_ALL, *(OF_DRAWN_PAIRS if run.online else OF_GIVEN_EXAMPLES)) for f in rule(run)]
    return sorted(found, key=lambda finding: finding.level != WARNING)


def warnings_in(found: list[Finding]) -> int:
    return sum(finding.level == WARNING for finding in found)
