"""The command line before Hydra sees it: options by an allow-list, every override that cannot be applied, no secret
written down, no code named.

Hydra stops at the first override it cannot apply; this finds all of them, and whatever else is wrong with the rest.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import hydra
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from config_keys import RULES
from redaction import redact
from settings import did_you_mean, refuse_hydras_own

MULTIRUN = ("-m", "--multirun")
FLAGS = (*MULTIRUN, "-h", "--help", "--hydra-help", "--version", "--resolve")
WITH_VALUE = ("-c", "--cfg", "-p", "--package", "-i", "--info", "-sc", "--shell-completion", "-cd", "--config-dir")
CONFIG_DIR_OPTIONS = ("-cd", "--config-dir")
SHOWING = ("--hydra-help", "--version", "-sc", "--shell-completion", "-i", "--info")


SAME_IN_ALL = "hydra.job.config.override_dirname.exclude_keys"


class CommandLine(NamedTuple):
    """Hydra's options, and the overrides."""

    options: list[str]
    overrides: list[str]
    config_dir: str | None

    @property
    def is_sweep(self) -> bool:
        return any(option in MULTIRUN for option in self.options)

    @property
    def only_shows(self) -> bool:
        """Whether nothing runs: help, completion, information."""
        return any(option.split("=")[0] in SHOWING for option in self.options)

    @property
    def wants_help(self) -> bool:
        return any(option in ("-h", "--help") for option in self.options)

    @property
    def arguments(self) -> list[str]:
        """Hydra wants its options first; a sweep's jobs are told what is the same for all of them."""
        same = [key_of(override) for override in self.overrides if _parts_of_sweep(override) is None]
        told = f"{SAME_IN_ALL}={same!r}".replace(" ", "")
        return [*self.options, *self.overrides, *([told] if self.is_sweep else [])]


def key_of(override: str) -> str:
    """The key or group that an override sets."""
    return override.split("=", 1)[0].lstrip("+~")


def parse(arguments: list[str]) -> CommandLine:
    """Raises ValueError for an option that Hydra has not or that is refused; abbreviations are not taken."""
    options, overrides, config_dir = [], [], None
    left = iter(arguments)
    for argument in left:
        if not argument.startswith("-"):
            is_open = argument.startswith(("dataset_sources.", "dataset_sources="))  # to new names
            overrides.append(f"++{argument}" if is_open else argument)
            continue
        name, has_value, value = argument.partition("=")
        if name not in (*FLAGS, *WITH_VALUE):
            raise ValueError(f"{name} is not an option here; there are {', '.join((*FLAGS, *WITH_VALUE))}")
        options.append(argument)
        if name in WITH_VALUE and not has_value:
            value = next(left, "")
            options.append(value)
        if name in CONFIG_DIR_OPTIONS:
            config_dir = value
    return CommandLine(options, _with_paths(overrides), config_dir)


def _with_paths(overrides: list[str]) -> list[str]:
    """`dataset_sources.NAME=PLACE` as `dataset_sources.NAME.path=PLACE` where more is said of NAME, as its columns."""
    keys = [key_of(override) for override in overrides]

    def with_path(override: str, key: str) -> str:
        more = key.startswith("dataset_sources.") and any(other.startswith(f"{key}.") for other in keys)
        return (
            override.replace("=", ".path=", 1) if more and not override.partition("=")[2].startswith("{") else override
        )

    return [with_path(override, key) for override, key in zip(overrides, keys, strict=True)]


def find_problems(
    line: CommandLine, own_configs: Path, find_config_problems: Callable[[DictConfig], list[str]]
) -> list[str]:
    """Everything wrong with a command line, one sentence each; what is in its config is looked at if it is composed
    at all, and only if an override cannot be applied: `main` does it for every job of a sweep."""
    if torn := next((o for o in line.overrides if o.startswith("=")), None):
        before = next((a for a, b in pairwise(line.overrides) if b is torn), "NAME")
        return [f"{before} {torn}: write {before}=VALUE, with no spaces around ="]
    problems = [problem for o in line.overrides if (problem := _find_danger(o, sweep=line.is_sweep))]
    if line.config_dir is not None:
        problems += _find_danger_in_files(Path(line.config_dir))
    if problems or line.only_shows:
        return problems
    overrides = [_first_of_sweep(o) for o in line.overrides] if line.is_sweep else line.overrides
    search = [] if line.config_dir is None else [f"hydra.searchpath=[file://{Path(line.config_dir).resolve()}]"]
    with hydra.initialize_config_dir(str(own_configs.resolve()), version_base="1.3"):
        return _find_refused(overrides, search, own_configs, find_config_problems)


def _find_refused(
    overrides: list[str], search: list[str], own_configs: Path, find_config_problems: Callable[[DictConfig], list[str]]
) -> list[str]:
    """Why Hydra cannot apply overrides, and what is wrong with the config that the others make."""

    def refusal(tried: list[str]) -> str | None:
        return _refusal(tried, search, own_configs)

    if not refusal(overrides):
        return []
    groups = [o for o in overrides if o.split("=")[0] in os.listdir(own_configs)]
    refused = {o: reason for o in groups if (reason := refusal([o]))}
    groups = [o for o in groups if o not in refused]
    refused |= {o: reason for o in overrides if o not in refused and (reason := refusal([*groups, o]))}
    rest = [o for o in overrides if o not in refused]
    from utils import InputError  # imports torch

    # a refused override leaves its key as it was, which is not another problem
    keys = tuple(f"{o.split('=')[0]} is not set" for o in refused)
    try:
        problems = find_config_problems(hydra.compose("config", [*search, *rest]))
    except InputError as error:  # the launcher's variables
        problems = [str(error)]
    return [*refused.values(), *(p for p in problems if not p.startswith(keys))]


