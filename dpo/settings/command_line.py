"""The command line, checked before and after Hydra composes it: it may store no secret, and files may name no code."""

import itertools
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple, NoReturn

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from dpo import __version__
from dpo.errors import InputError, one_sentence, suggest
from dpo.plugins import ADDED_LOSSES
from dpo.redaction import is_secret, redact
from dpo.settings.keys import CONFIG_DIR, KEYS, OPEN_MAPPINGS, describe_added_loss, dotted, load_plugins
from dpo.settings.places import HUB_ID, find_local
from dpo.settings.plan import UNCOUNTED, Plan, make_plan, resolve
from dpo.settings.validation import find_alias, find_problems, find_value_problem
from dpo.system.host import is_launched_as_rank_0

MULTIRUN, HELP, VERSION = ("-m", "--multirun"), ("-h", "--help"), "--version"
CONFIG_DIR_OPTIONS = ("-cd", "--config-dir")
FLAGS = (*MULTIRUN, *HELP, VERSION, "--hydra-help", "--resolve")
WITH_VALUE = (
    "-c", "--cfg", *CONFIG_DIR_OPTIONS, "-p", "--package", "-i", "--info", "-sc", "--shell-completion",
)  # fmt: skip
# Hydra's own keys that an override may set; the other ones can name code, which Hydra would import and call
ALLOWED_HYDRA_KEYS = re.compile(r"hydra\.((run|sweep)\.(sub)?dir|verbose)|hydra[./](launcher|sweeper).*")
# Hydra records in these keys how it composed a config.
COMPOSITION_RECORDS = ("hydra.runtime.", "hydra.overrides.", "hydra.searchpath", "hydra.job.override_dirname")
# A config can run code through these keys of this project.
OUR_CODE_KEYS = ("model.trust_remote_code", "online.function", "plugins")
# NAME = VALUE, with NUL between arguments
SPACES_AROUND_EQUALS = re.compile(r"(?:^|\0)([\w./@]+)(?:\0=\0|\0=|=\0)([^\0=]+)(?=\0|$)")
QUOTES = "'\""
PARSER = OverridesParser.create()


class CommandLine(NamedTuple):
    options: list[str]  # Hydra's, with their values, without --config-dir
    overrides: list[str]  # as Hydra wants them, with `++` before keys
    config_dir: str | None  # the value of --config-dir

    @property
    def is_sweep(self) -> bool:
        return bool({*MULTIRUN} & {*self.options})

    @property
    def search_path(self) -> list[str]:
        """The override by which Hydra finds a user's config files."""
        if not self.config_dir:
            return []
        path = str(Path(self.config_dir).resolve()).replace("'", "\\'")
        return [f"hydra.searchpath=['file://{path}']"]

    def list_choices(self, group: str) -> list[str]:
        """List what a config group offers, with the user's files; [] if it is not a group."""
        folders = [Path(folder, group) for folder in (CONFIG_DIR, self.config_dir) if group and folder]
        options = {file.stem for folder in folders for file in folder.glob("*.yaml")}
        if group == "loss":
            options |= ADDED_LOSSES.keys()
        return sorted(options)


def check_command_line(arguments: list[str]) -> tuple[list[str], Plan | None]:
    """Return arguments for Hydra, and the plan. Exits with status 2 for bad input.

    There is no plan if Hydra shows something in place of running, or for a sweep.
    """
    try:
        line = parse(arguments)
    except InputError as error:
        exit_with([str(error)])
    if {*HELP, VERSION} & {*line.options}:
        print(f"dpo {__version__}" if VERSION in line.options else help_text())
        sys.exit()
    plan, problems = check_line(line)
    if problems:
        exit_with(problems)
    return [*line.options, *line.overrides, *line.search_path], plan


def exit_with(problems: list[str]) -> NoReturn:
    """Exit with status 2; one process of a launch prints the problems."""
    if is_launched_as_rank_0():
        lines = [f"  - {redact(problem)}" for problem in problems]
        print("bad configuration:", *lines, sep="\n", file=sys.stderr)
    sys.exit(2)


