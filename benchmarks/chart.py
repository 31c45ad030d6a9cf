"""Draw docs/speed.svg from the first table of docs/RESULTS.md.

python -m benchmarks.chart
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
OURS, OTHERS = "#2563a8", "#a9b0b8"
HEIGHT, GAP, TOP = 24, 10, 62  # pixels of a bar, between two, above the first
PANELS = (
    (190, "seconds per pair", "s", 1),
    (560, "peak memory", "GB", 4),
)  # left edge, title, unit, column
WIDTH, LONGEST = 900, 230


def draw(text: str) -> str:
    """Draw the picture of a document's table."""
    section = text.split("## Speed and memory", 1)[1].split("\n**", 1)[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if "|" in line]
    rows = {row[0]: row for row in cells}
    height, model = TOP + len(LABELS) * (HEIGHT + GAP) + 8, re.search(r"SmolLM2-\w+", text)[0]
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
            y, length = TOP + i * (HEIGHT + GAP), LONGEST * value / max(values.values())
            color = OURS if name.startswith("ours") else OTHERS
            lines.append(f'<rect x="{left}" y="{y}" width="{length:.1f}" height="{HEIGHT}" fill="{color}"/>')
            lines.append(f'<text x="{left + length + 6:.1f}" y="{y + 17}">{value:.1f} {unit}</text>')
    for i, label in enumerate(LABELS.values()):
        y = TOP + i * (HEIGHT + GAP) + 17
        lines.append(f'<text x="{PANELS[0][0] - 10}" y="{y}" text-anchor="end">{label}</text>')
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    text = (DOCS / "RESULTS.md").read_text(encoding="utf-8")
    (DOCS / "speed.svg").write_text(draw(text), encoding="utf-8")
