"""Commands as a user types them, composed and checked in this process."""

from __future__ import annotations

import shlex

import hydra
from omegaconf import DictConfig

import train  # noqa: F401  (registers the config's resolvers)
from dpo.settings.command_line import COMPOSITION_ERRORS, find_line_problems, parse
from dpo.settings.files import CONFIG_DIR
from dpo.settings.validation import find_config_problems

RUNS = "exp_name=x model.name_or_path=gpt2"  # what every command needs


def compose(command: str) -> DictConfig:
    with hydra.initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        return hydra.compose("config", parse(shlex.split(command)).arguments)


def find_refusals(command: str) -> list[str]:
    """The problems that train.py would print."""
    line = parse(shlex.split(command))
    if not (line.is_sweep or line.config_dir):
        try:
            config = compose(command)
        except COMPOSITION_ERRORS:
            pass
        else:
            return find_config_problems(config)
    return find_line_problems(line)
