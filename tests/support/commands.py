"""Commands as a user types them, composed and checked in this process."""

import shlex

import hydra
from omegaconf import DictConfig

from dpo.errors import InputError
from dpo.settings.command_line import check_line, parse
from dpo.settings.keys import CONFIG_DIR

RUNS = "exp_name=x model.name_or_path=gpt2"  # what every command needs


def compose(command: str) -> DictConfig:
    line = parse(shlex.split(command))
    with hydra.initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        return hydra.compose("config", [*line.overrides, *line.search_path])


def find_refusals(command: str) -> list[str]:
    """The problems that train.py would print."""
    try:
        check_line(parse(shlex.split(command)))
    except InputError as error:
        return getattr(error, "problems", [str(error)])
    return []
