"""The model that a path on a command line names: a checkpoint with its run's config, an adapter, a directory."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import NamedTuple

from omegaconf import DictConfig, OmegaConf

from dpo.errors import InputError
from dpo.models.adapters import base_named_by, find_adapter, is_archive
from dpo.models.weights import find_archive
from dpo.settings.files import flatten, with_defaults
from dpo.settings.keys import KEYS
from dpo.settings.places import HUB_ID
from dpo.settings.plan import Plan, resolve
from dpo.settings.validation import find_value_problem
from dpo.system.plain_files import read_yaml

CONFIG = "config.yaml"
POLICY_FILE = "policy.pt"
# the keys of a run's config that are used; its other keys are at most shown
MATTERS = ("model.", "lora.", "loss.name", "loss.beta", "online.name", "datasets", "local_dirs", "seed", "trainer")


class Origin(NamedTuple):
    """The sources of a model: architecture and tokenizer from `plan.model`, weights too unless given."""

    plan: Plan  # of the run; without a run, of the known values and defaults
    weights: Path | None  # a policy.pt; for an adapter, that of its base
    run_dir: Path | None  # contains config.yaml
    adapter: Path | None = None  # a directory in PEFT's format
    had_own_code: bool = False  # whether the run was trained with the model's own Python code

    @property
    def policy(self) -> Path | None:
        """The checkpoint's own `policy.pt`, with the weights or the adapter."""
        if self.adapter is None:
            return self.weights
        file = self.adapter / POLICY_FILE
        return file if file.is_file() else None


def find_origin(
    path: str | Path,
    *,
    model: str | None = None,
    trust_remote_code: bool = False,
    hub: bool = False,
    alone: bool = True,
) -> Origin:
    """Find the model that a path names.

    The path is a `policy.pt`, its directory, a run (its LATEST), an adapter's directory in PEFT's format, or a model's
    directory; with `hub` also a Hub id. `model` is the base model's directory or Hub id, for an adapter, and for a
    `policy.pt` without a run or whose base model is not where its config says. For a path that is `alone` it replaces
    the config's base; a whole model needs none, and ignores it beside others. Only the caller decides whether the
    model's own code may be run: `model.trust_remote_code` is set to that, whatever the run's config says. Raises
    InputError if the path names no model, or `model` is not needed.
    """
    path = Path(path).expanduser()
    is_model = (path / "config.json").is_file() and not (path / "policy.pt").exists()
    if is_model or (hub and not path.exists() and HUB_ID.fullmatch(str(path))):
        if model is not None and alone:
            raise InputError(f"{path} is a model of its own: --model {model} is for a policy.pt, whose base it names")
        return Origin(resolve(_config({}, str(path), trust_remote_code)), None, None)
    if not path.exists():
        raise InputError(f"{path} does not exist: give a run's directory, one of its step-N, or a model's directory")
    if adapter := find_adapter(path):
        return _of_adapter(adapter.resolve(), model, trust_remote_code, alone)
    weights = find_archive(str(path), key="").resolve()
    places = [place for place in (weights.parent, weights.parent.parent) if (place / CONFIG).is_file()]
    if not places:
        if model is None:
            raise InputError(
                f"{weights} has no {CONFIG} of its run beside it: give --model DIR_OR_HUB_ID, its base model"
            )
        return Origin(resolve(_config({}, model, trust_remote_code)), weights, None)
    of_run = _read_config(places[0] / CONFIG)
    config = _config(of_run, model if alone else None, trust_remote_code)
    if _is_gone(config.model.name_or_path) and model is not None:
        config = _config(config, model, trust_remote_code)
    if _is_gone(base := config.model.name_or_path):
        raise InputError(f"{base}, the base model of {places[0]}, is not there: give --model DIR_OR_HUB_ID")
    return Origin(resolve(config), weights, places[0], had_own_code=_had_own_code(of_run))


class Base(NamedTuple):
    """The base that an adapter names; drawn from its run's seed if neither name, archive nor problem is given."""

    name: str | None = None  # a Hub id or a directory
    archive: Path | None = None  # a policy.pt, with the architecture in the config of the adapter's run
    problem: str | None = None  # why it cannot be loaded


def find_base(adapter: Path, run_dir: Path | None) -> Base:
    """The base that an adapter names; `run_dir` is that of its run, None for an adapter of another program."""
    named = base_named_by(adapter)
    if named is None:
        return Base(problem=None if run_dir else f"{adapter} names no base")
    archive, subject = Path(named), f"{named}, the base of {adapter},"
    if not is_archive(named):
        return Base(problem=f"{subject} is not there") if _is_gone(named) else Base(name=named)
    if not archive.is_file():
        return Base(problem=f"{subject} is not there")
    if run_dir is None:
        return Base(problem=f"{subject} has no {CONFIG} of its run beside it")
    return Base(archive=archive)


def _of_adapter(adapter: Path, model: str | None, trust_remote_code: bool, alone: bool) -> Origin:
    """The origin of an adapter, from a run or another program, on the base that it names, or on `model`."""
    places = [adapter, adapter.parent] if (adapter / POLICY_FILE).is_file() else []
    run_dir = next((place for place in places if (place / CONFIG).is_file()), None)
    base = find_base(adapter, run_dir)
    given = model is not None and (alone or base.problem is not None)
    if given:
        base = Base(name=model)
    elif base.problem is not None:
        raise InputError(f"{base.problem}: give --model DIR_OR_HUB_ID, the base as a model")
    of_run = _read_config(run_dir / CONFIG) if run_dir else OmegaConf.create()
    config = _config(of_run, base.name, trust_remote_code)
    if given:
        OmegaConf.update(config, "model.random_init", False)
    if run_dir is None and list(adapter.glob("tokenizer*")):
        OmegaConf.update(config, "model.tokenizer_name_or_path", str(adapter))
    return Origin(resolve(config), base.archive, run_dir, adapter, _had_own_code(of_run))


def _is_gone(base: str) -> bool:
    return not Path(base).expanduser().exists() and not HUB_ID.fullmatch(base) and "/" in base


def _config(config: DictConfig | dict, model: str | None, trust_remote_code: bool) -> DictConfig:
    config = copy.deepcopy(with_defaults(config))
    if model is not None:
        OmegaConf.update(config, "model.name_or_path", model)
    OmegaConf.update(config, "model.trust_remote_code", trust_remote_code)
    return config


def _had_own_code(of_run: DictConfig) -> bool:
    return OmegaConf.select(of_run, "model.trust_remote_code") is True


def _read_config(path: Path) -> DictConfig:
    """Read the config of a run, ours or the reference implementation's.

    Raises InputError for an invalid value of a key that is used, and for an interpolation: it could put this machine's
    environment into an export.
    """
    values = read_yaml(path)
    try:
        config = OmegaConf.load(path)
        if found := re.search(r"\$\{[^}]*\}?", str(values)):
            raise ValueError(f"{found[0]!r:.100} is an interpolation, not a value")
        name = OmegaConf.select(config, "model.name_or_path")
    except Exception as error:  # YAML of any kind may be there
        raise InputError(f"{path} is not the config of a run: {' '.join(str(error).split())[:200]}") from error
    if not isinstance(config, DictConfig) or not isinstance(name, str):
        raise InputError(f"{path} is not the config of a run: it has no model.name_or_path")
    for key, value in flatten(config).items():
        if (
            key in KEYS
            and key.startswith(MATTERS)
            and value != "???"
            and (problem := find_value_problem(key, value, KEYS))
        ):
            raise InputError(f"{path}: {problem}")
    return config
