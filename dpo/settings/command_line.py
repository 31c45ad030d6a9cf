"""The command line, checked before and after Hydra composes a config from it.

A sweep, whose command line Hydra writes to disk, may contain no secret. A user's config file may name no code to run.
"""

import itertools
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
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
from dpo.system.launching import find_rank_env

MULTIRUN, HELP, VERSION = ("-m", "--multirun"), ("-h", "--help"), "--version"
CONFIG_DIR_OPTIONS = ("-cd", "--config-dir")
FLAGS = (*MULTIRUN, *HELP, VERSION, "--hydra-help", "--resolve")
WITH_VALUE = (
    "-c", "--cfg", *CONFIG_DIR_OPTIONS, "-p", "--package", "-i", "--info", "-sc", "--shell-completion",
)  # fmt: skip
# Hydra's own keys that an override may set; others can name code, which Hydra would import and call
ALLOWED_HYDRA_KEYS = re.compile(r"hydra\.((run|sweep)\.(sub)?dir|verbose)|hydra[./](launcher|sweeper).*")
# Hydra records in these keys how it composed a config.
COMPOSITION_RECORDS = ("hydra.runtime.", "hydra.overrides.", "hydra.searchpath", "hydra.job.override_dirname")
# A config can run code through these keys of this project.
OUR_CODE_KEYS = ("model.trust_remote_code", "online.function", "plugins")
# matches NAME = VALUE, NAME =VALUE and NAME= VALUE in arguments that are joined by NUL
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
        """The override by which Hydra finds the user's config files, in a list; [] without --config-dir."""
        if not self.config_dir:
            return []
        path = str(Path(self.config_dir).resolve()).replace("'", "\\'")
        return [f"hydra.searchpath=['file://{path}']"]

    def list_choices(self, group: str) -> list[str]:
        """List the options of a config group, with those in the user's files; [] if there is no such group."""
        folders = [Path(folder, group) for folder in (CONFIG_DIR, self.config_dir) if group and folder]
        choices = {file.stem for folder in folders for file in folder.glob("*.yaml")}
        if group == "loss":
            choices |= ADDED_LOSSES.keys()
        return sorted(choices)


class BadCommandLine(InputError):
    """An error with several `problems`."""

    def __init__(self, problems: Iterable[str]):
        self.problems = [*problems]
        super().__init__("\n".join(self.problems))


def check_command_line(arguments: list[str]) -> tuple[list[str], Plan | None]:
    """Return arguments for Hydra, and the plan. Exits after --help and --version, and with status 2 for bad input.

    The plan is None for a sweep, and if Hydra's options (such as `--cfg job`) only show something.
    """
    try:
        line = parse(arguments)
        if {*HELP, VERSION} & {*line.options}:
            print(f"dpo {__version__}" if VERSION in line.options else help_text())
            sys.exit()
        plan = check_line(line)
    except BadCommandLine as error:
        exit_with(error.problems)
    except InputError as error:
        exit_with([str(error)])
    return [*line.options, *line.overrides, *line.search_path], plan


def exit_with(problems: list[str]) -> NoReturn:
    """Print the problems, on rank 0 alone, and exit with status 2."""
    if is_launched_as_rank_0():
        lines = [f"  - {redact(problem)}" for problem in problems]
        print("bad configuration:", *lines, sep="\n", file=sys.stderr)
    sys.exit(2)


# --- parsing ----------------------------------------------------------------------------------------------------------


def parse(arguments: list[str]) -> CommandLine:
    """Parse a command line, run its plugins, and register their losses with Hydra.

    Raises InputError for an unknown or abbreviated option, spaces around =, and a --config-dir that is no directory.
    """
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
                our_name = setting if setting in KEYS else find_alias(setting)
                if our_name:
                    advice = f"write {our_name}={value or 'VALUE'}" if our_name in KEYS else f"here it is {our_name}"
                raise InputError(f"{name} is not an option here: {advice}")
            if name not in CONFIG_DIR_OPTIONS:
                options += [name, value]
            elif value and Path(value).is_dir():
                config_dir = value
            else:
                raise InputError(f"{name}={value} is not a directory")
    for override in overrides:  # config files may name no plugins
        if parse_key(override) == "plugins":
            with suppress(HydraException):  # `_explain_override` reports an override that cannot be parsed
                load_plugins(PARSER.parse_override(override).value())
    for name in ADDED_LOSSES:
        ConfigStore.instance().store(f"{name}.yaml", describe_added_loss(name), group="loss")
    line = CommandLine(options, [], config_dir)
    for override in overrides:
        line.overrides.extend(_expand_model(override, line))
    return line._replace(overrides=[_mark_for_hydra(override, line) for override in line.overrides])


