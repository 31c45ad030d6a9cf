"""The pairs of a ledger that were always ranked wrong, and those that are probably mislabeled.

    dpo ledger RUN

docs/metrics.md explains the counts. Exit status: 0, or 2 if RUN has no ledger.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path

from dpo.analysis.ledger import read_ledger, summarize_ledger
from dpo.commands import command, make_parser
from dpo.errors import InputError
from dpo.numbers import count, figure, signed
from dpo.redaction import redact

LONGEST_TEXT = 300  # characters


def find_texts(run_dir: Path, wanted: set[str]) -> dict[str, dict[str, str]]:
    """Return {digest: {name: text}} of the pairs in a run's data whose digests are wanted.

    Raises InputError if the data cannot be loaded.
    """
    from dpo.data.examples import text_digest  # datasets and torch take seconds to import
    from dpo.data.preflight import load_data
    from dpo.settings.validation import read_plan

    plan = read_plan(run_dir / "config.yaml", prefixes=("model.", "local_dirs", "dataset"))
    # dry_run, so that no table stays on the disk; and no code of the model may run, as the run may be someone else's.
    plan = plan.change("dry_run", True).change("model.trust_remote_code", False)
    data = load_data(plan, silent=True)
    texts = {}
    for prompt in itertools.chain(data.train, data.test):
        for index in range(len(prompt.examples)):
            responses = prompt.texts(index)
            digest = text_digest(prompt.text, responses)
            if digest in wanted:
                texts[digest] = {"prompt": prompt.text, **responses}
    return texts


def list_pairs(pairs: list[dict], texts: dict[str, dict[str, str]]) -> Iterator[str]:
    """Yield the lines to print about pairs; `texts` is as `find_texts` returns it, and may lack some pairs."""
    for pair in pairs:
        line = (
            f"  {pair['example']} {pair['dataset']} ({pair['split']}), {count(pair['n_visits'], 'visit')}: margin "
            f"{signed(pair['first_margin'])} at first, {signed(pair['last_margin'])} at last; on average "
            f"{figure(pair['relative_margin'], 2)} times the median size of margins"
        )
        if pair["tie"] is not None:  # the policy drew the pair
            line += f"; scores: chosen {pair['score_chosen']:.3g}, rejected {pair['score_rejected']:.3g}"
        yield line
        for name, text in texts.get(pair["example"], {}).items():
            excerpt = " ".join(text.split())
            # The question is at a prompt's end.
            excerpt = excerpt[-LONGEST_TEXT:] if name == "prompt" else excerpt[:LONGEST_TEXT]
            yield f"    {name:<9} {excerpt}"


@command
def main(arguments: list[str]) -> None:
    parser = make_parser("ledger", __doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's directory")
    options = parser.parse_args(arguments)
    summary = summarize_ledger(read_ledger(options.run))
    pairs = [*summary.never_flipped, *summary.suspected_noise]
    # The ledger has the texts of online pairs; those of other pairs are in the run's data.
    texts = {
        pair["example"]: {name: pair[name] for name in ("prompt", "chosen", "rejected")}
        for pair in pairs
        if pair["tie"] is not None
    }
    note = ""
    if wanted := {pair["example"] for pair in pairs} - texts.keys():
        try:
            texts |= find_texts(options.run, wanted)
            if not wanted <= texts.keys():
                note = "The run's datasets have changed, and lack some of these pairs."
        except (InputError, OSError) as error:
            note = f"Texts are not shown: {redact(str(error))}"
    lines = [
        f"{count(summary.rows, 'visit')} of {count(summary.examples, 'example')}, of which "
        f"{count(summary.truncated, 'is', 'are')} truncated.",
        f"Pairs that never flip: {summary.n_never_flipped:,} of {count(summary.n_seen_again, 'pair')} seen "
        "at least twice were never ranked right.",
        *list_pairs(summary.never_flipped, texts),
        f"Suspected label noise: {count(summary.n_suspected_noise, 'pair')} ranked wrong at every visit, on average by "
        "at least the median size of margins.",
        *list_pairs(summary.suspected_noise, texts),
    ]
    if note:
        lines.append(note)
    for line in lines:
        print("".join(c if c.isprintable() else " " for c in line))  # control characters could steer a terminal