def _find_danger(override: str, *, sweep: bool) -> str | None:
    """Why an override is not even handed to Hydra; None if it is harmless."""
    key = key_of(override)
    if sweep and redact(override) != override:
        return f"{key} holds a secret, and a sweep writes its command line down: give it as '${{oc.env:NAME}}'"
    return refuse_hydras_own(key, override)


def _find_danger_in_files(directory: Path) -> Iterator[str]:
    """What in a user's own config files could name code to run, or would set what of Hydra's own is refused."""
    if not directory.is_dir():
        yield f"--config-dir {directory} is not a directory"
        return
    found = [Path(folder) / name for folder, _, names in os.walk(directory, followlinks=True) for name in names]
    for file in sorted(file for file in found if file.suffix == ".yaml"):
        try:
            text = file.read_text(encoding="utf-8")
            content = yaml.safe_load(text)
        except (OSError, ValueError, yaml.YAMLError) as error:
            yield f"{file} cannot be read: {' '.join(str(error).split())[:200]}"
            continue
        headers = [line for line in text.splitlines() if line.lstrip().startswith("#") and "@package" in line]
        if any("hydra" in header for header in headers):
            yield f"{file} puts its keys among Hydra's own ({headers[0].strip()}), which could name code to run"
        yield from (f"{file}: {problem}" for problem in _find_danger_in(content))


def _find_danger_in(content: Any, path: str = "") -> Iterator[str]:
    if isinstance(content, Mapping):
        for key, value in content.items():
            inside = f"{path}.{key}" if path else str(key)
            if str(key) == "_target_":
                yield f"{inside} names code to run, which a config may not"
            elif inside == "defaults":
                yield from _find_danger_in_defaults(value)
            elif isinstance(value, (Mapping, list)):
                yield from _find_danger_in(value, inside)
            elif problem := refuse_hydras_own(inside, f"{inside}={value}"):
                yield problem
    elif isinstance(content, list):
        for item in content:
            yield from _find_danger_in(item, path)


def _find_danger_in_defaults(defaults: Any) -> Iterator[str]:
    """Entries of a defaults list are texts, or one group and its option, whose package may follow an @."""
    entries = defaults if isinstance(defaults, list) else [defaults]
    for entry in entries:
        groups = [str(key) for key in entry] if isinstance(entry, Mapping) else [str(entry)]
        for group in groups:
            name = group.removeprefix("override ").removeprefix("optional ").strip()
            if "@" in name and "hydra" in name:
                yield f"defaults puts {name} among Hydra's own keys, which could name code to run"
            elif problem := refuse_hydras_own(name.split("@")[0].lstrip("/"), name):
                yield problem


def _refusal(overrides: list[str], search: list[str], own_configs: Path) -> str | None:
    """Why Hydra cannot compose with these overrides, in a sentence; None if it can."""
    try:
        hydra.compose("config", [*search, *overrides])
        return None
    except (HydraException, ValueError) as error:  # the second for a group's option that is a number
        return _explain(overrides[-1], error, own_configs)


def _explain(override: str, error: Exception, own_configs: Path) -> str:
    key, equals, value = override.lstrip("+~").partition("=")
    if not equals and not override.startswith("~"):
        return f"{override} is not an override: write NAME=VALUE"
    if (own_configs / key).is_dir():
        options = sorted(path.stem for path in (own_configs / key).glob("*.yaml"))
        return f"{key}={value} is not one of {', '.join(options)}"
    if "is not in struct" in f"{error}{error.__cause__}":
        group, _, name = key.partition(".")
        # in a list, for '???' does not count as being in a DictConfig
        having = sorted(f.stem for f in own_configs.glob(f"{group}/*.yaml") if name in [*OmegaConf.load(f)])
        if having:
            return f"{key} does not exist here: it belongs to {' and '.join(f'{group}={h}' for h in having)}"
        return did_you_mean(key, [*RULES, "dataset_sources", *os.listdir(own_configs)])
    if redact(override) != override:  # which Hydra would repeat
        return f"{redact(override)} is not a valid override; is a quote left open?"
    return f"{override} is not a valid override: {' '.join(str(error).split())[:300]}"


def _first_of_sweep(override: str) -> str:
    """`loss.beta=0.1,0.5` as `loss.beta=0.1`: a sweep's first job stands for all when keys are checked."""
    parts = _parts_of_sweep(override)
    return override if parts is None else f"{override.split('=', 1)[0]}={next(parts)}"


def _parts_of_sweep(override: str) -> Iterator[str] | None:
    """The values over which an override sweeps; None if it has only one."""
    try:
        parsed = OverridesParser.create().parse_override(override)
    except HydraException:
        return None  # `_refusal` explains it
    return parsed.sweep_string_iterator() if parsed.is_sweep_override() else None