def _expand_model(override: str, line: CommandLine) -> list[str]:
    """Return the overrides that `model=NAME` stands for; any other override is returned alone, as it is.

    NAME is a config of `config/model`, or else a directory or Hub id. If it is both, it means the config.
    """
    names = [name.strip(QUOTES) for name in override.removeprefix("model=").split(",")]  # several in a sweep
    are_models = all(find_local(name) or HUB_ID.fullmatch(name) for name in names)
    if not override.startswith("model=") or not are_models:
        return [override]
    meaning = path_override = f"model.name_or_path={','.join(map(quote, names))}"
    is_config = {*names} <= {*line.list_choices("model")}
    if is_config:
        meaning = f"its config; the directory is model=./{names[0]}"
    if is_launched_as_rank_0():
        print(f"{override} is taken for {meaning}", file=sys.stderr)
    return [override] if is_config else ["model=blank_model_bfloat16", path_override]


def quote(text: str) -> str:
    """Quote a text in the grammar of overrides, which reads the same text from it."""
    escaped = re.sub(r'(\\+)(?="|\Z)', r"\1\1", text).replace('"', r"\"")  # also backslashes before a quote
    return f'"{escaped}"'


def parse_key(override: str) -> str:
    """Return the key that an override sets, without Hydra's marks (+, ++ and ~)."""
    return override.split("=", 1)[0].lstrip("+~")


def split_sweep(override: str) -> list[str]:
    """Split `loss.beta=0.1,0.5` into an override for each value; return an override of one value alone."""
    parsed = PARSER.parse_override(override)
    if not parsed.is_discrete_sweep():
        return [override]
    return [f"{override.split('=', 1)[0]}={value}" for value in parsed.sweep_string_iterator()]


def _mark_for_hydra(override: str, line: CommandLine) -> str:
    """Put `++` before an override, so that Hydra accepts any key; `find_problems` then refuses unknown keys.

    Overrides of config groups and of Hydra's own keys get no `++`.
    """
    key = parse_key(override)
    if override.startswith("~") or "=" not in override or _is_hydra_key(key):
        return override
    if line.list_choices(key.partition("@")[0]):
        # An experiment is added, as none is chosen by default; an option of another group replaces the default one.
        return f"+{override}" if override.startswith("experiment=") else override
    # With dataset_sources.NAME.columns=... beside it, dataset_sources.NAME=PATH means dataset_sources.NAME.path=PATH.
    has_other_keys = any(parse_key(other).startswith(f"{key}.") for other in line.overrides)
    if key.startswith("dataset_sources.") and has_other_keys:
        override = override.replace("=", ".path=", 1)
    return f"++{override.lstrip('+')}"


def _is_hydra_key(key: str) -> bool:
    """Whether a key is Hydra's own, such as `hydra.run.dir`, `hydra/launcher` or `loss@hydra.NAME`."""
    return re.split("[@./]", key)[0] == "hydra" or "@hydra" in key


# --- problems ---------------------------------------------------------------------------------------------------------


def check_line(line: CommandLine) -> Plan | None:
    """Return the plan that `check_command_line` returns.

    Raises BadCommandLine with the problems of the run, or of all jobs of a sweep.
    """
    problems = []
    refused = []
    for override in line.overrides:
        if sentence := _explain_override(override, line):
            problems.append(sentence)
            refused.append(f"{parse_key(override)}.")
    # Refused keys, and keys below them, are left out of the config, and nothing more is said about them.
    refused_prefixes = tuple(refused)
    accepted = [override for override in line.overrides if not f"{parse_key(override)}.".startswith(refused_prefixes)]
    if line.config_dir:
        for file in Path(line.config_dir).rglob("*.yaml"):
            name = file.relative_to(line.config_dir)
            if (CONFIG_DIR / name).exists():
                problems.append(f"--config-dir: {name} has the name of one of ours: rename it")
    if line.is_sweep and find_rank_env():
        problems.append("under a launcher only the first job of a sweep (-m) would run: run it without one")
    typed = {parse_key(override): override.partition("=")[2] for override in line.overrides}
    experiment = typed.get("experiment")
    # An experiment NAME beside NAME_lora has a learning rate for all weights; NAME_lora has the one for an adapter.
    fits_adapter = "lr" in typed or f"{experiment}_lora" not in line.list_choices("experiment")
    if not fits_adapter and typed.get("lora", "none") != "none":
        problems.append(
            f"experiment={experiment} has a learning rate for all weights: set experiment={experiment}_lora, or lr"
        )
    plan = None
    for job in itertools.product(*map(split_sweep, accepted)):
        try:
            config = _compose([*line.search_path, *job])
        except Exception as error:  # a user's files may contain anything
            problems.append(f"the config cannot be composed: {one_sentence(error)}")
            break
        problems += _find_code_in_files(config, line, typed)
        if {*line.options} <= {*MULTIRUN}:  # else Hydra shows something in place of running
            own_config: Any = OmegaConf.to_container(config)
            del own_config["hydra"]
            plan = resolve(own_config, gpus=UNCOUNTED, typed=typed)
            found = find_problems(plan)
            if not found and not problems:  # GPUs are counted only now, as that may import torch, which takes seconds
                plan = make_plan(plan.values, has_new_run_dir=plan.has_new_run_dir)
                found = find_problems(plan)
            problems += [problem.sentence for problem in found if not f"{problem.key}.".startswith(refused_prefixes)]
    if problems:
        raise BadCommandLine(dict.fromkeys(problems))
    return None if line.is_sweep else plan


