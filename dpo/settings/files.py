"""The files in `config/`, read without Hydra: defaults and comments."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from textwrap import fill
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

CONFIG_DIR = Path(__file__).parents[2] / "config"
GROUPS = ("loss", "lora", "online")  # groups whose options have different keys
OPEN_MAPPINGS = ("dataset_sources", "optimizer_args", "chat_template_args")  # mappings whose keys the user chooses
ABSENT = object()  # stands for the value of a key that is not there
UNRESOLVED = object()  # stands for a value that depends on an invalid value of another key


def with_defaults(config: DictConfig | Mapping[str, Any], *, run_dir: str | Path | None = None) -> DictConfig:
    """Fill in a config's missing keys with the defaults in `config/`.

    `run_dir`, if given, is the default of `local_run_dir`.
    """
    config = config if isinstance(config, DictConfig) else OmegaConf.create(dict(config))
    defaults = load_defaults(**{group: OmegaConf.select(config, f"{group}.name") for group in GROUPS})
    if run_dir is not None:
        defaults["local_run_dir"] = str(run_dir)
    missing = _find_missing(OmegaConf.to_container(config), defaults)
    if not missing:
        return config
    filled: Any = OmegaConf.merge(missing, config)
    return filled


def options_in(values: Mapping[str, Any]) -> dict[str, Any]:
    """Find which option of each group of GROUPS is chosen by values of dotted keys."""
    return {group: values.get(f"{group}.name") for group in GROUPS}


def load_defaults(loss: str | None = None, lora: str | None = None, online: str | None = None) -> dict[str, Any]:
    """Load the defaults in `config/`, with these options of its groups.

    If an option is None or unknown, its group's `none.yaml` is loaded instead. `loss` has no `none.yaml`, so that group
    is left out.
    """
    defaults = load_file(CONFIG_DIR / "config.yaml") | {"model": load_file(CONFIG_DIR / "model" / "blank_model.yaml")}
    for group, option in (("loss", loss), ("lora", lora), ("online", online)):
        files = {file.stem: file for file in (CONFIG_DIR / group).glob("*.yaml")}
        file = files.get(str(option), files.get("none"))
        if file is not None:
            defaults[group] = load_file(file)
    return defaults


def dotted(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values; a mapping that is empty or one of OPEN_MAPPINGS is a value."""
    for key, value in node.items():
        if isinstance(value, Mapping) and value and f"{prefix}{key}" not in OPEN_MAPPINGS:
            yield from dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def differences(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
    """List `key=value` for each value that differs from its default."""
    default_values = dict(dotted(defaults))
    changed = {key: value for key, value in dotted(values) if default_values.get(key, ABSENT) != value}
    return [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in changed.items()]


def flatten(config: DictConfig) -> dict[str, Any]:
    """Map dotted keys to plain values; each of OPEN_MAPPINGS is one value.

    '???' stays as it is. So does an interpolation of keys that do not exist. An interpolation that fails although its
    keys exist becomes UNRESOLVED: the value of one of these keys is wrong, and is reported separately.
    """
    values: Any = OmegaConf.to_container(config, resolve=False)
    flat = {key: value for key, value in dotted(values) if value != {} or key in OPEN_MAPPINGS}
    for key, value in flat.items():
        if "${" in str(value):
            try:
                value = OmegaConf.select(config, key)
                flat[key] = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
            except OmegaConfBaseException:
                keys_used = re.findall(r"\$\{([\w.]+)\}", str(value))
                if any(key_used in flat for key_used in keys_used):
                    flat[key] = UNRESOLVED
    return flat


def load_aliases() -> dict[str, str]:
    """Load other libraries' names of keys, each with ours."""
    return load_file(CONFIG_DIR / "aliases.yaml")


@cache  # the files do not change while a process runs
def load_file(file: Path) -> dict[str, Any]:
    """Load the keys that a file and its defaults list set.

    As in Hydra, later entries of the list override earlier ones.
    """
    content: Any = OmegaConf.to_container(OmegaConf.load(file))
    own_keys = {key: value for key, value in content.items() if key not in ("defaults", "hydra")}
    values: dict[str, Any] = {}
    for entry in content.get("defaults", ["_self_"]):
        if not isinstance(entry, str):
            continue  # an entry such as {loss: sft} chooses a group's option; `load_defaults` loads the options
        name = entry.partition("@")[0]
        values |= own_keys if name == "_self_" else load_file(file.parent / f"{name}.yaml")
    return values


def _find_missing(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Find the defaults of the keys that a nested config lacks."""
    missing: dict[str, Any] = {}
    for key, default in defaults.items():
        if not isinstance(default, Mapping):
            if key not in config and default != "???":
                missing[key] = default
        elif key not in config:
            missing[key] = _find_missing({}, default)
        elif isinstance(config[key], Mapping) and key not in OPEN_MAPPINGS:
            missing_inside = _find_missing(config[key], default)
            if missing_inside:
                missing[key] = missing_inside
    return missing


def help_text() -> str:
    """The text of `--help`: every key with its default and comment."""
    groups = sorted(path for path in CONFIG_DIR.iterdir() if path.is_dir())
    options = {group.name: sorted(file.stem for file in group.glob("*.yaml")) for group in groups}
    main_file = (CONFIG_DIR / "config.yaml").read_text(encoding="utf-8").split("\ndefaults:")[0]
    parts = [HELP]
    for name, group_options in options.items():
        parts.append(fill(f"{name}: {', '.join(group_options)}", 118, subsequent_indent="  ", break_on_hyphens=False))
    parts += ["", main_file]
    parts += ["# model=...: another model has another name_or_path and block_name", _indent("model", "blank_model")]
    for group in GROUPS:
        parts += [f"# {group}={option}\n{_indent(group, option)}" for option in options[group]]
    parts += ["# any loss of pairs also has", _indent("loss", "options/of_pairs")]
    parts += ["# any loss with a reference also has", _indent("loss", "options/with_reference")]
    return "\n".join([*parts, END])


def _indent(group: str, option: str) -> str:
    """The keys and comments of an option's file, indented below its group."""
    text = (CONFIG_DIR / group / f"{option}.yaml").read_text(encoding="utf-8")
    lines = text.split("\ndefaults:")[0].splitlines()
    return "\n".join([f"{group}:", *(f"  {line}" if line else "" for line in lines), ""])


HELP = """Preference training: SFT, DPO and its relatives, of all weights or of LoRA adapters.

python train.py loss=sft model=pythia28 datasets=[hh] exp_name=sft batch_size=64 gradient_accumulation_steps=2
python train.py loss=dpo loss.beta=0.1 model=pythia28 model.archive=RUN/LATEST exp_name=dpo ...
python train.py experiment=hh_pythia28_sft ...
python train.py -m loss=dpo loss.beta=0.05,0.1,0.5 exp_name=sweep ...

Config groups (choose with group=option):
"""
END = """Also: --cfg job (the composed config), --hydra-help (Hydra's own options), -sc install=bash (shell completion).
Bad input ends with status 2; HYDRA_FULL_ERROR=1 shows the traceback."""
