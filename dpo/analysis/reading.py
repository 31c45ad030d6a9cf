"""The reading of a run in plain language: what every rule finds."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from dpo.analysis import findings, pair_findings
from dpo.analysis.findings import WARNING, Finding
from dpo.analysis.runs import Run

RULES: tuple[Callable[[Run], Iterator[Finding]], ...] = (
    findings.nan_skips,
    findings.spikes,
    findings.no_better_than_chance,
    findings.saturation,
    findings.evaluation_turns,
    pair_findings.margin_story,
    pair_findings.length_in_margin,
    pair_findings.lengths_of_samples,
    pair_findings.lengths_in_data,
    findings.gap,
    findings.learning_rate,
    findings.clipping,
    findings.slowing,
    findings.data,
)


def find_all(run: Run) -> list[Finding]:
    """All that is to say, warnings first."""
    found = [finding for rule in RULES for finding in rule(run)]
    return sorted(found, key=lambda finding: finding.level != WARNING)


def warnings_in(found: list[Finding]) -> int:
    return sum(finding.level == WARNING for finding in found)
