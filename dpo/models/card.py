"""The model card of an export: data, settings, evaluation. Its text is in `card.md.jinja`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData, metadata_load, try_to_load_from_cache

from dpo.checkpoint.files import read_file
from dpo.data.asking import HH, MEANINGS, common_format
from dpo.data.sources import HUB_IDS
from dpo.errors import InputError
from dpo.models.adapters import StoredAdapter
from dpo.models.origin import Origin
from dpo.numbers import count
from dpo.settings.keys import KEYS, Resume
from dpo.settings.places import HUB_ID, Source
from dpo.settings.plan import Plan
from dpo.system.plain_files import check_readable, read_json
from dpo.system.redaction import redact

TEMPLATE = Path(__file__).with_name("card.md.jinja")
# settings that determine the weights: keys that a resumed run may not change, and the length of training
SETTINGS = (*(key for key, row in KEYS.items() if row.resume is Resume.KEEP), "n_epochs", "n_examples")
SHOWN_ELSEWHERE = ("datasets", "model.name_or_path")
IN_4_BITS = 'BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)'


def write_card(folder: Path, origin: Origin, *, model: Any = None, adapter: StoredAdapter | None = None) -> None:
    """Write `README.md` for a `model` or for an `adapter` alone."""
    plan, run_dir, is_adapter = origin.plan, origin.run_dir, model is None
    checkpoint = read_file(origin.policy) if origin.policy else {}
    # the run's config; in `plan.values`, model.trust_remote_code is the option of the export, not the run's key
    values = redact(plan.values) | {"model.trust_remote_code": origin.had_own_code} if run_dir else {}
    base, name, loss = plan.model.name_or_path, values.get("exp_name"), plan.values.get("loss.name")
    base_on_hub = not Path(base).expanduser().exists() and HUB_ID.fullmatch(base) is not None
    sources = {dataset: _find_dataset_source(plan, dataset) for dataset in values.get("datasets", ())}
    prompt_format = find_prompt_format(origin) if run_dir else None
    metadata = ModelCardData(
        model_name=name,
        base_model=base if base_on_hub and not (is_adapter and origin.weights.archive) else None,
        datasets=[source for source in sources.values() if HUB_ID.fullmatch(source)] or None,
        library_name="peft" if is_adapter else "transformers",
        base_model_relation="adapter" if is_adapter else None,
        pipeline_tag="text-classification" if plan.loss.scalar_head else "text-generation",
        tags=[tag for tag in (loss, "lora" if adapter else None) if tag] or None,
        prompt_format=prompt_format,
        **_find_license(base, plan.run.cache_dir),
    )
    options = ", num_labels=1" if is_adapter and plan.loss.scalar_head else ""
    if is_adapter:
        # without `dtype`, transformers loads the base in its config's dtype, which may differ from training's
        options += f', dtype="{plan.compute_dtype}"' + f", quantization_config={IN_4_BITS}" * plan.quantized
    # the model's own Python code, if it has any, is in the folder of a whole model, or beside an adapter's base
    runs_code = origin.had_own_code if is_adapter else bool(list(folder.glob("*.py")))
    train = _as_mapping(_read_record(run_dir, "preflight.json").get("train"))
    examples, prompts = train.get("examples"), train.get("prompts")
    environment = _read_record(run_dir, "env.json")
    packages = _as_mapping(environment.get("packages"))
    card = ModelCard.from_template(
        metadata,
        str(TEMPLATE),
        title=_escape(str(name or f"{Path(base).name}, {loss or 'trained'}")),
        base_text=f"[{base}](https://huggingface.co/{base})" if base_on_hub else f"`{_format_cell(Path(base).name)}`",
        method=loss.upper() if loss in ("sft", "dpo", "ipo") else loss or "preferences",
        sources={_escape(dataset): _escape(source) for dataset, source in sources.items()},
        n_examples=step if isinstance(step := checkpoint.get("step_idx"), int) else None,
        weights=_describe_weights(model, adapter),
        auto_class="AutoModelForSequenceClassification" if plan.loss.scalar_head else "AutoModelForCausalLM",
        options=options,
        trust=", trust_remote_code=True" if runs_code else "",
        is_reward_model=plan.loss.scalar_head,
        form=f"`{MEANINGS[HH]}`" if prompt_format == HH else prompt_format and MEANINGS[prompt_format],
        metrics={k: v for k, v in _as_mapping(checkpoint.get("metrics")).items() if isinstance(v, int | float)},
        counted=f"{count(examples, 'example')} of {count(prompts, 'prompt')}"
        if isinstance(examples, int) and isinstance(prompts, int)
        else None,
        settings={key: _format_cell(values[key]) for key in SETTINGS if key in values and key not in SHOWN_ELSEWHERE},
        commit=_format_cell(environment.get("git_commit") or ""),
        has_changes=environment.get("git_uncommitted_changes"),
        versions=", ".join(f"{p} {_escape(str(packages[p]))}" for p in ("torch", "transformers") if p in packages),
    )
    card.save(folder / "README.md")


def _describe_weights(model: Any, adapter: StoredAdapter | None) -> str:
    """A sentence on a model's class and dtype, and an adapter."""
    about_model = ""
    if model is not None:
        about_model = f"Class: `{type(model).__name__}`, weights in {str(model.dtype).removeprefix('torch.')}."
    if adapter is None:
        return about_model
    layers = ", ".join(sorted({f"`{layer.rpartition('.')[2]}`" for layer in adapter.layers}))
    about_adapter = f"LoRA adapter (r {adapter.r}, alpha {adapter.alpha:g}; {layers})"
    if about_model:
        return f"The {about_adapter} is merged into it. {about_model}"
    return (
        f"This is the {about_adapter}: peft loads it with its base; keep the dtype below, or the logits differ from "
        f"those in training."
    )


def _find_dataset_source(plan: Plan, name: str) -> str:
    """A dataset's Hub id, or its file's name without directory."""
    value = plan.data.dataset_sources.get(name)
    if value is None:
        return HUB_IDS.get(name, "made by the training code")
    source = Source.parse(name, value)
    return source.path if source.local is None else f"local files: {source.local.name}"


def _escape(text: str) -> str:
    """Escape a text for a card's body, on one line."""
    return re.sub(r"([\\`*_{}\[\]<>()#!|&~])", r"\\\1", " ".join(text.split()))


def _format_cell(value: Any) -> str:
    """A value as text for a cell; a path without its directory."""
    text = value if isinstance(value, str) else json.dumps(value)
    if text.startswith(("/", "~", "./", "../")):
        text = Path(text).name
    return " ".join(text.replace("|", "\\|").replace("`", "'").split())


def find_prompt_format(origin: Origin) -> str | None:
    """The form of training prompts, from the run or an export's card; None if it is not known."""
    if origin.run_dir is not None:
        train = _as_mapping(_read_record(origin.run_dir, "preflight.json").get("train"))
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


def _read_record(run_dir: Path | None, name: str) -> Mapping[str, Any]:
    """The mapping in a run's JSON file; empty without a file."""
    if run_dir is None or not (run_dir / name).exists():
        return {}
    try:
        return _as_mapping(read_json(run_dir / name))
    except InputError as error:
        raise InputError(f"{error}: move the file away, or restore it") from error
