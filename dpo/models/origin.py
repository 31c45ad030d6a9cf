"""The model that a path on a command line names."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from dpo.errors import InputError
from dpo.models.weights import Weights, locate_weights
from dpo.settings.places import HUB_ID
from dpo.settings.plan import Plan
from dpo.settings.recorded import plan_model, read_plan

CONFIG = "config.yaml"
POLICY_FILE = "policy.pt"
# prefixes of the keys of a run's config that are used; its other keys are at most shown
USED_KEYS = ("model.", "lora.", "loss.name", "loss.beta", "online.name", "datasets", "local_dirs", "seed", "trainer")


class Origin(NamedTuple):
    """A model that a path names, with the architecture of `plan.model`."""

    plan: Plan  # of the run; without a run, of the known values and defaults
    weights: Weights = Weights()
    run_dir: Path | None = None  # contains config.yaml
    had_own_code: bool = False  # whether the run was trained with the model's own Python code

    @property
    def policy(self) -> Path | None:
        """The checkpoint's own `policy.pt`, with the weights or the adapter."""
        if self.weights.adapter is None:
            return self.weights.archive
        file = self.weights.adapter / POLICY_FILE
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
    directory; with `hub` also a Hub id.

    `model` is the directory or Hub id of the base of an adapter or a `policy.pt`. It is needed if no run names the
    base, or the base is not where the run's config says. If the path is `alone`, `model` also replaces a base that is
    there; beside other paths it does not. Whether the model's own code may be run is `trust_remote_code`, whatever the
    run's config says.
    Raises InputError if the path names no model, or is `alone` and a whole model, which needs no `model`.
    """
    path = Path(path).expanduser()
    is_model = (path / "config.json").is_file() and not (path / POLICY_FILE).exists()
    if is_model or (hub and not path.exists() and HUB_ID.fullmatch(str(path))):
        if model is not None and alone:
            raise InputError(f"{path} is a model of its own: --model {model} is for a policy.pt, whose base it names")
        return Origin(plan_model(str(path)).change("model.trust_remote_code", trust_remote_code))
    if not path.exists():
        raise InputError(f"{path} does not exist: give a run's directory, one of its step-N, or a model's directory")
    weights = locate_weights(path, key="")
    adapter, archive = (place and place.resolve() for place in (weights.adapter, weights.archive))
    weights = weights._replace(adapter=adapter, archive=archive)
    # another program's adapter has no policy.pt, so a config.yaml beside it is not of its run
    file = adapter / POLICY_FILE if adapter else archive
    places = [place for place in (file.parent, file.parent.parent) if file.is_file() and (place / CONFIG).is_file()]
    run_dir = places[0] if places else None
    recorded = read_plan(run_dir / CONFIG, prefixes=USED_KEYS) if run_dir else None
    base = weights.base or (recorded.model.name_or_path if recorded else None)
    problem = _find_problem(weights, base)
    if model is not None and (alone or problem):
        base, weights = model, Weights(None if adapter else archive, adapter)
        problem = _find_problem(weights, base)
    if base is None or problem:
        raise InputError(f"{problem}: give --model DIR_OR_HUB_ID")
    plan = (recorded or plan_model(base)).change("model.name_or_path", base)
    plan = plan.change("model.trust_remote_code", trust_remote_code)
    if adapter and base == model:
        plan = plan.change("model.random_init", False)
    if adapter and run_dir is None and list(adapter.glob("tokenizer*")):
        plan = plan.change("model.tokenizer_name_or_path", str(adapter))
    return Origin(plan, weights, run_dir, recorded is not None and recorded.model.trust_remote_code is True)


def _find_problem(weights: Weights, base: str | None) -> str | None:
    """The reason why weights and base give no model, if any."""
    subject = weights.adapter or weights.archive
    if weights.archive is not None and not weights.archive.is_file():
        return f"{weights.archive}, the base of {subject}, is not there"
    if base is None:
        return f"{subject} names no base model, and has no {CONFIG} of its run beside it"
    is_gone = not Path(base).expanduser().exists() and not HUB_ID.fullmatch(base) and "/" in base
    return f"{base}, the base of {subject}, is not there" if is_gone else None