# --- parsing ----------------------------------------------------------------------------------------------------------


def parse(arguments: list[str]) -> CommandLine:
    """Parse a command line, and run its plugins. Raises InputError for an option that is unknown or abbreviated."""
    options = []
    overrides = []
    config_dir = None
    if spaced := SPACES_AROUND_EQUALS.search("\0".join(arguments)):
        raise InputError(f"{spaced[1]} = {spaced[2]} has spaces around =: write {spaced[1]}={spaced[2]}")
    remaining = iter(arguments)
    for argument in remaining:
        name, equals, value = argument.partition("=")
        if not argument.startswith("-"):
            overrides.append(argument)
        elif name in FLAGS:
            options.append(name)
        else:
            if not equals:
                value = next(remaining, "")
            if name not in WITH_VALUE:
                setting = name.lstrip("-").replace("-", "_")
                advice = f"settings are NAME=VALUE, and the options are {', '.join((*FLAGS, *WITH_VALUE))}"
                known = setting if setting in KEYS else find_alias(setting)
                if known:
                    advice = f"write {known}={value or 'VALUE'}" if known in KEYS else f"here it is {known}"
                raise InputError(f"{name} is not an option here: {advice}")
            if name not in CONFIG_DIR_OPTIONS:
                options += [name, value]
            elif value and Path(value).is_dir():
                config_dir = value
            else:
                raise InputError(f"{name}={value} is not a directory")
    _load_plugins(overrides)
    line = CommandLine(options, [], config_dir)
    for override in overrides:
        line.overrides.extend(_place_model(override, line))
    return line._replace(overrides=[_mark_for_hydra(override, line) for override in line.overrides])


def _place_model(override: str, line: CommandLine) -> list[str]:
    """Return the overrides that `model=NAME` stands for, and any other override alone, as it is.

    NAME is a config of `config/model`, or else a directory or Hub id.
    """
    names = override.removeprefix("model=").split(",")
    are_places = all(find_local(name) or HUB_ID.fullmatch(name) for name in names)
    if not override.startswith("model=") or not are_places:
        return [override]
    meaning = placed = f"model.name_or_path={','.join(map(_quote, names))}"
    is_config = {*names} <= {*line.list_choices("model")}
    if is_config:
        meaning = f"its config; the directory is model=./{names[0]}"
    if is_launched_as_rank_0():
        print(f"{override} is taken for {meaning}", file=sys.stderr)
    return [override] if is_config else ["model=blank_model_bfloat16", placed]


def _quote(value: str) -> str:
    escaped = value.replace('"', '\\"')
    return f'"{escaped}"'


def _load_plugins(overrides: Sequence[str]) -> None:
    """Run the plugins that the command line names, and tell Hydra their losses. A config file may name no plugins."""
    for override in overrides:
        if parse_key(override) == "plugins":
            with suppress(HydraException):  # `_explain_override` says what is wrong
                load_plugins(PARSER.parse_override(override).value())
    for name in ADDED_LOSSES:
        ConfigStore.instance().store(f"{name}.yaml", describe_added_loss(name), group="loss")


def parse_key(override: str) -> str:
    """Return the key that an override sets, without Hydra's marks."""
    return override.split("=", 1)[0].lstrip("+~")


def split_sweep(override: str) -> list[str]:
    """Split `loss.beta=0.1,0.5` into an override for each value."""
    parsed = PARSER.parse_override(override)
    if not parsed.is_discrete_sweep():
        return [override]
    return [f"{override.split('=', 1)[0]}={value}" for value in parsed.sweep_string_iterator()]


