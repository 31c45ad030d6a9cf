"""The model that a path on a command line names: a checkpoint with its run's config, an adapter, a directory."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from dpo.errors import InputError
from dpo.models.adapters import Base, find_adapter, find_base
from dpo.models.weights import find_archive
from dpo.settings.places import HUB_ID
from dpo.settings.plan import Plan
from dpo.settings.recorded import plan_model, read_plan

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
        return Origin(_trust(plan_model(str(path)), trust_remote_code), None, None)
    if not path.exists():
        raise InputError(f"{path} does not exist: give a run's directory, one of its step-N, or a model's directory")
    if adapter := find_adapter(path):
        return _find_adapter_origin(adapter.resolve(), model, trust_remote_code, alone)
    weights = find_archive(str(path), key="").resolve()
    places = [place for place in (weights.parent, weights.parent.parent) if (place / CONFIG).is_file()]
    if not places:
        if model is None:
            raise InputError(
                f"{weights} has no {CONFIG} of its run beside it: give --model DIR_OR_HUB_ID, its base model"
            )
        return Origin(_trust(plan_model(model), trust_remote_code), weights, None)
    recorded = read_plan(places[0] / CONFIG, keys=MATTERS)
    plan = _trust(recorded, trust_remote_code)
    if model is not None and (alone or _is_gone(plan.model.name_or_path)):
        plan = plan.change("model.name_or_path", model)
    if _is_gone(base := plan.model.name_or_path):
        raise InputError(f"{base}, the base model of {places[0]}, is not there: give --model DIR_OR_HUB_ID")
    return Origin(plan, weights, places[0], had_own_code=recorded.model.trust_remote_code is True)


def _find_problem(base: Base, adapter: Path, run_dir: Path | None) -> str | None:
    """Why an adapter's base cannot be loaded, if so; `run_dir` is that of its run, None for another program's."""
    subject = f"{base.archive or base.name}, the base of {adapter},"
    if base.archive is not None:
        if not base.archive.is_file():
            return f"{subject} is not there"
        return None if run_dir else f"{subject} has no {CONFIG} of its run beside it"
    if base.name is not None:
        return f"{subject} is not there" if _is_gone(base.name) else None
    return None if run_dir else f"{adapter} names no base"


def _find_adapter_origin(adapter: Path, model: str | None, trust_remote_code: bool, alone: bool) -> Origin:
    """The origin of an adapter, from a run or another program, on the base that it names, or on `model`."""
    places = [adapter, adapter.parent] if (adapter / POLICY_FILE).is_file() else []
    run_dir = next((place for place in places if (place / CONFIG).is_file()), None)
    base = find_base(adapter)
    problem = _find_problem(base, adapter, run_dir)
    given = model is not None and (alone or problem is not None)
    if given:
        base = Base(name=model)
    elif problem is not None:
        raise InputError(f"{problem}: give --model DIR_OR_HUB_ID, the base as a model")
    recorded = read_plan(run_dir / CONFIG, keys=MATTERS) if run_dir else plan_model(str(base.name))
    plan = _trust(recorded, trust_remote_code)
    if base.name is not None:
        plan = plan.change("model.name_or_path", base.name)
    if given:
        plan = plan.change("model.random_init", False)
    if run_dir is None and list(adapter.glob("tokenizer*")):
        plan = plan.change("model.tokenizer_name_or_path", str(adapter))
    return Origin(plan, base.archive, run_dir, adapter, recorded.model.trust_remote_code is True)


def _trust(plan: Plan, trust_remote_code: bool) -> Plan:
    return plan.change("model.trust_remote_code", trust_remote_code)


def _is_gone(base: str) -> bool:
    return not Path(base).expanduser().exists() and not HUB_ID.fullmatch(base) and "/" in base
