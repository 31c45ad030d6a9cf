"""The command line, checked before and after Hydra composes it: it may store no secret, and files may name no code."""

import itertools
import re
import shlex
import sys
from collections.abc import Sequence
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
from dpo.settings.keys import CONFIG_DIR, KEYS, OPEN_MAPPINGS, dotted, find_added_loss, load_plugins
from dpo.settings.places import HUB_ID, find_local
from dpo.settings.plan import Plan, resolve
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
# where Hydra records how it composed a config
COMPOSITION_RECORDS = ("hydra.runtime.", "hydra.overrides.", "hydra.searchpath", "hydra.job.override_dirname")
OUR_CODE_KEYS = (
    "model.trust_remote_code",
    "online.function",
    "plugins",
)  # keys of this project by which a config can run code

QUOTES = "'\""
PARSER = OverridesParser.create()


class CommandLine(NamedTuple):
    options: list[str]  # of Hydra, with their values, without --config-dir
    overrides: list[str]  # as Hydra wants them, with `++` before keys
    config_dir: str | None  # the value of --config-dir

    @property
    def is_sweep(self) -> bool:
        return not {*MULTIRUN}.isdisjoint(self.options)

    @property
    def search_path(self) -> list[str]:
        """The override by which Hydra finds a user's config files."""
        if self.config_dir is None:
            return []
        path = str(Path(self.config_dir).resolve()).replace("'", "\\'")
        return [f"hydra.searchpath=['file://{path}']"]

    def list_options(self, group: str) -> list[str]:
        """List the options of a group, with the user's; none if it is no group."""
        folders = filter(None, (CONFIG_DIR, self.config_dir))
        options = [file.stem for folder in folders for file in Path(folder, group).glob("*.yaml") if group]
        return sorted([*options, *(ADDED_LOSSES if group == "loss" else ())])


def check_command_line(arguments: list[str]) -> tuple[list[str], Plan | None]:
    """Return arguments for Hydra, and the plan: None if Hydra shows something or sweeps; exit 2 for bad input."""
    try:
        line = parse(arguments)
    except InputError as error:
        exit_with([str(error)])
    if set(HELP) & set(line.options):
        print(help_text())
        sys.exit()
    if VERSION in line.options:
        print(f"dpo {__version__}")
        sys.exit()
    plan, problems = check_line(line)
    if problems:
        exit_with(problems)
    return [*line.options, *line.overrides, *line.search_path], plan


def exit_with(problems: list[str]) -> NoReturn:
    if is_launched_as_rank_0():
        print("bad configuration:", *(f"  - {redact(problem)}" for problem in problems), sep="\n", file=sys.stderr)
    sys.exit(2)


# --- parsing ----------------------------------------------------------------------------------------------------------


def parse(arguments: list[str]) -> CommandLine:
    """Parse a command line; InputError for an option that is unknown, abbreviated or refused."""
    options, overrides, config_dir = [], [], None
    if spaced := re.search(r"(?:^|\0)([\w./@]+)(?:\0=\0|\0=|=\0)([^\0=]+)(?=\0|$)", "\0".join(arguments)):
        raise InputError(f"{spaced[1]} = {spaced[2]} has spaces around =: write {spaced[1]}={spaced[2]}")
    remaining = iter(arguments)
    for argument in remaining:
        name, equals, value = argument.partition("=")
        if not argument.startswith("-"):
            overrides.append(argument)
        elif name in FLAGS:
            options.append(name)
        elif name in WITH_VALUE:
            value = value if equals else next(remaining, "")
            if name not in CONFIG_DIR_OPTIONS:
                options += [name, value]
            elif Path(value).is_dir() and value:
                config_dir = value
            else:
                raise InputError(f"{name}={value} is not a directory")
        else:
            value = value or next(remaining, "")
            raise InputError(f"{name} is not an option here{_find_setting(name.lstrip('-').replace('-', '_'), value)}")
    _load_plugins(overrides)
    line = CommandLine(options, overrides, config_dir)
    placed = itertools.chain.from_iterable(_place_model(override, line) for override in overrides)
    return line._replace(overrides=[_sign(override, line) for override in placed])


def _find_setting(name: str, value: str) -> str:
    """How to write a setting that was given as an option."""
    known = name if name in KEYS else find_alias(name)
    if known is None:
        return f": settings are NAME=VALUE, and the options are {', '.join((*FLAGS, *WITH_VALUE))}"
    return f": write {known}={value or 'VALUE'}" if known in KEYS else f": here it is {known}"


