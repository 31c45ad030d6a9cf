"""Checks of the command line before Hydra sees it.

Options must be on an allow-list, no secret may be written to disk, and no key may name code to run. Hydra stops at the
first override that it cannot apply; these checks find all such overrides, and all invalid values.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import hydra
import hydra._internal.hydra
import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dpo.errors import InputError, one_sentence
from dpo.settings.choices import explain_unknown
from dpo.settings.files import ABSENT, CONFIG_DIR, OPEN_MAPPINGS, UNRESOLVED, dotted, flatten, help_text, load_file
from dpo.settings.keys import KEYS
from dpo.settings.plan import make_plan, resolve
from dpo.settings.validation import (
    WEIGHTS,
    explain_unknown_key,
    find_config_problems,
    find_problems,
    find_value_problem,
)
from dpo.system.host import is_rank_0
from dpo.system.plain_files import check_readable
from dpo.system.redaction import redact, secrets_in

MULTIRUN = ("-m", "--multirun")
FLAGS = (*MULTIRUN, "-h", "--help", "--hydra-help", "--version", "--resolve")
WITH_VALUE = ("-c", "--cfg", "-p", "--package", "-i", "--info", "-sc", "--shell-completion", "-cd", "--config-dir")
CONFIG_DIR_OPTIONS = ("-cd", "--config-dir")
SHOWING = ("--hydra-help", "--version", "-sc", "--shell-completion", "-i", "--info")  # with these Hydra runs nothing

NEEDS_QUOTES = re.compile(r"[^\w\s/\\.+$%*@?|:-]|[^\x00-\x7f]")  # characters that Hydra accepts only in quotes
HYDRA_SYNTAX = re.compile(r"""[\[\]{},'"]""")  # of lists, mappings and quotes
GLOB = re.compile(r"=\s*glob\(")
# what Hydra raises if it cannot compose a config. The last four are raised, for example, for a group's option that is a
# number, for keys inside a value that is not a mapping, and for a file that is not YAML
COMPOSITION_ERRORS = (
    HydraException, OmegaConfBaseException, ValueError, AssertionError, AttributeError, yaml.YAMLError,
)  # fmt: skip

# Hydra's own keys that an override may set; the other ones can name code, which Hydra would import and call
ALLOWED_HYDRA_KEYS = (
    "hydra.run.dir",
    "hydra.sweep.dir",
    "hydra.sweep.subdir",
    "hydra.verbose",
    "hydra/launcher",
    "hydra/sweeper",
)
SEARCH_PATH = "hydra.searchpath"
# keys whose values differ whenever --config-dir is given: in them Hydra records how it composed the config
COMPOSITION_RECORDS = ("hydra.runtime.", "hydra.overrides.", SEARCH_PATH, "hydra.job.override_dirname")
OUR_CODE_KEYS = ("model.trust_remote_code", "online.function")  # keys of this project by which a config can run code
FIXED_KEYS = "hydra.job.config.override_dirname.exclude_keys"  # tells `sweeps.py` which overrides are not swept


class CommandLine(NamedTuple):
    """A parsed command line."""

    options: list[str]  # of Hydra, without --config-dir
    overrides: list[str]
    config_dir: str | None  # the value of --config-dir

    @property
    def is_sweep(self) -> bool:
        return any(option in MULTIRUN for option in self.options)

    @property
    def only_shows(self) -> bool:
        return any(option.split("=")[0] in SHOWING for option in self.options)

    @property
    def wants_help(self) -> bool:
        return any(option in ("-h", "--help") for option in self.options)

    @property
    def arguments(self) -> list[str]:
        """Arguments for Hydra; those of a sweep also list the fixed keys."""
        if not self.is_sweep:
            return [*self.options, *self.overrides, *self.search_path]
        swept_keys = {parse_key(override) for override in self.overrides if _split_sweep(override)}
        fixed_keys = [key for key in map(parse_key, self.overrides) if key not in swept_keys]
        # Hydra first applies the fixed overrides without the swept ones. With `-m loss=dpo,ipo loss.beta=1`, the loss
        # is then the default one, which has no beta, and Hydra refuses loss.beta unless `++` adds it
        swept_groups = tuple(f"{key}." for key in swept_keys)
        overrides = []
        for override in self.overrides:
            needs_plus = override.startswith(swept_groups) and parse_key(override) in fixed_keys
            overrides.append(f"++{override}" if needs_plus else override)
        return [*self.options, *overrides, *self.search_path, f"{FIXED_KEYS}={fixed_keys!r}".replace(" ", "")]

    @property
    def search_path(self) -> list[str]:
        """The override by which Hydra finds a user's config files."""
        if self.config_dir is None:
            return []
        path = str(Path(self.config_dir).resolve()).replace("'", "\\'")
        return [f"{SEARCH_PATH}=['file://{path}']"]


def parse_key(override: str) -> str:
    """Parse the key or group that an override sets."""
    return override.split("=", 1)[0].lstrip("+~")


def check_command_line(arguments: list[str]) -> list[str]:
    """Check the arguments, and return the arguments for Hydra.

    If there are problems, prints a sentence for each and exits with status 2.
    """
    try:
        line = parse(arguments)
    except ValueError as error:
        exit_on([str(error)])
        raise  # not reached: `exit_on` exits
    if line.wants_help:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # with `--help | head`, printing ends without a traceback
        print(help_text())
        sys.exit(0)
    problems = find_line_problems(line)
    for secret in secrets_in(line.overrides):
        if len(secret) > 3:  # a shorter text would be found inside ordinary words
            problems = [problem.replace(secret, "REDACTED") for problem in problems]
    exit_on(problems)
    hydra._internal.hydra.ConfigLoaderImpl = GuardedLoader
    return line.arguments


def exit_on(problems: list[str]) -> None:
    """Print problems, if any, and exit with status 2."""
    if not problems:
        return
    if is_rank_0():
        print("\n".join(["bad configuration:", *(f"  - {redact(problem)}" for problem in problems)]), file=sys.stderr)
    sys.exit(2)


def parse(arguments: list[str]) -> CommandLine:
    """Parse a command line.

    Raises ValueError for an option that is unknown, abbreviated or refused.
    """
    options, overrides, config_dir = [], [], None
    remaining = iter(arguments)
    for argument in remaining:
        if not argument.startswith("-"):
            overrides.append(_find_sign(argument) + argument)
            continue
        name, equals, value = argument.partition("=")
        if name not in (*FLAGS, *WITH_VALUE):
            raise ValueError(f"{name} is not an option here; the options are {', '.join((*FLAGS, *WITH_VALUE))}")
        words = [argument]
        if name in WITH_VALUE and not equals:  # the value is the next argument
            value = next(remaining, "")
            words.append(value)
        if name in CONFIG_DIR_OPTIONS:
            if not value:
                raise ValueError(f"{name} needs a directory: {name} DIR")
            config_dir = value
        else:
            options += words
    return CommandLine(options, _add_path_keys(overrides), config_dir)


def _find_sign(override: str) -> str:
    """Find the sign that Hydra wants before an override."""
    if re.split("[.=]", override)[0] in OPEN_MAPPINGS:  # `++` also adds names that are not in the config
        return "++"
    return "+" if override.startswith("experiment=") else ""  # no experiment is chosen by default


def _add_path_keys(overrides: list[str]) -> list[str]:
    """Write `dataset_sources.NAME=PATH` as `dataset_sources.NAME.path=PATH` where needed.

    It is needed if another override sets a key inside `dataset_sources.NAME`.
    """
    keys = [parse_key(override) for override in overrides]
    sources = [key for key in keys if key.startswith("dataset_sources.")]
    mappings = {source for source in sources if any(key.startswith(f"{source}.") for key in keys)}
    return [
        override.replace("=", ".path=", 1) if key in mappings and "={" not in override else override
        for override, key in zip(overrides, keys, strict=True)
    ]


def find_line_problems(line: CommandLine) -> list[str]:
    """List the problems of a command line, one sentence each.

    The values of the config are checked only if an override cannot be applied: otherwise `train.main` checks the values
    of every job.
    """
    problem = _find_spaced_override(line.overrides)
    if problem is not None:
        return [problem]
    problems = []
    for override in line.overrides:
        refusal = refuse_hydra_key(override)
        if refusal is not None:
            problems.append(refusal)
        if GLOB.search(override):
            problems.append(f"{override}: glob() does not work here; name the options")
        if line.is_sweep and (secrets_in([override]) or redact(override) != override):
            problems.append(
                f"{parse_key(override)} holds a secret, and a sweep writes its command line to disk: give it as "
                f"'${{oc.env:NAME}}'"
            )
    directories = [CONFIG_DIR]
    if line.config_dir is not None:
        directories.append(Path(line.config_dir))
        problems = problems or list(_find_unusable_files(line, Path(line.config_dir)))
    if problems or line.only_shows:
        return problems
    overrides = [_take_first_job(override) for override in line.overrides] if line.is_sweep else line.overrides
    with hydra.initialize_config_dir(str(CONFIG_DIR.resolve()), version_base="1.3"):
        return _find_composition_problems(overrides, line.search_path, directories)


def _find_spaced_override(overrides: list[str]) -> str | None:
    """Explain an override written with spaces, as `lr = 3`."""
    for previous, override in itertools.pairwise(["", *overrides]):
        if override.startswith("="):
            key = previous if previous and "=" not in previous else "NAME"
            return f"{key} {override}: write {key}=VALUE, with no spaces around ="
    return None


def refuse_hydra_key(override: str) -> str | None:
    """Explain why an override of Hydra's own keys is refused.

    Returns None if it is allowed, or sets no key of Hydra's own.
    """
    key = parse_key(override)
    is_hydra_key = re.split("[@./]", key)[0] == "hydra" or "@hydra" in key
    if not is_hydra_key:
        return None
    is_allowed = key in ALLOWED_HYDRA_KEYS or key.startswith(("hydra.launcher.", "hydra.sweeper."))
    if is_allowed and "_target_" not in override:
        return None
    return (
        f"{key} may not be set, as Hydra's own keys can name code to run: the only ones that may be set are "
        f"{', '.join(ALLOWED_HYDRA_KEYS)}"
    )


def _find_composition_problems(overrides: list[str], search_path: list[str], directories: list[Path]) -> list[str]:
    """Explain the overrides that Hydra refuses, and problems of other values.

    The config files are in `directories`. Returns [] if Hydra refuses no override.
    """
    try:
        _compose([*search_path, *overrides])
        return []
    except COMPOSITION_ERRORS:
        pass  # Hydra names only the first override that it refuses: to find all, they are added one by one
    accepted, refused = _add_one_by_one(overrides, search_path, directories)
    # it is not known which values the refused overrides would have set
    values = flatten(hydra.compose("config", accepted)) | dict.fromkeys(refused, UNRESOLVED)
    unknown_groups = tuple(f"{group}." for group in refused)
    values |= {key: UNRESOLVED for key in values if key.startswith(unknown_groups)}
    try:
        return [*refused.values(), *(problem.sentence for problem in find_problems(values, make_plan(values)))]
    except InputError as error:  # the environment variables of torchrun or Slurm are wrong
        return [*refused.values(), str(error)]


def _add_one_by_one(
    overrides: list[str], search_path: list[str], directories: list[Path]
) -> tuple[list[str], dict[str, str]]:
    """Add overrides one by one, without those that Hydra refuses.

    Returns the accepted overrides, and an explanation for the key of each refused override.
    """
    accepted, refused = list(search_path), {}
    for override in sorted(overrides, key=lambda o: not _names_group(o, directories)):  # groups first: they add keys
        key = parse_key(override)
        if key.startswith(tuple(f"{group}." for group in refused)):
            continue  # the option of the key's group was refused, so it is not known whether the key exists
        try:
            _compose([*accepted, override])
            accepted.append(override)
        except COMPOSITION_ERRORS as error:
            refused[key] = _explain_refusal(override, error, directories)
    return accepted, refused


def _compose(overrides: list[str]) -> DictConfig:
    return hydra.compose("config", overrides, return_hydra_config=True)


def _names_group(override: str, directories: list[Path]) -> bool:
    return any((directory / parse_key(override)).is_dir() for directory in directories)


def _find_unusable_files(line: CommandLine, directory: Path) -> Iterator[str]:
    """Explain which config files of the user would not be read."""
    if not directory.is_dir():
        yield f"--config-dir {directory} is not a directory"
    for file in sorted(directory.rglob("*.yaml")):
        try:
            check_readable(file)
        except InputError as error:
            yield str(error)
    for override in line.overrides:
        group, value = parse_key(override).partition("@")[0], override.partition("=")[2]
        for option in _split_sweep(override) or [value]:
            name = f"{group}/{option}.yaml"
            if (directory / name).is_file() and (CONFIG_DIR / name).is_file():
                yield f"{directory / name} would not be used, as there is a config/{name}: rename it"


class GuardedLoader(ConfigLoaderImpl):
    """Hydra's loader, with which a user's config files cannot run code.

    Only the command line may set the keys of OUR_CODE_KEYS. Hydra's own keys that name code may not be set at all.
    Hydra composes every config with this loader, and in a sweep the configs of all jobs before the first job starts.
    Each config is compared with the one composed without the user's files, so it does not matter what the files contain
    and how they are chosen.
    """

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        """Compose a job's config, and exit if it is invalid."""
        config = super().load_sweep_config(master_config, sweep_overrides)
        job = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
        try:
            problems = find_config_problems(job, resolve(job))
        except InputError as error:
            problems = [str(error)]
        exit_on(problems)
        return config

    def load_configuration(
        self, config_name: str | None, overrides: list[str], *args: Any, **kwargs: Any
    ) -> DictConfig:
        config = super().load_configuration(config_name, overrides, *args, **kwargs)
        keys = [parse_key(override) for override in overrides]
        if SEARCH_PATH not in keys:  # no --config-dir
            return config
        hydra_overrides = [o for o in overrides if parse_key(o).startswith("hydra") and parse_key(o) != SEARCH_PATH]
        try:
            without_files = super().load_configuration(config_name, hydra_overrides, *args, **kwargs)
        except COMPOSITION_ERRORS:  # one of these overrides chooses a file of the user
            without_files = super().load_configuration(config_name, [], *args, **kwargs)
        values_without_files = _find_code_values(without_files)
        problems = []
        for key, value in _find_code_values(config).items():
            is_changed = value != values_without_files.get(key, ABSENT)
            if is_changed and key not in (*ALLOWED_HYDRA_KEYS, *keys):
                advice = "; give it on the command line" if key in OUR_CODE_KEYS else ""
                problems.append(
                    f"--config-dir: {key} may not be set in a config file, as it can name code to run{advice}"
                )
        exit_on(problems)
        return config


def _find_code_values(config: DictConfig) -> dict[str, Any]:
    """The values of the keys by which a config can run code."""
    values: Any = OmegaConf.to_container(config, resolve=False)
    hydra_values = dict(dotted(values["hydra"], "hydra."))
    code_values = {key: value for key, value in hydra_values.items() if not key.startswith(COMPOSITION_RECORDS)}
    return code_values | {key: value for key, value in dotted(values) if key in OUR_CODE_KEYS and value}


def _explain_refusal(override: str, error: Exception, directories: list[Path]) -> str:
    """Explain why Hydra refuses an override."""
    key, equals, value = override.lstrip("+~").partition("=")
    if not equals and not override.startswith("~"):
        return f"{override} is not an override: write NAME=VALUE"
    options = sorted(file.stem for directory in directories for file in (directory / key).glob("*.yaml"))
    if options and value not in options:
        if path_explanation := _explain_path(key, value):
            return path_explanation
        hint = f"; for a model of the Hub give model.name_or_path={value}" if key == "model" else ""
        return f"{explain_unknown(key, value, options)}{hint}"
    message = f"{error}{error.__cause__}"
    if "is not in struct" in message:
        if full_key := re.search(r"full_key: ([\w.]+)", message):
            key = full_key[1]  # the absent key, which may be inside the value
        if key.startswith(WEIGHTS):
            return find_value_problem(key, value, KEYS) or f"{override} is not a valid override"
        return _explain_absent_key(key, directories[0])
    if value.lstrip("[").startswith("~"):
        return f"{override}: ~ is not expanded here; write the whole path"
    if isinstance(error, OverrideParseException):
        if quoted := _quote(value):
            return f"{override}: some of its characters have a meaning in Hydra: write '{key}={quoted}'"
        return f"{override} is not a valid override: remove what is not part of the value, such as a comma at its end"
    return f"{override} is not a valid override: {one_sentence(error)}"


def _explain_absent_key(key: str, config_dir: Path) -> str:
    """Explain that a key is absent, and which options have it."""
    group, _, name = key.partition(".")
    files = sorted(config_dir.glob(f"{group}/*.yaml"))
    options_with_key = [file.stem for file in files if name in load_file(file)]
    options_without_key = [file.stem for file in files if name not in load_file(file)]
    if not options_with_key:
        return explain_unknown_key(key, [*KEYS, "dataset_sources", *os.listdir(config_dir)])
    if len(options_with_key) <= len(options_without_key):
        options = " and ".join(f"{group}={option}" for option in options_with_key)
        return f"{key} does not exist here: it belongs to {options}"
    return f"{key} does not exist here: it belongs to any {group} but {', '.join(options_without_key)}"


def _quote(value: str) -> str | None:
    """Quote a value for Hydra; return None if quotes would not help.

    A value with characters that need quotes is quoted if it is a path that exists, or has no other syntax of Hydra.
    """
    text = value.removeprefix("[").removesuffix("]")
    if not NEEDS_QUOTES.search(text):
        return None
    is_existing_path = Path(text).exists() and '"' not in text
    looks_like_path = "/" in text and text == value
    without_commas = text.replace(",", "") if looks_like_path else text  # the commas of a path make no list
    if is_existing_path or not HYDRA_SYNTAX.search(without_commas):
        return value.replace(text, f'"{text}"')
    return None


def _explain_path(group: str, value: str) -> str | None:
    """Explain which key takes the PATH of `group=PATH`."""
    if "/" not in value and not Path(value).is_dir():
        return None
    if group == "lora":
        return f"lora={value}: to start from an adapter, give model.archive={value} lora=lora"
    if group != "model":
        return None
    for file in sorted((CONFIG_DIR / "model").glob("*.yaml")):
        if load_file(file).get("name_or_path") == value:
            return f"model={value}: here it is model={file.stem}"
    return (
        f"model={value}: model names a file of config/model; for a directory or Hub id give model.name_or_path={value}"
    )


def _take_first_job(override: str) -> str:
    """Reduce `loss.beta=0.1,0.5` to `loss.beta=0.1`."""
    values = _split_sweep(override)
    return f"{override.split('=', 1)[0]}={values[0]}" if values else override


def _split_sweep(override: str) -> list[str]:
    """Split a swept override into its values; [] without a sweep."""
    try:
        parsed = OverridesParser.create().parse_override(override)
    except HydraException:
        return []  # `_explain_refusal` says why
    if GLOB.search(override) or not parsed.is_sweep_override():
        return []
    return list(parsed.sweep_string_iterator())
