"""Growing texts, side by side in columns of a terminal."""

from __future__ import annotations

import shutil
import sys
import unicodedata
from collections.abc import Sequence
from itertools import zip_longest

GAP = "  "  # between columns
MIN_WIDTH = 20  # of a column


def measure_width(text: str) -> int:
    """Number of character cells that a text takes on a terminal."""
    return sum(map(_measure_character, text))


def _measure_character(character: str) -> int:
    if unicodedata.combining(character):  # drawn over the character before
        return 0
    is_wide = unicodedata.east_asian_width(character) in ("W", "F")
    return 2 if is_wide else 1


def printable(text: str) -> str:
    """Replace control characters, with which a model's text could steer the terminal."""
    return "".join(map(_make_printable, text))


def _make_printable(character: str) -> str:
    if character.isprintable() or character == "\n":
        return character
    return " " if character == "\t" else "\N{REPLACEMENT CHARACTER}"


def wrap(text: str, width: int) -> list[str]:
    """Break a text into lines of at most `width` cells.

    Words longer than a line are broken too. As a text grows, all its lines but the last stay the same.
    """
    lines = []
    for paragraph in printable(text).split("\n"):
        line = ""
        for word in paragraph.split(" "):
            extended_line = f"{line} {word}" if line else word
            if line and measure_width(extended_line) > width:
                lines.append(line)
                extended_line = word
            while measure_width(extended_line) > width:
                n_fitting = _count_fitting(extended_line, width)
                lines.append(extended_line[:n_fitting])
                extended_line = extended_line[n_fitting:]
            line = extended_line
        lines.append(line)
    return lines


def _count_fitting(text: str, width: int) -> int:
    """Number of characters that fit into `width`, at least 1."""
    n_characters = len(text)
    while n_characters > 1 and measure_width(text[:n_characters]) > width:
        n_characters -= 1
    return n_characters


class Columns:
    """Columns of growing texts, redrawn on a terminal."""

    def __init__(self, titles: Sequence[str]) -> None:
        n_cells, self.n_screen_rows = shutil.get_terminal_size()
        # -1: a free cell at the edge, so that the terminal itself breaks no line
        n_text_cells = n_cells - 1 - len(GAP) * (len(titles) - 1)
        self.width = max(MIN_WIDTH, n_text_cells // len(titles))
        self.texts = dict.fromkeys(titles, "")
        self.n_final = 0  # rows that will not change any more
        self.n_drawn = 0  # changing rows on the screen, below the final ones
        self._print(f"\x1b[1m{self._join(list(titles))}\x1b[0m\n")  # bold

    def show(self, title: str, text: str) -> None:
        """Set a column's text, which must extend the previous one."""
        self.texts[title] = text
        columns = self._wrap_all()
        self._draw(columns, n_final=min(len(lines) - 1 for lines in columns))  # a column's last line may change

    def close(self, footers: Sequence[str]) -> None:
        """Draw all rows for the last time, and the footers."""
        columns = self._wrap_all()
        self._draw(columns, n_final=max(map(len, columns)))
        self._print(f"\x1b[2m{self._join(footers)}\x1b[0m\n\n")  # faint

    def _wrap_all(self) -> list[list[str]]:
        """The lines of each column."""
        return [wrap(text, self.width) for text in self.texts.values()]

    def _draw(self, columns: list[list[str]], n_final: int) -> None:
        """Draw the first `n_final` rows for good, and below them changing rows.

        Only as many changing rows are drawn as the screen has room for: a row above the screen's upper edge can no
        longer be replaced.
        """
        rows = [self._join(cells) for cells in zip_longest(*columns, fillvalue="")]
        room = max(0, self.n_screen_rows - 2)
        new_final, changing = rows[self.n_final : n_final], rows[n_final : n_final + room]
        erase = f"\x1b[{self.n_drawn}A\r\x1b[J" if self.n_drawn else ""  # goes up, and clears all below
        self._print(erase + "".join(f"{row}\n" for row in new_final + changing))
        self.n_final, self.n_drawn = n_final, len(changing)

    def _join(self, cells: Sequence[str]) -> str:
        """One row of the screen."""
        return GAP.join(cell + " " * (self.width - measure_width(cell)) for cell in cells).rstrip()

    @staticmethod
    def _print(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
