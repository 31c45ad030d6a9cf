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

from dpo.settings.choices import explain_unknown

CONFIG_DIR = Path(__file__).parents[2] / "config"
OPTIONAL = ("loss", "lora", "online")  # groups whose options have different keys
ANYTHING = ("dataset_sources",)  # mappings whose keys the user chooses
ABSENT = object()
UNRESOLVED = object()  # depends on a key that is itself invalid


def with_defaults(config: DictConfig | Mapping[str, Any], *, run_dir: str | Path | None = None) -> DictConfig:
    """A config with missing keys filled in from `config/`.

    A config of the reference lacks some keys. `run_dir`, if given, becomes the `local_run_dir` of a config without one.
    Keys that the config has keep their values.
    """
    config = config if isinstance(config, DictConfig) else OmegaConf.create(dict(config))
    defaults = load_defaults(**options_in(config))
    if run_dir is not None:
        defaults["local_run_dir"] = str(run_dir)
    missing = _missing(OmegaConf.to_container(config), defaults)
    merged: Any = OmegaConf.merge(missing, config) if missing else config
    return merged


def require(config: DictConfig) -> None:
    """Check that keys without a default are set.

    Raises InputError if the loss, its options or the model's name is missing.
    """
    from dpo.errors import InputError

    defaults = load_defaults(OmegaConf.select(config, "loss.name"))
    if "loss" not in defaults:
        losses = [file.stem for file in (CONFIG_DIR / "loss").glob("*.yaml")]
        raise InputError(explain_unknown("loss.name", str(OmegaConf.select(config, "loss.name")), losses))
    needed = [
        f"{group}.{key}" for group in ("model", "loss") for key, value in defaults[group].items() if value == "???"
    ]
    for key in needed:
        if OmegaConf.select(config, key, throw_on_missing=False) is None:
            raise InputError(f"{key} is not set, and has no default")


def options_in(config: DictConfig) -> dict[str, Any]:
    """The option of each group of OPTIONAL, for `load_defaults`."""
    return {group: OmegaConf.select(config, f"{group}.name") for group in OPTIONAL}


def load_defaults(loss: str | None = None, lora: str | None = None, online: str | None = None) -> dict[str, Any]:
    """Load the defaults of `config/`, with these options of its groups.

    An unknown option means no `loss` at all, and `none` for the other groups."""
    defaults = load_file(CONFIG_DIR / "config.yaml") | {"model": load_file(CONFIG_DIR / "model" / "blank_model.yaml")}
    for group, option in (("loss", loss), ("lora", lora), ("online", online)):
        files = {file.stem: file for file in (CONFIG_DIR / group).glob("*.yaml")}
        if found := files.get(str(option), files.get("none")):
            defaults[group] = load_file(found)
    return defaults


def dotted(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values in order; empty mappings are values."""
    for key, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def differences(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
    """`key=value` for each value that differs from its default."""
    before = dict(dotted(defaults))
    changed = {key: value for key, value in dotted(values) if before.get(key, ABSENT) != value}
    return [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in changed.items()]


def flatten(config: DictConfig) -> dict[str, Any]:
    """Map dotted keys to plain values, with `dataset_sources` whole.

    '???' and values that cannot be resolved stay as they are.
    """
    values: Any = OmegaConf.to_container(config, resolve=False)
    whole = {key: values.pop(key) for key in ANYTHING if key in values}
    flat = {key: value for key, value in dotted(values) if value != {}} | whole
    for name, value in flat.items():
        if isinstance(value, str) and "${" in value:
            try:
                flat[name] = OmegaConf.select(config, name)
            except OmegaConfBaseException:
                # an interpolation of a key that is there fails because of that key's value, which has its own problem
                if any(other in flat for other in re.findall(r"\$\{([\w.]+)\}", value)):
                    flat[name] = UNRESOLVED
    return flat


def load_aliases() -> dict[str, str]:
    """Names of keys in other trainers, and what they are here."""
    return load_file(CONFIG_DIR / "aliases.yaml")


@cache  # the files do not change while a process runs
def load_file(file: Path) -> dict[str, Any]:
    """Keys that a file or its defaults list sets; later ones win."""
    content: Any = OmegaConf.to_container(OmegaConf.load(file))
    own = {key: value for key, value in content.items() if key not in ("defaults", "hydra")}
    entries = content.get("defaults", ["_self_"])
    # others name groups: those of config.yaml, which `load_defaults` adds, or those of which an experiment chooses
    named = [entry.partition("@")[0] for entry in entries if isinstance(entry, str)]
    parts = [own if name == "_self_" else load_file(file.parent / f"{name}.yaml") for name in named]
    return {key: value for part in parts for key, value in part.items()}


def _missing(config: Any, defaults: Mapping[str, Any]) -> dict[str, Any]:
    missing: dict[str, Any] = {}
    for key, value in defaults.items():
        if not isinstance(value, Mapping):
            missing |= {key: value} if key not in config and value != "???" else {}
        elif key not in config:
            missing[key] = _missing({}, value)
        elif isinstance(config[key], Mapping) and key not in ANYTHING:
            inner = _missing(config[key], value)
            missing |= {key: inner} if inner else {}
    return missing


def help_text() -> str:
    """Every key with its default and comment, and the groups."""
    groups = sorted(path for path in CONFIG_DIR.iterdir() if path.is_dir())
    options = {group.name: sorted(file.stem for file in group.glob("*.yaml")) for group in groups}
    main = (CONFIG_DIR / "config.yaml").read_text(encoding="utf-8").split("\ndefaults:")[0]
    lines = (f"{name}: {', '.join(names)}" for name, names in options.items())
    parts = [HELP, *(fill(line, 118, subsequent_indent="  ", break_on_hyphens=False) for line in lines), "", main]
    parts += ["# model=...: another model has another name_or_path and block_name", _nested("model", "blank_model")]
    for group in OPTIONAL:
        parts += [f"# {group}={option}\n{_nested(group, option)}" for option in options[group]]
    parts += ["# any loss of pairs also has", _nested("loss", "options/of_pairs")]
    parts += ["# any loss with a reference also has", _nested("loss", "options/with_reference")]
    return "\n".join([*parts, END])


def _nested(group: str, option: str) -> str:
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
