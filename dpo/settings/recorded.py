"""The config that an earlier run recorded, read as a plan.

A recorded config is untrusted data: an interpolation, which could put this machine's environment into an export, is
refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpo.errors import InputError, one_sentence
from dpo.settings.files import MISSING
from dpo.settings.keys import KEYS, REMOVED
from dpo.settings.places import SOURCE_FORMAT, find_dataset_problems
from dpo.settings.plan import Plan, resolve
from dpo.settings.validation import find_value_problems
from dpo.system.plain_files import read_yaml


def plan_recorded(config: Mapping[str, Any], *, where: str | Path, prefixes: tuple[str, ...]) -> Plan:
    """Make the plan of a config read from `where`, a run's `config.yaml`, ours or the reference implementation's.

    Keys that the config lacks get their defaults. Raises InputError if it is not a config, for an interpolation, and
    for a missing model or a wrong value of a key that begins with one of `prefixes`. Other values may be wrong.
    """
    try:
        if interpolation := re.search(r"\$\{[^}]*\}?", str(config)):
            raise ValueError(f"{interpolation[0]!r:.100} is an interpolation, not a value")
        for name, source in (config.get("dataset_sources") or {}).items():
            if isinstance(source, dict) and source.pop("format", None):
                print(
                    f"{where}: dataset_sources.{name}.format is ignored: it was removed after {REMOVED[SOURCE_FORMAT]}"
                )
        plan = resolve(config)
    except Exception as error:  # the file may be any YAML, which fails in any way
        raise InputError(f"{where} is not the config of a run: {one_sentence(error)}") from error
    recorded = {key: value for key, value in plan.values.items() if key in KEYS and value != MISSING}
    problems = find_value_problems({"model.name_or_path": MISSING, **recorded})
    problems += find_dataset_problems([], plan.values["dataset_sources"])
    if sentences := [problem.sentence for problem in problems if problem.key.startswith(prefixes)]:
        raise InputError(f"{where}: {'; '.join(sentences)}")
    return plan


def read_plan(path: Path, *, prefixes: tuple[str, ...]) -> Plan:
    """Read a run's `config.yaml`; see `plan_recorded`."""
    return plan_recorded(read_yaml(path), where=path, prefixes=prefixes)


def plan_model(name: str) -> Plan:
    """Make the plan of a model with all other keys at defaults."""
    return resolve({"model": {"name_or_path": name}})