def _mark_for_hydra(override: str, line: CommandLine) -> str:
    """Put `++` before an override, with which Hydra takes any key; `find_problems` refuses those that it should."""
    key = parse_key(override)
    if override.startswith("~") or "=" not in override or _is_hydra_key(key):
        return override
    if line.list_choices(key.partition("@")[0]):
        # An experiment is added, as none is chosen by default; an option of another group replaces the default one.
        return f"+{override}" if override.startswith("experiment=") else override
    # Beside dataset_sources.NAME.columns=..., dataset_sources.NAME=PLACE means dataset_sources.NAME.path=PLACE.
    has_other_keys = any(parse_key(other).startswith(f"{key}.") for other in line.overrides)
    if key.startswith("dataset_sources.") and has_other_keys:
        override = override.replace("=", ".path=", 1)
    return f"++{override.lstrip('+')}"


def _is_hydra_key(key: str) -> bool:
    return re.split("[@./]", key)[0] == "hydra" or "@hydra" in key


# --- problems ---------------------------------------------------------------------------------------------------------


def check_line(line: CommandLine) -> tuple[Plan | None, list[str]]:
    """Find the plan that `check_command_line` returns, and the problems of all jobs."""
    problems = []
    refused = []
    for override in line.overrides:
        if sentence := _explain_override(override, line):
            problems.append(sentence)
            refused.append(f"{parse_key(override)}.")
    unknown = tuple(refused)  # what depends on a refused override is not known
    accepted = [override for override in line.overrides if not f"{parse_key(override)}.".startswith(unknown)]
    if line.config_dir:
        for file in Path(line.config_dir).rglob("*.yaml"):
            name = file.relative_to(line.config_dir)
            if (CONFIG_DIR / name).exists():
                problems.append(f"--config-dir: {name} has the name of one of ours: rename it")
    typed = {parse_key(override): override.partition("=")[2] for override in line.overrides}
    name = typed.get("experiment")
    # An experiment with a twin NAME_lora has the learning rate of all weights, and the twin that of an adapter.
    has_rates = "lr" in typed or f"{name}_lora" not in line.list_choices("experiment")
    if not has_rates and typed.get("lora", "none") != "none":
        problems.append(f"experiment={name} has a learning rate for all weights: set experiment={name}_lora, or lr")
    plan = None
    for job in itertools.product(*map(split_sweep, accepted)):
        try:
            config = _compose([*line.search_path, *job])
        except Exception as error:  # a user's files may contain anything
            problems.append(f"the config cannot be composed: {one_sentence(error)}")
            break
        problems += _find_code_in_files(config, line, typed)
        if {*line.options} <= {*MULTIRUN}:  # else Hydra shows something in place of running
            own_config = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
            plan = resolve(own_config, gpus=UNCOUNTED, typed=typed)
            found = find_problems(plan)
            if not found and not problems:  # only now, as counting GPUs may take an import of torch
                plan = make_plan(plan.values, has_new_run_dir=plan.has_new_run_dir)
                found = find_problems(plan)
            problems += [problem.sentence for problem in found if not f"{problem.key}.".startswith(unknown)]
    if line.is_sweep:
        plan = None
    return plan, list(dict.fromkeys(problems))


def _compose(overrides: list[str]) -> DictConfig:
    with hydra.initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        return hydra.compose("config", overrides, return_hydra_config=True)


def _find_code_in_files(config: DictConfig, line: CommandLine, typed: Mapping) -> list[str]:
    """Refuse keys that the user's config files set and that can name code."""
    if not line.config_dir:
        return []
    # Comparing what Hydra composes with and without the files covers all that they contain, however they are chosen.
    without_files = _list_code(
        _compose([override for override in line.overrides if _is_hydra_key(parse_key(override))])
    )
    problems = []
    for key, value in _list_code(config):
        if (key, value) not in without_files and key not in typed:
            problems.append(f"--config-dir: {key} can name code to run, so no config file may set it: type it instead")
    return problems


def _list_code(config: DictConfig) -> list[tuple[str, Any]]:
    """List the keys that can name code, with their values."""
    found = []
    for key, value in dotted(OmegaConf.to_container(config)):  # type: ignore[arg-type]
        is_ours = key in OUR_CODE_KEYS and value
        if is_ours or (_is_hydra_key(key) and not key.startswith(COMPOSITION_RECORDS)):
            found.append((key, value))
    return found


