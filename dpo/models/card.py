"""The model card of an export: what was trained on what, how to load it, and the run's settings."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData, metadata_load, try_to_load_from_cache

from dpo.checkpoint.files import read_file
from dpo.data.asking import MEANINGS, common_format
from dpo.data.sources import HUB_IDS
from dpo.models.adapters import StoredAdapter
from dpo.models.origin import Origin
from dpo.settings.keys import KEYS, Resume
from dpo.settings.places import HUB_ID, Source
from dpo.settings.plan import Plan
from dpo.system.plain_files import check_readable, read_json
from dpo.system.redaction import redact

# settings that determine the weights: keys that a resumed run may not change, and the length of training
SETTINGS = (*(key for key, row in KEYS.items() if row.resume is Resume.KEEP), "n_epochs", "n_examples")
IN_4_BITS = 'BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)'
BODY = """\
# {title}

{base} trained with {method}{data}. {weights}

```python
from transformers import {auto_class}, AutoTokenizer{more_imports}

model = {auto_class}.from_pretrained("PATH_OR_HUB_ID"{options}{trust})
tokenizer = AutoTokenizer.from_pretrained("PATH_OR_HUB_ID"{trust})
```

Prompts were tokenized without special tokens added, and every response ended with the EOS token. {form}

The licences of base model and data apply. State one as `license` above before you publish.

## Training

Metrics are means over the evaluation examples at this checkpoint, if it was evaluated.

{facts}"""


def write_card(folder: Path, origin: Origin, *, model: Any = None, adapter: StoredAdapter | None = None) -> None:
    """Write `README.md` for a `model` or for an `adapter` alone."""
    plan, is_adapter = origin.plan, model is None
    checkpoint = read_file(origin.policy) if origin.policy else {}
    # the run's config; in `plan.values`, model.trust_remote_code is the option of the export, not the run's key
    values = redact(plan.values) | {"model.trust_remote_code": origin.had_own_code} if origin.run_dir else {}
    base, loss = plan.model.name_or_path, plan.values.get("loss.name")
    base_on_hub = not Path(base).expanduser().exists() and HUB_ID.fullmatch(base) is not None
    sources = {name: _find_source(plan, name) for name in values.get("datasets", ())}
    form = find_prompt_format(origin) if origin.run_dir else None
    metadata = ModelCardData(
        model_name=values.get("exp_name"),
        base_model=base if base_on_hub and not (is_adapter and origin.weights.archive) else None,
        datasets=[source for source in sources.values() if HUB_ID.fullmatch(source)] or None,
        library_name="peft" if is_adapter else "transformers",
        base_model_relation="adapter" if is_adapter else None,
        pipeline_tag="text-classification" if plan.loss.scalar_head else "text-generation",
        tags=[tag for tag in (loss, "lora" if adapter else None) if tag] or None,
        prompt_format=form,
        **_find_license(base, plan.run.cache_dir),
    )
    options = ", num_labels=1" if is_adapter and plan.loss.scalar_head else ""
    if is_adapter:
        # without `dtype`, transformers loads the base in its config's dtype, which may differ from training's
        options += f', dtype="{plan.compute_dtype}"' + f", quantization_config={IN_4_BITS}" * plan.quantized
    # the model's own Python code, if it has any, is in the folder of a whole model, or beside an adapter's base
    runs_code = origin.had_own_code if is_adapter else bool(list(folder.glob("*.py")))
    environment = _read_record(origin, "env.json")
    train = _as_mapping(_read_record(origin, "preflight.json").get("train"))
    packages = _as_mapping(environment.get("packages"))
    facts = {
        "examples trained on": checkpoint.get("step_idx"),
        "metrics": {k: v for k, v in _as_mapping(checkpoint.get("metrics")).items() if isinstance(v, int | float)},
        "data": sources,
        "training split": {name: train.get(name) for name in ("examples", "prompts") if name in train},
        "settings": {key: _hide_directory(values[key]) for key in SETTINGS if key in values},
        "commit": environment.get("git_commit"),
        "uncommitted changes": environment.get("git_uncommitted_changes"),
        "versions": {name: packages[name] for name in ("torch", "transformers") if name in packages},
    }
    known = {name: fact for name, fact in facts.items() if fact not in (None, {})}
    body = BODY.format(
        title=_escape(values.get("exp_name") or f"{Path(base).name}, {loss or 'trained'}"),
        base=f"[{base}](https://huggingface.co/{base})" if base_on_hub else _escape(Path(base).name),
        method=loss or "preferences",
        data=f" on {', '.join(map(_escape, sources))}" if sources else "",
        weights=_describe_weights(model, adapter),
        auto_class="AutoModelForSequenceClassification" if plan.loss.scalar_head else "AutoModelForCausalLM",
        more_imports=", BitsAndBytesConfig" if IN_4_BITS in options else "",
        options=options,
        trust=", trust_remote_code=True" if runs_code else "",
        form=f"Form of a prompt: `{MEANINGS[form]}`." if form else "",
        facts=textwrap.indent(yaml.safe_dump(known, sort_keys=False, allow_unicode=True), "    "),  # a block of code
    )
    ModelCard(f"---\n{metadata}\n---\n\n{body}").save(folder / "README.md")


def _describe_weights(model: Any, adapter: StoredAdapter | None) -> str:
    """A sentence on a model's class and dtype, and an adapter."""
    about_adapter = ""
    if adapter is not None:
        layers = ", ".join(sorted({f"`{layer.rpartition('.')[2]}`" for layer in adapter.layers}))
        about_adapter = f"LoRA adapter (r {adapter.r}, alpha {adapter.alpha:g}; {layers})"
    if model is None:
        return (
            f"This is the {about_adapter}: peft loads it with its base; keep the dtype below, or the logits differ "
            f"from those in training."
        )
    merged = f"The {about_adapter} is merged into it. " if adapter is not None else ""
    return f"{merged}Class: `{type(model).__name__}`, weights in {str(model.dtype).removeprefix('torch.')}."


