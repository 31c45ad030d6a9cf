"""The model that a path on a command line names."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from dpo.errors import InputError
from dpo.models.weights import Weights, locate_weights
from dpo.settings.places import HUB_ID
from dpo.settings.plan import Plan, resolve
from dpo.settings.validation import read_plan

CONFIG = "config.yaml"
POLICY_FILE = "policy.pt"
# prefixes of the keys of a run's config that decide anything here; a model card shows other keys too
USED_KEYS = (
    *("model.", "lora.", "loss.name", "loss.beta", "online.name"),
    *("datasets", "chat_template", "local_dirs", "seed", "trainer"),
)


class Origin(NamedTuple):
    """A base model, and weights that replace its own."""

    plan: Plan  # the run's, or else one of defaults; `plan.model.name_or_path` always names the base
    weights: Weights = Weights()
    run_dir: Path | None = None  # the run's directory, which contains config.yaml

    @property
    def policy(self) -> Path | None:
        """The checkpoint's own `policy.pt`, not its base's; None without one."""
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
    run_plan: Plan | None = None,
) -> Origin:
    """Find the model that a path names; InputError if it names none.

    The path is a `policy.pt`, its directory, a run (its LATEST), an adapter's directory in PEFT's format, or a model's
    directory; with `hub` also a Hub id. `model` is the base of an adapter or a `policy.pt`, if neither adapter nor run
    names it, or if it has moved. `run_plan` is that of the path's run, if it is at hand. `trust_remote_code` says
    whether the model's own code may be run, whatever the run's config says.
    """
    path = Path(path).expanduser()
    is_whole_model = (path / "config.json").is_file() and not (path / POLICY_FILE).exists()
    if is_whole_model or (hub and not path.exists() and HUB_ID.fullmatch(str(path))):
        if model is not None:
            raise InputError(f"{path} is a whole model: --model names the base of a policy.pt or an adapter")
        plan = resolve({"model": {"name_or_path": str(path)}})
        return Origin(plan.change("model.trust_remote_code", trust_remote_code))
    weights = locate_weights(path).resolve()
    adapter = weights.adapter
    if model is not None and adapter:
        weights = Weights(None, adapter)  # without the base or archive that the adapter names
    # another program's adapter has no policy.pt, and a config.yaml beside it is not a run's
    policy = adapter / POLICY_FILE if adapter else weights.archive
    folders = (policy.parent, policy.parent.parent) if policy.is_file() else ()
    run_dir = next((folder for folder in folders if (folder / CONFIG).is_file()), None)
    if run_plan is None and run_dir is not None:
        run_plan = read_plan(run_dir / CONFIG, prefixes=USED_KEYS)
    base = model or weights.base or (run_plan.model.name_or_path if run_plan else None)
    if base is None:
        raise InputError(f"{path} names no base model, and there is no {CONFIG} of its run beside it: give --model")
    plan = (run_plan or resolve({"model": {"name_or_path": base}})).change("model.name_or_path", base)
    plan = plan.change("model.trust_remote_code", trust_remote_code)
    if adapter and model:  # it has weights, even if the run's base had random ones
        plan = plan.change("model.random_init", False)
    if adapter and run_dir is None and list(adapter.glob("tokenizer*")):
        plan = plan.change("model.tokenizer_name_or_path", str(adapter))
    return Origin(plan, weights, run_dir)
