"""The config that an earlier run recorded, read as its plan.

It is data: nothing in it is resolved or trusted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dpo.errors import InputError, one_sentence
from dpo.settings.files import flatten, with_defaults
from dpo.settings.keys import KEYS
from dpo.settings.plan import Plan, resolve
from dpo.settings.validation import find_config_problems, find_value_problem
from dpo.system.plain_files import read_yaml


def read_plan(path: Path, *, prefixes: tuple[str, ...]) -> Plan:
    """Read a run's `config.yaml`, ours or the reference implementation's.

    Keys that it lacks get their defaults. Raises InputError if it is not a config, for an invalid value of a key that
    begins with one of `prefixes`, and for an interpolation: it could put this machine's environment into an export.
    """
    # read twice: `read_yaml` refuses what an untrusted file may hold, and OmegaConf reads numbers as Hydra wrote them
    values = read_yaml(path)
    try:
        if interpolation := re.search(r"\$\{[^}]*\}?", str(values)):
            raise ValueError(f"{interpolation[0]!r:.100} is an interpolation, not a value")
        config = OmegaConf.load(path)
        flat = flatten(config)
        plan = resolve(with_defaults(config))
    except Exception as error:  # YAML of any kind may be there
        raise InputError(f"{path} is not the config of a run: {one_sentence(error)}") from error
    if not isinstance(plan.model.name_or_path, str) or "model.name_or_path" not in flat:
        raise InputError(f"{path} is not the config of a run: it has no model.name_or_path")
    for key, value in flat.items():
        is_used = key in KEYS and key.startswith(prefixes) and value != "???"  # how a config marks a missing value
        if is_used and (problem := find_value_problem(key, value, KEYS)):
            raise InputError(f"{path}: {problem}")
    return plan


def plan_recorded(config: Mapping[str, Any], *, where: str, keys: tuple[str, ...]) -> Plan:
    """The plan of a config read from the file `where`.

    Keys that it lacks get their defaults. Raises InputError if it is not a config, and for problems of `keys`; those of
    other keys do not matter.
    """
    try:
        complete = with_defaults(config)
        problems = [sentence for sentence in find_config_problems(complete) if sentence.startswith(keys)]
    except OmegaConfBaseException as error:
        raise InputError(f"{where} is not the config of a run: {one_sentence(error)}") from error
    if problems:
        raise InputError(f"{where}: {'; '.join(problems)}")
    return resolve(complete)


def plan_model(name: str) -> Plan:
    """The plan of a model without a run: all else by default."""
    values: Mapping[str, Any] = {"model": {"name_or_path": name}}
    return resolve(with_defaults(values))