def _compose(overrides: list[str]) -> DictConfig:
    with hydra.initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        return hydra.compose("config", overrides, return_hydra_config=True)


def _find_code_in_files(config: DictConfig, line: CommandLine, typed: Mapping) -> Iterator[str]:
    """Yield a problem for each key that can name code and that the user's config files set."""
    if not line.config_dir:
        return
    # The config is compared with one that Hydra composes without the files, so it does not matter how they set a key.
    # Of the overrides, only those of Hydra's own keys are composed here: others may choose options in the files.
    own = _compose([override for override in line.overrides if _is_hydra_key(parse_key(override))])
    without_files = list(_list_code(own))
    for key, value in _list_code(config):
        if (key, value) not in without_files and key not in typed:
            yield f"--config-dir: {key} can name code to run, so no config file may set it: type it instead"


def _list_code(config: DictConfig) -> Iterator[tuple[str, Any]]:
    """Yield the keys that can name code, with their values."""
    for key, value in dotted(OmegaConf.to_container(config)):  # type: ignore[arg-type]
        is_ours = key in OUR_CODE_KEYS and value
        if is_ours or (_is_hydra_key(key) and not key.startswith(COMPOSITION_RECORDS)):
            yield key, value


def _explain_override(override: str, line: CommandLine) -> str | None:
    """Say what is wrong with an override by itself, whatever the others are; None if nothing is."""
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
        if value.startswith(("[", "{")):
            return (
                f"{key}={value} cannot be read: quote the parts with other characters than letters, digits and spaces"
            )
        return f"{key}={value} cannot be read: write {shlex.quote(f'{key}={quote(value.strip(QUOTES))}')}"
    if "glob(" in value or (parsed.is_sweep_override() and not line.is_sweep):
        number = value.replace(",", ".") if re.fullmatch(r"-?\d+,\d+", value) else "ONE"  # a decimal comma
        return (
            f"{key}={value} has several values: write {key}={number}, [A,B] for a list, or -m A,B to run each in turn"
        )
    group = key.partition("@")[0]
    if options := line.list_choices(group):
        for single in split_sweep(override):
            option = str(PARSER.parse_override(single).value())
            name = find_alias(option)
            if name and name.startswith(f"{group}="):
                return f"{group}={option}: here it is {name}"
            if option not in options:
                note = "model=DIR_OR_HUB_ID takes any other; " if group == "model" else ""
                return f"{group}={option} is unknown{suggest(option, options)} ({note}there are {', '.join(options)})"
        return None
    # An option of a loss may have other types in other losses, so `find_problems` checks its value.
    if key in KEYS and not key.startswith("loss."):
        is_literal = not parsed.is_sweep_override() and "${" not in override
        return find_value_problem(key, parsed.value()) if is_literal else None
    is_known = any(f"{known}.".startswith(f"{key}.") for known in KEYS)  # as a key or a section
    if is_known or key.split(".")[0] in OPEN_MAPPINGS or _is_hydra_key(key):
        return None
    return find_value_problem(key, value)


# --- the jobs of a sweep, and help ------------------------------------------------------------------------------------


def set_job_dir(plan: Plan, hydra_config: Any) -> Plan:
    """Return the plan of a sweep's job with a run directory that has the job's number, and the sweep's W&B group.

    The directory is inside `local_run_dir` if the user set it, else beside the default one.
    """
    sweep_dir = plan.run.local_run_dir
    job_dir = f"{sweep_dir}/{hydra_config.job.num}"
    if plan.has_new_run_dir:
        sweep_dir = hydra_config.sweep.dir
        job_dir = f"{plan.run.local_run_dir}_{hydra_config.job.num}"
    return plan.change("local_run_dir", job_dir).change("wandb.group", plan.wandb.group or Path(sweep_dir).name)


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
