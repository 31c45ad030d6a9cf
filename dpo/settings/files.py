"""The files in `config/`, read without Hydra: every key's default."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dpo.system.run_directory import get_local_run_dir

CONFIG_DIR = Path(__file__).parents[2] / "config"
GROUPS = ("loss", "lora", "online")  # groups whose options have different keys
OPEN_MAPPINGS = ("dataset_sources", "optimizer_args", "chat_template_args")  # mappings whose keys the user chooses
MISSING = "???"  # the value of a key that has no default

OmegaConf.register_new_resolver("get_local_run_dir", get_local_run_dir, use_cache=True, replace=True)
OmegaConf.register_new_resolver("project_dir", lambda: str(CONFIG_DIR.resolve().parent), replace=True)


def fill(config: DictConfig | Mapping[str, Any]) -> DictConfig:
    """Fill in a config's missing keys with the defaults in `config/`."""
    nested: Any = OmegaConf.to_container(config, resolve=False) if isinstance(config, DictConfig) else config
    options = {group: nested[group].get("name") for group in GROUPS if isinstance(nested.get(group), Mapping)}
    defaults = load_defaults(**options)
    sections = [key for key, default in defaults.items() if isinstance(default, Mapping)]
    filled: Any = OmegaConf.merge(defaults, {k: v for k, v in nested.items() if v is not None or k not in sections})
    return filled


def options_in(values: Mapping[str, Any]) -> dict[str, Any]:
    """Find which option of each group of GROUPS is chosen by values of dotted keys."""
    return {group: values.get(f"{group}.name") for group in GROUPS}


def load_defaults(loss: str | None = None, lora: str | None = None, online: str | None = None) -> dict[str, Any]:
    """Load the defaults in `config/`, with these options of its groups.

    If an option is None or unknown, its group's `none.yaml` is loaded instead; without a loss, its name is MISSING.
    """
    defaults = load_file(CONFIG_DIR / "config.yaml") | {"model": load_file(CONFIG_DIR / "model" / "blank_model.yaml")}
    for group, option in (("loss", loss), ("lora", lora), ("online", online)):
        files = {file.stem: file for file in (CONFIG_DIR / group).glob("*.yaml")}
        file = files.get(str(option), files.get("none"))
        defaults[group] = load_file(file) if file else {"name": MISSING}
    return defaults


def dotted(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values; a mapping that is empty or one of OPEN_MAPPINGS is a value."""
    for key, value in node.items():
        if isinstance(value, Mapping) and value and f"{prefix}{key}" not in OPEN_MAPPINGS:
            yield from dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def flatten(config: DictConfig) -> dict[str, Any]:
    """Map dotted keys to plain values; each of OPEN_MAPPINGS is one value.

    MISSING stays as it is, and so does an interpolation that cannot be resolved.
    """
    nested: Any = OmegaConf.to_container(config, resolve=False)
    values = {key: value for key, value in dotted(nested) if value != {} or key in OPEN_MAPPINGS}
    for key, value in values.items():
        if "${" in str(value):
            with suppress(OmegaConfBaseException):
                value = OmegaConf.select(config, key)
                values[key] = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    return values


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
