"""Draw docs/speed.svg from a table of docs/PERFORMANCE.md.

    python -m benchmarks.chart

The table is the first of the section "Speed and memory".
"""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
LABELS = {  # row of the table -> label of the bar
    "padded": "reference's algorithm",
    "TRL": "TRL 1.16",
    "ours": "this project",
    "ours, `cache_reference_logps=all`": "+ cached reference",
    "ours, bfloat16 and cached": "+ bfloat16",
}
OUR_COLOR, OTHER_COLOR = "#2563a8", "#a9b0b8"
# in pixels
BAR_HEIGHT, GAP, TOP = 24, 10, 62  # GAP is between two bars, TOP above the first
WIDTH, LONGEST_BAR = 900, 230
PANELS = (  # (left edge, title, unit, column of the table)
    (190, "seconds per pair", "s", 1),
    (560, "peak memory", "GB", 4),
)


def draw(text: str) -> str:
    """Draw an SVG of the table in a document's text."""
    section = text.partition("## Speed and memory")[2].partition("\n### ")[0]
    rows = {}  # cells, by the first cell
    for line in section.splitlines():
        if line.startswith("|"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            rows[cells[0]] = cells
    model = re.search(r"SmolLM2-\w+", section)[0]
    height = TOP + len(LABELS) * (BAR_HEIGHT + GAP) + 8
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="14">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="16" y="24" font-weight="bold">DPO of {model}, real HH pairs, 2 CPU cores (less is better)</text>',
    ]
    for left, title, unit, column in PANELS:
        lines.append(f'<text x="{left}" y="50" fill="#555">{title}</text>')
        values = {name: float(rows[name][column].removesuffix(" GB")) for name in LABELS}
        for i, (name, value) in enumerate(values.items()):
            y = TOP + i * (BAR_HEIGHT + GAP)
            length = LONGEST_BAR * value / max(values.values())
            color = OUR_COLOR if name.startswith("ours") else OTHER_COLOR
            lines.append(f'<rect x="{left}" y="{y}" width="{length:.1f}" height="{BAR_HEIGHT}" fill="{color}"/>')
            lines.append(f'<text x="{left + length + 6:.1f}" y="{y + 17}">{value:.1f} {unit}</text>')
    for i, label in enumerate(LABELS.values()):
        y = TOP + i * (BAR_HEIGHT + GAP) + 17
        lines.append(f'<text x="{PANELS[0][0] - 10}" y="{y}" text-anchor="end">{label}</text>')
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    text = (DOCS / "PERFORMANCE.md").read_text(encoding="utf-8")
    (DOCS / "speed.svg").write_text(draw(text), encoding="utf-8")