def _find_source(plan: Plan, name: str) -> str:
    """A dataset's Hub id, or its file's name without directory."""
    value = plan.data.dataset_sources.get(name)
    if value is None:
        return HUB_IDS.get(name, "made by the training code")
    source = Source.parse(name, value)
    return source.path if source.local is None else f"local files: {source.local.name}"


def _escape(text: str) -> str:
    """Escape a text for a card's body, on one line."""
    return re.sub(r"([\\`*_{}\[\]<>()#!|&~])", r"\\\1", " ".join(text.split()))


def _hide_directory(value: Any) -> Any:
    """A setting for strangers: a path without its directory."""
    if isinstance(value, Mapping):
        return {key: _hide_directory(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_hide_directory(item) for item in value]
    is_path = isinstance(value, str) and value.startswith(("/", "~", "./", "../"))
    return Path(value).name if is_path else value


def find_prompt_format(origin: Origin) -> str | None:
    """The form of training prompts, from the run or an export's card; None if it is not known."""
    if origin.run_dir is not None:
        train = _as_mapping(_read_record(origin, "preflight.json").get("train"))
        formats = _as_mapping(train.get("prompt_formats"))
        return common_format({name: _check_form(form) for name, form in formats.items()}, origin.plan.data.datasets)
    if origin.weights.archive is not None and origin.weights.adapter is None:  # a policy.pt alone
        return None
    folder = Path(origin.weights.adapter or origin.plan.model.name_or_path).expanduser()
    return _check_form(_read_metadata(folder / "README.md").get("prompt_format"))


def _find_license(base: str, cache_dir: str | None) -> dict[str, str]:
    """The license in the base's card, if this machine has one."""
    card: Any = Path(base).expanduser() / "README.md"
    if not card.parent.is_dir() and HUB_ID.fullmatch(base):
        card = try_to_load_from_cache(base, "README.md", cache_dir=cache_dir)
    published = _read_metadata(card)
    names = ("license", "license_name", "license_link")
    return {name: published[name] for name in names if isinstance(published.get(name), str)}


def _read_metadata(card: Any) -> Mapping[str, Any]:
    """The metadata of a model's card; empty without a readable card."""
    try:
        check_readable(Path(card))
        return _as_mapping(metadata_load(card))
    except Exception:  # no card, or not one of ours: a card may hold anything
        return {}


def _check_form(form: Any) -> str | None:
    """A file's entry for the prompt form, or None if unknown."""
    return form if isinstance(form, str) and form in MEANINGS else None


def _as_mapping(value: Any) -> Mapping[str, Any]:
    """A value of a file, which may be no mapping; then an empty one."""
    return value if isinstance(value, Mapping) else {}


def _read_record(origin: Origin, name: str) -> Mapping[str, Any]:
    """The mapping in a run's JSON file; empty without a file."""
    file = origin.run_dir and origin.run_dir / name
    return _as_mapping(read_json(file)) if file and file.exists() else {}
