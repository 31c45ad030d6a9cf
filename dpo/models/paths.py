"""Finding the files of a model by a path or a name, without loading it."""

import json
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import transformers
from huggingface_hub import metadata_load

from dpo.checkpoint.files import MANIFEST, read_manifest
from dpo.data.prompt_forms import HH, PROMPT_FORMS
from dpo.data.tokenizer import KeptTemplate
from dpo.errors import InputError, explaining_library, one_sentence
from dpo.settings.places import BUILT_IN, HUB_ID, check_exists, find_local
from dpo.settings.plan import Plan, resolve
from dpo.settings.validation import read_plan
from dpo.system.plain_files import check_readable, read_json, resolve_path

CONFIG = "adapter_config.json"  # in PEFT's format
POLICY_FILE = "policy.pt"
RUN_CONFIG = "config.yaml"


class ModelPath(NamedTuple):
    """Where a model's files are, and how to read them."""

    name: str = ""  # a directory or Hub id, with config, and weights unless they are in the archive; "" if unknown
    archive: Path | None = None  # a policy.pt with all weights of the model, or of the adapter's base
    adapter: Path | None = None  # a directory in PEFT's format
    cache_dir: str | None = None
    trust_remote_code: bool = False
    scalar_head: bool = False  # it is read as a reward model
    random_init: bool = False  # without an archive its weights are random, drawn from `seed`
    seed: int = 0  # also of a scalar head that the weights lack
    plan: Plan | None = None  # the plan of its run, or the defaults, with `name` as `model.name_or_path`
    run_dir: Path | None = None  # the run's directory, which contains config.yaml
    base_digest: str | None = None  # identifies the base on which an adapter was trained, if the run recorded it

    @property
    def options(self) -> dict:
        """Keyword arguments for `from_pretrained` of configs, models and tokenizers."""
        return {"cache_dir": self.cache_dir, "trust_remote_code": self.trust_remote_code}

    @property
    def auto_class(self) -> Any:
        if self.scalar_head:
            return transformers.AutoModelForSequenceClassification
        return transformers.AutoModelForCausalLM

    @property
    def policy_file(self) -> Path | None:
        """The checkpoint's own `policy.pt`, not its base's; None for a whole model or another program's adapter."""
        if self.adapter is None:
            return self.archive
        file = self.adapter / POLICY_FILE
        return file if file.is_file() else None

    def describe(self) -> str:
        """Name the files that are read, for the user to check: the config of a stranger's run may name any files."""
        return f"weights of {self.archive or self.name}, tokenizer of {self.plan.model.tokenizer}"


def find_base(plan: Plan) -> ModelPath:
    """Return where the model of `model.name_or_path` is, without `model.archive`."""
    return ModelPath(
        plan.model.name_or_path,
        cache_dir=plan.run.cache_dir,
        trust_remote_code=plan.model.trust_remote_code,
        scalar_head=plan.loss.scalar_head,
        random_init=plan.model.random_init,
        seed=plan.run.seed,
        plan=plan,
    )


def locate_weights(path: str | Path) -> ModelPath:
    """Find the `policy.pt` or adapter that a path names; InputError if there is none.

    The path is that of a `policy.pt`, of a directory with one or with an adapter, or of a run, whose latest checkpoint
    is meant. If an adapter names its base, the base becomes `archive` if it is a file, else `name`. Directories are
    absolute, and no links such as LATEST, which will move.
    """
    given = Path(os.path.expanduser(path))
    check_exists(given)
    path = resolve_path(given)
    folders = [path, resolve_path(path / "LATEST")]
    if given.name == POLICY_FILE:
        folders.append(resolve_path(given.parent))  # with an adapter there, `policy.pt` lacks the weights of the base
    for folder in folders:
        if (folder / CONFIG).is_file():
            with explaining_adapter(folder):
                base = read_json(folder / CONFIG).get("base_model_name_or_path") or ""
                if base.endswith(".pt") or Path(base).is_file():  # our runs may name a policy.pt
                    return ModelPath(archive=resolve_path(base), adapter=folder)
            return ModelPath(base, adapter=folder)
    return ModelPath(archive=find_archive(path))


def find_archive(archive: str | Path) -> Path:
    """Find the `policy.pt` that a file, directory or run names."""
    check_exists(Path(os.path.expanduser(archive)))
    path = resolve_path(archive)
    for candidate in (path, path / POLICY_FILE, resolve_path(path / "LATEST") / POLICY_FILE):
        if candidate.is_file():
            return candidate
    raise InputError(f"{archive} is neither a policy.pt nor a directory that contains one")


def resolve_name(name: str) -> str:
    """Make a directory's path absolute; a Hub id stays as it is."""
    path = Path(name)
    return str(path.resolve()) if path.exists() else name  # resolved, as a link such as LATEST will move


