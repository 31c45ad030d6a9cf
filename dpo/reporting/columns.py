"""Growing texts, side by side in columns of a terminal."""

from __future__ import annotations

import shutil
import sys
import unicodedata
from collections.abc import Sequence

GAP = "  "
NARROWEST = 20


def measure_width(text: str) -> int:
    """Number of columns that a text takes on a terminal."""
    return sum(0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "WF") for c in text)


def printable(text: str) -> str:
    """Replace control characters, which would steer the terminal: models may write anything."""
    return "".join(
        c if c.isprintable() or c == "\n" else " " if c == "\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )


def wrap(text: str, width: int) -> list[str]:
    """Break a text into lines of at most `width`.

    As a text grows, all its lines but the last stay the same.
    """
    lines = []
    for paragraph in printable(text).split("\n"):
        line = ""
        for word in paragraph.split(" "):
            longer = f"{line} {word}" if line else word
            if line and measure_width(longer) > width:
                lines.append(line)
                longer = word
            while measure_width(longer) > width:
                n = next(n for n in range(len(longer), 0, -1) if n == 1 or measure_width(longer[:n]) <= width)
                lines.append(longer[:n])
                longer = longer[n:]
            line = longer
        lines.append(line)
    return lines


class Columns:
    """Columns of growing texts, redrawn on a terminal."""

    def __init__(self, titles: Sequence[str]) -> None:
        columns, self.rows = shutil.get_terminal_size()
        self.width = max(NARROWEST, (columns - 1 - len(GAP) * (len(titles) - 1)) // len(titles))
        self.texts = dict.fromkeys(titles, "")
        self.n_fixed = self.n_drawn = 0  # lines that will not change; lines below them that are on the screen
        self._print(f"\x1b[1m{self._row(list(titles))}\x1b[0m\n")

    def show(self, title: str, text: str) -> None:
        """Set a column's text, which must extend the previous one."""
        self.texts[title] = text
        wrapped = [wrap(text, self.width) for text in self.texts.values()]
        fixed = min(len(lines) - 1 for lines in wrapped)
        self._draw(wrapped, fixed)

    def close(self, footers: Sequence[str]) -> None:
        """Draw the remaining lines and the footers."""
        wrapped = [wrap(text, self.width) for text in self.texts.values()]
        self._draw(wrapped, max(map(len, wrapped)))
        self._print(f"\x1b[2m{self._row(footers)}\x1b[0m\n\n")

    def _draw(self, wrapped: list[list[str]], n_fixed: int) -> None:
        """Draw finished lines for the last time, then others.

        These are as many as the screen holds: a terminal cannot go back above its upper edge.
        """
        end = min(max(map(len, wrapped)), max(n_fixed + self.rows - 2, n_fixed))
        rows = [self._row([lines[i] if i < len(lines) else "" for lines in wrapped]) for i in range(self.n_fixed, end)]
        back = f"\x1b[{self.n_drawn}A\r\x1b[J" if self.n_drawn else ""
        self._print(back + "".join(f"{row}\n" for row in rows))
        self.n_fixed, self.n_drawn = n_fixed, end - n_fixed

    def _row(self, cells: Sequence[str]) -> str:
        return GAP.join(cell + " " * (self.width - measure_width(cell)) for cell in cells).rstrip()

    @staticmethod
    def _print(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
