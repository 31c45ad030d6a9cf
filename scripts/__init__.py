"""`python -m scripts.NAME` runs `dpo NAME`, as before there was this command."""

from dpo import commands

__path__ += commands.__path__
