"""The config that an earlier run recorded, read as a plan.

A recorded config is untrusted data: no interpolation in it is resolved.
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
from dpo.settings.validation import find_problems, find_value_problem
from dpo.system.plain_files import read_yaml


def read_plan(path: Path, *, prefixes: tuple[str, ...]) -> Plan:
    """Read a run's `config.yaml`, ours or the reference implementation's.

    Keys that the file lacks get their defaults. Raises InputError if it is not a config, for an invalid value of a key
    that begins with one of `prefixes`, and for an interpolation, which could put this machine's environment into an
    export.
    """
    # the file is read twice: `read_yaml` refuses dangerous YAML, but only OmegaConf reads numbers as Hydra wrote them
    content = read_yaml(path)
    try:
        if interpolation := re.search(r"\$\{[^}]*\}?", str(content)):
            raise ValueError(f"{interpolation[0]!r:.100} is an interpolation, not a value")
        config = OmegaConf.load(path)
        values = flatten(config)
        plan = resolve(with_defaults(config))
    except Exception as error:  # the file may be any YAML, which fails in any way
        raise InputError(f"{path} is not the config of a run: {one_sentence(error)}") from error
    if not isinstance(plan.model.name_or_path, str) or "model.name_or_path" not in values:
        raise InputError(f"{path} is not the config of a run: it has no model.name_or_path")
    for key, value in values.items():
        is_checked = key in KEYS and key.startswith(prefixes) and value != "???"  # "???" marks a missing value
        if is_checked and (problem := find_value_problem(key, value)):
            raise InputError(f"{path}: {problem}")
    return plan


def plan_recorded(config: Mapping[str, Any], *, keys: tuple[str, ...]) -> Plan:
    """Make the plan of a config read from a run's `config.yaml`.

    Keys that the config lacks get their defaults. Raises InputError if it is not a config, or if a value of `keys` is
    wrong; values of other keys may be wrong.
    """
    try:
        plan = resolve(with_defaults(config))
    except OmegaConfBaseException as error:
        raise InputError(f"config.yaml is not the config of a run: {one_sentence(error)}") from error
    sentences = [problem.sentence for problem in find_problems(plan) if problem.key in keys]
    if sentences:
        raise InputError(f"config.yaml: {'; '.join(sentences)}")
    return plan


def plan_model(name: str) -> Plan:
    """Make the plan of a model with all other keys at defaults."""
    return resolve(with_defaults({"model": {"name_or_path": name}}))