def _place_model(override: str, line: CommandLine) -> list[str]:
    """Let `model` also name a directory or a model of the Hub; the configs of `model` go first."""
    values = override.removeprefix("model=").split(",")
    are_configs = {*values} <= {*line.list_options("model")}
    are_places = all(find_local(value) is not None or HUB_ID.fullmatch(value) for value in values)
    if not override.startswith("model=") or not are_places:
        return [override]
    placed = f"model.name_or_path={','.join(map(_quote, values))}"
    if is_launched_as_rank_0():
        taken = f"its config; the directory is model=./{values[0]}" if are_configs else placed
        print(f"{override} is taken for {taken}", file=sys.stderr)
    return [override] if are_configs else ["model=blank_model_bfloat16", placed]


def _quote(value: str) -> str:
    escaped = value.replace('"', '\\"')
    return f'"{escaped}"'


def _load_plugins(overrides: Sequence[str]) -> None:
    """Load those that the command line names: a config file may name none."""
    for override in overrides:
        if parse_key(override) == "plugins":
            with suppress(HydraException):  # `_explain_override` says so
                load_plugins(PARSER.parse_override(override).value())
    for name in ADDED_LOSSES:
        ConfigStore.instance().store(f"{name}.yaml", find_added_loss(name), group="loss")


def parse_key(override: str) -> str:
    return override.split("=", 1)[0].lstrip("+~")


def split_sweep(override: str) -> list[str]:
    """Split `loss.beta=0.1,0.5` into an override for each value."""
    parsed = PARSER.parse_override(override)
    if not parsed.is_discrete_sweep():
        return [override]
    return [f"{override.split('=', 1)[0]}={value}" for value in parsed.sweep_string_iterator()]


def _sign(override: str, line: CommandLine) -> str:
    """Put the sign before an override with which Hydra takes any key; `find_problems` refuses those that it should."""
    key = parse_key(override)
    if override.startswith("~") or "=" not in override or _is_hydra_key(key):
        return override
    if line.list_options(key.partition("@")[0]):
        return f"+{override}" if override.startswith("experiment=") else override  # none is chosen by default
    has_other_keys = any(parse_key(other).startswith(f"{key}.") for other in line.overrides)
    if key.startswith("dataset_sources.") and has_other_keys:
        override = override.replace("=", ".path=", 1)
    return f"++{override.lstrip('+')}"


def _is_hydra_key(key: str) -> bool:
    return re.split("[@./]", key)[0] == "hydra" or "@hydra" in key


# --- problems ---------------------------------------------------------------------------------------------------------


