"""Checks of the command line before Hydra sees it.

Options must be on an allow-list, no secret may be written down, and no key may name code to run. Hydra stops at the
first override that it cannot apply; these checks find all such overrides, and the problems of the other overrides.
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
from dpo.settings.files import ABSENT, CONFIG_DIR, UNRESOLVED, dotted, flatten, help_text, load_file
from dpo.settings.keys import KEYS
from dpo.settings.plan import make_plan
from dpo.settings.validation import WEIGHTS, explain_unknown_key, find_problems, find_value_problem
from dpo.system.host import is_rank_0
from dpo.system.plain_files import check_readable
from dpo.system.redaction import redact, secrets_in

MULTIRUN = ("-m", "--multirun")
FLAGS = (*MULTIRUN, "-h", "--help", "--hydra-help", "--version", "--resolve")
WITH_VALUE = ("-c", "--cfg", "-p", "--package", "-i", "--info", "-sc", "--shell-completion", "-cd", "--config-dir")
CONFIG_DIR_OPTIONS = ("-cd", "--config-dir")
SHOWING = ("--hydra-help", "--version", "-sc", "--shell-completion", "-i", "--info")  # nothing runs

TO_QUOTE = re.compile(r"[^\w\s/\\.+$%*@?|:-]|[^\x00-\x7f]")  # characters that Hydra accepts only in quotes
MEANT = re.compile(r"""[\[\]{},'"]""")  # lists, mappings, quotes: whoever writes them knows Hydra's grammar
GLOB = re.compile(r"=\s*glob\(")
# a group's option that is a number, keys inside a value that is not a mapping, a file that is not YAML
COMPOSING = (HydraException, OmegaConfBaseException, ValueError, AssertionError, AttributeError, yaml.YAMLError)

# Hydra's own keys that an override may set; others can name code, which Hydra would import and call
HYDRAS_OWN = (
    "hydra.run.dir",
    "hydra.sweep.dir",
    "hydra.sweep.subdir",
    "hydra.verbose",
    "hydra/launcher",
    "hydra/sweeper",
)
SEARCH_PATH = "hydra.searchpath"
HOW_COMPOSED = ("hydra.runtime.", "hydra.overrides.", SEARCH_PATH, "hydra.job.override_dirname")
NAMES_CODE = ("model.trust_remote_code", "online.function")
SAME_IN_ALL = "hydra.job.config.override_dirname.exclude_keys"


class CommandLine(NamedTuple):
    """Hydra's options and the overrides, parsed."""

    options: list[str]
    overrides: list[str]
    config_dir: str | None

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
        """Arguments for Hydra; for a sweep, also the keys not swept."""
        if not self.is_sweep:
            return [*self.options, *self.overrides, *self.search]
        swept = {parse_key(override) for override in self.overrides if _split_sweep(override) is not None}
        fixed = [key for key in map(parse_key, self.overrides) if key not in swept]
        shared = f"{SAME_IN_ALL}={fixed!r}".replace(" ", "")
        # Hydra tries fixed overrides without swept ones: with `-m loss=dpo,ipo`, an option of the loss on the default
        groups = tuple(f"{key}." for key in swept)
        forced = [f"++{o}" if o.startswith(groups) and parse_key(o) in fixed else o for o in self.overrides]
        return [*self.options, *forced, *self.search, shared]

    @property
    def search(self) -> list[str]:
        """The override by which Hydra finds a user's config files."""
        if self.config_dir is None:
            return []
        place = str(Path(self.config_dir).resolve()).replace("'", "\\'")
        return [f"{SEARCH_PATH}=['file://{place}']"]


def parse_key(override: str) -> str:
    """The key or group that an override sets."""
    return override.split("=", 1)[0].lstrip("+~")


def check_command_line(arguments: list[str]) -> list[str]:
    """Convert the arguments for Hydra.

    Exits with status 2 and a sentence for each problem.
    """
    try:
        line = parse(arguments)
    except ValueError as error:
        exit_on([str(error)])
        raise
    if line.wants_help:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `--help | head` ends like any other tool
        print(help_text())
        sys.exit(0)
    problems = find_line_problems(line)
    for secret in (text for text in secrets_in(line.overrides) if len(text) > 3):  # or it would be in any word
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
        name, has_value, value = argument.partition("=")
        if name not in (*FLAGS, *WITH_VALUE):
            raise ValueError(f"{name} is not an option here; there are {', '.join((*FLAGS, *WITH_VALUE))}")
        words = [argument]
        if name in WITH_VALUE and not has_value:
            value = next(remaining, "")
            words.append(value)
        if name in CONFIG_DIR_OPTIONS:
            if not value:
                raise ValueError(f"{name} needs a directory: {name} DIR")
            config_dir = value
        else:
            options += words
    return CommandLine(options, _with_paths(overrides), config_dir)


def _find_sign(override: str) -> str:
    """The sign that Hydra demands before some overrides."""
    if override.startswith(("dataset_sources.", "dataset_sources=")):  # open to new names
        return "++"
    return "+" if override.startswith("experiment=") else ""  # none is chosen by default


def _with_paths(overrides: list[str]) -> list[str]:
    """Write `dataset_sources.NAME=PLACE` as `dataset_sources.NAME.path=PLACE` beside other keys of NAME."""
    keys = [parse_key(override) for override in overrides]
    shared = {key for key in keys if key.startswith("dataset_sources.") and any(k.startswith(f"{key}.") for k in keys)}
    return [
        override.replace("=", ".path=", 1) if key in shared and "={" not in override else override
        for override, key in zip(overrides, keys, strict=True)
    ]


def find_line_problems(line: CommandLine) -> list[str]:
    """List the problems of a command line, one sentence each.

    The config's values are checked only if an override cannot be applied: else `main` checks those of every job.
    """
    if torn := next((o for o in line.overrides if o.startswith("=")), None):  # `= 3` or `=3`, after `lr`
        before = next((a for a, b in itertools.pairwise(line.overrides) if b is torn and "=" not in a), "NAME")
        return [f"{before} {torn}: write {before}=VALUE, with no spaces around ="]
    problems = [problem for o in line.overrides if (problem := refuse_hydras_own(o))]
    problems += [f"{o}: glob() does not work here; name the options" for o in line.overrides if GLOB.search(o)]
    if line.is_sweep:
        problems += [
            f"{parse_key(o)} holds a secret, and a sweep writes its command line down: give it as '${{oc.env:NAME}}'"
            for o in line.overrides
            if secrets_in([o]) or redact(o) != o
        ]
    if line.config_dir is not None and not problems:
        problems = [*_find_unusable_files(line, Path(line.config_dir))]
    if problems or line.only_shows:
        return problems
    overrides = [_take_first_job(o) for o in line.overrides] if line.is_sweep else line.overrides
    places = [CONFIG_DIR, *([] if line.config_dir is None else [Path(line.config_dir)])]
    with hydra.initialize_config_dir(str(CONFIG_DIR.resolve()), version_base="1.3"):
        return _find_refused(overrides, line.search, places)


def refuse_hydras_own(override: str) -> str | None:
    """Why an override of Hydra's own keys is refused, if it is."""
    key = parse_key(override)
    if re.split("[@./]", key)[0] != "hydra" and "@hydra" not in key:
        return None
    if (key in HYDRAS_OWN or key.startswith(("hydra.launcher.", "hydra.sweeper."))) and "_target_" not in override:
        return None
    return f"{key} may not be set: Hydra's own keys can name code to run, and of them only {', '.join(HYDRAS_OWN)} may"


def _find_refused(overrides: list[str], search: list[str], places: list[Path]) -> list[str]:
    """List why Hydra refuses overrides, and the problems of the others."""
    try:
        _compose([*search, *overrides])
        return []
    except COMPOSING:
        pass  # Hydra names the first that it refuses: add them one by one to find all
    accepted, refused = list(search), {}  # refused: why, by key
    for override in sorted(overrides, key=lambda o: not _names_group(o, places)):  # groups first: they bring the keys
        key = parse_key(override)
        if key.startswith(tuple(f"{group}." for group in refused)):
            continue  # it is not known whether the key exists
        try:
            _compose([*accepted, override])
            accepted.append(override)
        except COMPOSING as error:
            refused[key] = _explain(override, error, places)
    # the values that refused overrides would have set are not known
    values = flatten(hydra.compose("config", accepted)) | dict.fromkeys(refused, UNRESOLVED)
    hidden = tuple(f"{group}." for group in refused)
    values |= {key: UNRESOLVED for key in values if key.startswith(hidden)}
    try:
        return [*refused.values(), *find_problems(values, make_plan(values))]
    except InputError as error:  # the launcher's variables
        return [*refused.values(), str(error)]


def _compose(overrides: list[str]) -> DictConfig:
    return hydra.compose("config", overrides, return_hydra_config=True)


def _names_group(override: str, places: list[Path]) -> bool:
    return any((place / parse_key(override)).is_dir() for place in places)


def _find_unusable_files(line: CommandLine, directory: Path) -> Iterator[str]:
    """Find a user's config files that cannot or would not be read."""
    if not directory.is_dir():
        yield f"--config-dir {directory} is not a directory"
    for file in sorted(directory.rglob("*.yaml")):
        try:
            check_readable(file)
        except InputError as error:
            yield str(error)
    for override in line.overrides:
        group, value = parse_key(override).partition("@")[0], override.partition("=")[2]
        for name in (f"{group}/{part}.yaml" for part in _split_sweep(override) or (value,)):
            if (directory / name).is_file() and (CONFIG_DIR / name).is_file():
                yield f"{directory / name} would not be used, as there is a config/{name}: rename it"


class GuardedLoader(ConfigLoaderImpl):
    """Hydra's loader, under which a user's config files name no code.

    Only the command line may name code, and only that of NAMES_CODE. The loader composes every config that Hydra uses,
    of each job of a sweep before the first one starts. So it compares what the user's files come to, whatever they
    contain and however they are chosen.
    """

    def load_configuration(
        self, config_name: str | None, overrides: list[str], *args: Any, **kwargs: Any
    ) -> DictConfig:
        config = super().load_configuration(config_name, overrides, *args, **kwargs)
        if any(parse_key(override) == SEARCH_PATH for override in overrides):
            hydras = [o for o in overrides if parse_key(o).startswith("hydra") and parse_key(o) != SEARCH_PATH]
            try:
                plain = super().load_configuration(config_name, hydras, *args, **kwargs)
            except COMPOSING:  # Hydra's own overrides choose a file of the user
                plain = super().load_configuration(config_name, [], *args, **kwargs)
            allowed, without_files = {*HYDRAS_OWN, *map(parse_key, overrides)}, _find_code(plain)
            changed = [key for key, value in _find_code(config).items() if without_files.get(key, ABSENT) != value]
            problem = "--config-dir: {} may be set on the command line alone, if at all"
            exit_on([problem.format(key) for key in changed if key not in allowed])
        return config


def _find_code(config: DictConfig) -> dict[str, Any]:
    """The keys of a config that can name code, and their values."""
    values: Any = OmegaConf.to_container(config, resolve=False)
    hydras = {key: value for key, value in dotted(values["hydra"], "hydra.") if not key.startswith(HOW_COMPOSED)}
    return hydras | {key: value for key, value in dotted(values) if key in NAMES_CODE and value}


def _explain(override: str, error: Exception, places: list[Path]) -> str:
    """A sentence on why Hydra refuses an override."""
    key, equals, value = override.lstrip("+~").partition("=")
    if not equals and not override.startswith("~"):
        return f"{override} is not an override: write NAME=VALUE"
    options = sorted(path.stem for place in places for path in (place / key).glob("*.yaml"))
    if options and value not in options:
        other = f"; a model of the Hub is model.name_or_path={value}" if key == "model" else ""
        return _explain_place(key, value) or explain_unknown(key, value, options) + other
    message = f"{error}{error.__cause__}"
    if "is not in struct" in message:
        inner = re.search(r"full_key: ([\w.]+)", message)  # the absent key, which may be inside of the value
        key = inner[1] if inner else key
        if key.startswith(WEIGHTS):
            return find_value_problem(key, value, KEYS) or f"{override} is not a valid override"
        return _explain_absent_key(key, places[0])
    if value.lstrip("[").startswith("~"):
        return f"{override}: ~ is not expanded here; write the whole path"
    if isinstance(error, OverrideParseException) and (quoted := _quote(value)):
        return f"{override}: some of its characters mean something to Hydra: write '{key}={quoted}'"
    return f"{override} is not a valid override: {one_sentence(error)}"


def _explain_absent_key(key: str, config_dir: Path) -> str:
    """A sentence with the options of a group that have the key."""
    group, _, name = key.partition(".")
    options = {file.stem: name in load_file(file) for file in sorted(config_dir.glob(f"{group}/*.yaml"))}
    having = [option for option, has_key in options.items() if has_key]
    lacking = [option for option, has_key in options.items() if not has_key]
    if not having:
        return explain_unknown_key(key, [*KEYS, "dataset_sources", *os.listdir(config_dir)])
    if len(having) <= len(lacking):
        return f"{key} does not exist here: it belongs to {' and '.join(f'{group}={option}' for option in having)}"
    return f"{key} does not exist here: it belongs to any {group} but {', '.join(lacking)}"


def _quote(value: str) -> str | None:
    """The value with Hydra's quotes, if they are all that it lacks."""
    text = value.removeprefix("[").removesuffix("]")
    if not TO_QUOTE.search(text):
        return None
    is_path = Path(text).exists() and '"' not in text
    checked = text.replace(",", "") if "/" in text and text == value else text  # a path may have commas
    return value.replace(text, f'"{text}"') if is_path or not MEANT.search(checked) else None


def _explain_place(group: str, value: str) -> str | None:
    """A message on a group's value that belongs to another key."""
    if "/" not in value and not Path(value).is_dir():
        return None
    if group == "lora":
        return f"lora={value}: an adapter to start from is model.archive={value} lora=lora"
    if group != "model":
        return None
    for file in sorted((CONFIG_DIR / "model").glob("*.yaml")):
        if load_file(file).get("name_or_path") == value:
            return f"model={value}: here it is model={file.stem}"
    return f"model={value}: model names a file of config/model; a directory or Hub id is model.name_or_path={value}"


def _take_first_job(override: str) -> str:
    """Reduce `loss.beta=0.1,0.5` to `loss.beta=0.1`."""
    parts = _split_sweep(override)
    return override if parts is None else f"{override.split('=', 1)[0]}={next(parts)}"


def _split_sweep(override: str) -> Iterator[str] | None:
    """Yield the values of a swept override; None if it has one."""
    try:
        parsed = OverridesParser.create().parse_override(override)
    except HydraException:
        return None  # `_find_refused` explains it
    return parsed.sweep_string_iterator() if parsed.is_sweep_override() and not GLOB.search(override) else None
