"""What libraries log that helps nobody here."""

from __future__ import annotations

import logging


def silence_bitsandbytes() -> None:
    """To be called before PEFT is imported, which imports bitsandbytes if it is there, which then asks for a package of
    kernels that nothing here uses."""
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