def explaining_adapter(directory: Path) -> AbstractContextManager:
    return explaining_library(
        lambda error: InputError(f"{directory} is not an adapter in PEFT's format: {one_sentence(error)}")
    )


def find_model(
    path: str | Path,
    *,
    model: str | None = None,
    trust_remote_code: bool = False,
    hub: bool = False,
    template: str | Path | None = None,
) -> ModelPath:
    """Find the model that a path names; InputError if there is none.

    The path is that of a `policy.pt`, its directory, a run, an adapter or a model; with `hub` it may be a Hub id.
    `model` is the base, if neither adapter nor run names it, or if it has moved. `template` is a file with a chat
    template, in place of the run's. `trust_remote_code` replaces the value in the run's config.
    """
    check_exists(find_local(str(path)))
    path = Path(path).expanduser()
    is_whole_model = (path / "config.json").is_file() and not (path / POLICY_FILE).exists()
    if is_whole_model or (hub and not path.exists() and HUB_ID.fullmatch(str(path))):
        if model is not None:
            raise InputError(f"{path} is a whole model: --model names the base of a policy.pt or an adapter")
        source = ModelPath(str(path))
    else:
        source = locate_weights(path)
        if model is not None and source.adapter:
            source = ModelPath(model, adapter=source.adapter)  # without the base or archive that the adapter names
    run_dir = None
    plan = resolve({})
    manifest = {}
    if source.policy_file:  # another program's adapter has none, and a config.yaml beside it is not a run's
        folder = source.policy_file.parent
        for candidate in (folder.parent, folder):
            if (candidate / RUN_CONFIG).is_file():
                run_dir = candidate
        if (folder / MANIFEST).exists():
            manifest = read_manifest(folder)
    if run_dir is not None:
        # Only these keys have an effect here, so wrong values of other keys are accepted.
        decisive = ("model.", "lora.", "loss.name", "online.name", "datasets", "chat_template", "seed", "trainer")
        plan = read_plan(run_dir / RUN_CONFIG, prefixes=decisive)
    if name := model or source.name:
        plan = plan.change("model.name_or_path", name)
    elif run_dir is None:
        raise InputError(f"{path} names no base, and its run's {RUN_CONFIG} is not beside it: add --model")
    plan = plan.change("model.trust_remote_code", trust_remote_code)
    if source.adapter and model:  # the given base has weights, even if the run's base had random ones
        plan = plan.change("model.random_init", False)
    if source.adapter and run_dir is None and list(source.adapter.glob("tokenizer*")):  # its own tokenizer
        plan = plan.change("model.tokenizer_name_or_path", str(source.adapter))
    return find_base(_choose_template(plan, template, manifest, path))._replace(
        archive=source.archive,
        adapter=source.adapter,
        run_dir=run_dir,
        base_digest=manifest.get("base") if run_dir else None,
    )


def _choose_template(plan: Plan, template: str | Path | None, manifest: Mapping, path: str | Path) -> Plan:
    """Set a plan's chat template to the file `template`, else to the text that the checkpoint's manifest keeps.

    Raises InputError if the run kept only the path of its template. That file is not read, as it may have changed, and
    a stranger's run may name any file.
    """
    if template is not None:
        if "chat_template" in manifest:  # the run's arguments are for the run's template
            plan = plan.change("chat_template_args", {})
        return plan.change("chat_template", str(template))
    if "chat_template" in manifest:
        for key in ("chat_template_args", "chat_template_date"):
            plan = plan.change(key, manifest["config"].get(key))
        return plan.change("chat_template", KeptTemplate(json.dumps(manifest["chat_template"])))
    if plan.chat.chat_template is not None:
        raise InputError(
            f"{path} is of a run that kept the path of its chat template, {plan.chat.chat_template}, and not the text: "
            f"add --template FILE with what it was trained on (dpo evaluate: --chat-template FILE)"
        )
    return plan


def find_prompt_format(model: ModelPath) -> str | None:
    """Return the form of all training prompts, one of PROMPT_FORMS, from the run's files or an export's model card.

    Returns None if it is not known, or if datasets differ.
    """
    if model.run_dir is not None:
        by_dataset = dict.fromkeys(BUILT_IN, HH)
        file = model.run_dir / "preflight.json"
        if file.exists():
            with suppress(KeyError, TypeError):  # it is not as a run writes it
                by_dataset = read_json(file)["train"]["prompt_formats"] | by_dataset
        forms = {str(by_dataset.get(name)) for name in model.plan.data.datasets}
        form = forms.pop() if len(forms) == 1 else None
    else:
        card = Path(model.adapter or model.name, "README.md")
        try:
            check_readable(card)
            form = (metadata_load(card) or {}).get("prompt_format")
        except Exception:  # no card, or not one of ours: a card may hold anything
            return None
    return form if form in list(PROMPT_FORMS) else None  # a list, as a form from a card may not be hashable