def check_line(line: CommandLine) -> tuple[Plan | None, list[str]]:
    """Find the plan that `check_command_line` returns, and the problems of all jobs."""
    found = {override: _explain_override(override, line) for override in line.overrides}
    problems = [*found.values()]
    for file in Path(line.config_dir).rglob("*.yaml") if line.config_dir else ():
        if (CONFIG_DIR / (name := file.relative_to(line.config_dir))).exists():
            problems.append(f"--config-dir: {name} has the name of one of ours: rename it")
    chosen = dict(override.lstrip("+").split("=", 1) for override in line.overrides if "=" in override)
    if chosen.get("experiment") == "modern" and chosen.get("lora", "none") != "none" and "lr" not in chosen:
        problems.append("experiment=modern has a learning rate for all weights: give experiment=modern_lora, or lr")
    # what depends on a refused override is not known
    unknown = tuple(f"{parse_key(override)}." for override, sentence in found.items() if sentence)
    accepted = [o for o in line.overrides if not f"{parse_key(o)}.".startswith(unknown)]
    plan = None
    for job in itertools.product(*map(split_sweep, accepted)):
        try:
            config = _compose([*line.search_path, *job])
        except Exception as error:  # a user's files may contain anything
            problems.append(f"the config cannot be composed: {one_sentence(error)}")
            values = {parse_key(o): PARSER.parse_override(o).value() for o in job if "${" not in o}
            problems += [find_value_problem(key, value) for key, value in values.items() if key in KEYS]
            break
        problems += _find_code_in_files(config, line)
        if {*line.options} <= {*MULTIRUN}:  # else Hydra shows something in place of running
            plan = resolve(OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"]))
            problems += [p.sentence for p in find_problems(plan) if not f"{p.key}.".startswith(unknown)]
    return None if line.is_sweep else plan, [*filter(None, dict.fromkeys(problems))]


def _compose(overrides: list[str]) -> DictConfig:
    with hydra.initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        return hydra.compose("config", overrides, return_hydra_config=True)


def _find_code_in_files(config: DictConfig, line: CommandLine) -> list[str]:
    """Refuse keys that the user's config files set and that can name code."""

    def find_code(config: DictConfig) -> dict:
        return {
            key: value
            for key, value in dotted(OmegaConf.to_container(config))
            if (key in OUR_CODE_KEYS and value) or (_is_hydra_key(key) and not key.startswith(COMPOSITION_RECORDS))
        }

    if line.config_dir is None:
        return []
    keys = [parse_key(override) for override in line.overrides]
    # comparing what Hydra makes with and without the files covers all that they contain, however they are chosen
    without_files = find_code(_compose([o for o in line.overrides if _is_hydra_key(parse_key(o))]))
    return [
        f"--config-dir: {key} may not be set in a config file, as it can name code to run; give it on the command line"
        for key, value in find_code(config).items()
        if (key, value) not in without_files.items() and key not in keys
    ]


def _explain_override(override: str, line: CommandLine) -> str | None:
    key, equals, value = override.lstrip("+").partition("=")
    if key.startswith("~") or not equals or not key:
        return f"{override} is not an override: write NAME=VALUE, with no spaces around ="
    is_hydra_key = _is_hydra_key(key)
    if is_hydra_key and (not ALLOWED_HYDRA_KEYS.fullmatch(key) or "_target_" in override):
        return f"{key} may not be set, as Hydra's own keys can name code to run, except for directories and launchers"
    if line.is_sweep and redact(override) != override:
        return f"{key} holds a secret, and a sweep writes its command line to disk: give it as '${{oc.env:NAME}}'"
    try:
        parsed = PARSER.parse_override(override)
    except HydraException:
        if is_secret(key):
            value = "VALUE"
        return f"{key}={value} cannot be read: write {shlex.quote(f'{key}={_quote(value.strip(QUOTES))}')}"
    if "glob(" in value or (parsed.is_sweep_override() and not line.is_sweep):
        number = re.sub(r"(\d),(\d+)", r"\1.\2", value) if re.fullmatch(r"-?\d+,\d+", value) else "ONE"
        return (
            f"{key}={value} has several values: write {key}={number}, [A,B] for a list, or -m A,B to run each in turn"
        )
    group = key.partition("@")[0]
    if options := line.list_options(group):
        for option in [str(PARSER.parse_override(job).value()) for job in split_sweep(override)]:
            if name := find_alias(option) if option not in options else None:
                return f"{group}={option}: here it is {name}"
            if option not in options:
                other = "model=DIR_OR_HUB_ID takes any other; " if group == "model" else ""
                return f"{group}={option} is unknown{suggest(option, options)} ({other}there are {', '.join(options)})"
        return None
    # a key or a section
    is_known = any(f"{known}.".startswith(f"{key}.") for known in KEYS) or key.split(".")[0] in OPEN_MAPPINGS
    return None if is_hydra_key or is_known else find_value_problem(key, value)


# --- the jobs of a sweep, and help ------------------------------------------------------------------------------------


def place_job(plan: Plan, hydra_config: Any) -> Plan:
    """Give a sweep's job a directory with its number, inside `local_run_dir` if that is given, and a W&B group."""
    sweep, number = plan.run.local_run_dir, hydra_config.job.num
    job_dir = f"{sweep}/{number}"
    if plan.has_new_run_dir:
        sweep, job_dir = hydra_config.sweep.dir, f"{sweep}_{number}"
    return plan.change("local_run_dir", job_dir).change("wandb.group", plan.wandb.group or Path(sweep).name)


def help_text() -> str:
    groups = sorted(CONFIG_DIR.glob("*/"))
    lists = [f"{group.name}: {', '.join(sorted(file.stem for file in group.glob('*.yaml')))}" for group in groups]
    lists = [fill(text, 118, subsequent_indent="  ", break_on_hyphens=False) for text in lists]
    names = ("config.yaml", "model/blank_model.yaml", "lora/lora.yaml", "online/online.yaml", "loss/**/*.yaml")
    files = [file for name in names for file in sorted(CONFIG_DIR.glob(name))]
    keys = [f"# {file.relative_to(CONFIG_DIR.parent)}\n{file.read_text(encoding='utf-8')}" for file in files]
    return "\n\n".join([USAGE, *lists, *(text.split("\ndefaults:")[0] for text in keys), END])


USAGE = """Preference training: SFT, DPO and its relatives, of all weights or of LoRA adapters.

dpo train loss=dpo loss.beta=0.1 model=pythia28 exp_name=dpo ...

Config groups (choose with group=option):"""
END = """Also: --cfg job (the composed config), --hydra-help (Hydra's own options).
Bad input ends with status 2; HYDRA_FULL_ERROR=1 shows the traceback."""