def _explain_override(override: str, line: CommandLine) -> str | None:
    """Say what is wrong with an override, whatever the others are; None if nothing is."""
    key, equals, value = override.lstrip("+").partition("=")
    if key.startswith("~") or not equals or not key:
        return f"{override} is not an override: write NAME=VALUE, with no spaces around ="
    if _is_hydra_key(key) and (not ALLOWED_HYDRA_KEYS.fullmatch(key) or "_target_" in override):
        return f"{key} may not be set: of Hydra's own keys, those of directories and launchers may"
    if line.is_sweep and redact(override) != override:
        return f"{key} holds a secret, and a sweep writes its command line to disk: set it to '${{oc.env:NAME}}'"
    try:
        parsed = PARSER.parse_override(override)
    except HydraException:
        if is_secret(key):
            value = "VALUE"
        return f"{key}={value} cannot be read: write {shlex.quote(f'{key}={_quote(value.strip(QUOTES))}')}"
    if "glob(" in value or (parsed.is_sweep_override() and not line.is_sweep):
        number = value.replace(",", ".") if re.fullmatch(r"-?\d+,\d+", value) else "ONE"
        return (
            f"{key}={value} has several values: write {key}={number}, [A,B] for a list, or -m A,B to run each in turn"
        )
    group = key.partition("@")[0]
    if options := line.list_choices(group):
        for job in split_sweep(override):
            option = str(PARSER.parse_override(job).value())
            if name := find_alias(option):
                return f"{group}={option}: here it is {name}"
            if option not in options:
                other = "model=DIR_OR_HUB_ID takes any other; " if group == "model" else ""
                return f"{group}={option} is unknown{suggest(option, options)} ({other}there are {', '.join(options)})"
        return None
    if key in KEYS and not key.startswith("loss."):  # an option may have other types in other losses
        is_fixed = not parsed.is_sweep_override() and "${" not in override
        return find_value_problem(key, parsed.value()) if is_fixed else None
    is_known = any(f"{known}.".startswith(f"{key}.") for known in KEYS)  # as a key or a section
    if is_known or key.split(".")[0] in OPEN_MAPPINGS or _is_hydra_key(key):
        return None
    return find_value_problem(key, value)


# --- the jobs of a sweep, and help ------------------------------------------------------------------------------------


def place_job(plan: Plan, hydra_config: Any) -> Plan:
    """Give a sweep's job a directory with its number, inside `local_run_dir` if that is given, and a W&B group."""
    sweep = plan.run.local_run_dir
    job_dir = f"{sweep}/{hydra_config.job.num}"
    if plan.has_new_run_dir:
        sweep = hydra_config.sweep.dir
        job_dir = f"{plan.run.local_run_dir}_{hydra_config.job.num}"
    return plan.change("local_run_dir", job_dir).change("wandb.group", plan.wandb.group or Path(sweep).name)


def help_text() -> str:
    parts = [USAGE]
    for group in sorted(CONFIG_DIR.glob("*/")):
        options = sorted(file.stem for file in group.glob("*.yaml"))
        parts.append(fill(f"{group.name}: {', '.join(options)}", 118, subsequent_indent="  ", break_on_hyphens=False))
    for pattern in ("config.yaml", "model/blank_model.yaml", "lora/lora.yaml", "online/online.yaml", "loss/**/*.yaml"):
        for file in sorted(CONFIG_DIR.glob(pattern)):
            keys = file.read_text(encoding="utf-8").split("\ndefaults:")[0]
            parts.append(f"# {file.relative_to(CONFIG_DIR.parent)}\n{keys}")
    return "\n\n".join([*parts, END])


USAGE = """Preference training of all weights or of adapters.

dpo train loss=dpo loss.beta=0.1 model=pythia28 exp_name=dpo ...

Config groups (choose with group=option):"""
END = """Also: --cfg job (the composed config), --hydra-help (Hydra's own options).
Bad input ends with status 2; HYDRA_FULL_ERROR=1 shows the traceback."""
