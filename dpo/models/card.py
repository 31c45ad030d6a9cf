"""The model card of an exported policy: training data, settings, evaluation and licence."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import ModelCard, ModelCardData, hf_hub_download, metadata_load, model_info
from huggingface_hub.errors import LocalEntryNotFoundError

from dpo.data.asking import HH, MEANINGS, common_format
from dpo.data.sources import HUB_IDS
from dpo.errors import InputError
from dpo.models.loading import find_source
from dpo.models.origin import Origin
from dpo.numbers import count
from dpo.settings.keys import KEYS, Resume
from dpo.settings.places import HUB_ID, Source
from dpo.settings.plan import Plan
from dpo.system.plain_files import check_readable, read_json
from dpo.system.redaction import redact

if TYPE_CHECKING:
    from peft import LoraConfig

UNKNOWN, OTHER = "unknown", "other"  # the Hub's words for a licence that is not known, and for one without an id
MODEL = {"library_name": "transformers"}
ADAPTER = {"library_name": "peft", "base_model_relation": "adapter"}
HUB_SECS = 5  # how long the Hub may take to answer
# settings that determine the weights: keys that a resumed run may not change, and the length of training
SETTINGS = (*(key for key, row in KEYS.items() if row.resume is Resume.KEEP), "n_epochs", "n_examples")
SHOWN_ELSEWHERE = ("datasets", "model.name_or_path")

IN_4_BITS = 'BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)'

TEMPLATE = """---
{{ card_data }}
---

# {{ title }}

{{ base }} trained with {{ loss }}{% if data %} on {{ data }}{% endif %}{% if examples %}, {{ examples }} examples\
{% endif %}. {{ kind }}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer{{ ", BitsAndBytesConfig" if quantized }}

model = AutoModelForCausalLM.from_pretrained("{{ place }}"{{ of_base }}{{ code }})
tokenizer = AutoTokenizer.from_pretrained("{{ place }}"{{ code }})
```

Prompts were tokenized without special tokens added, and every response ended with the EOS token.\
{% if prompt_format %} Form of a prompt: {{ prompt_format }}.{% endif %}

## Evaluation

{% if metrics -%}
Means over the evaluation examples, at this checkpoint.

| metric | value |
|---|---|
{% for name, value in metrics -%}
| `{{ name }}` | {{ value }} |
{% endfor %}
{%- else -%}
This checkpoint was saved without an evaluation.
{%- endif %}

## Training data

{% if sources -%}
| dataset | source |
|---|---|
{% for name, source in sources -%}
| {{ name }} | {{ source }} |
{% endfor %}
{%- else -%}
Not known: no config of the run was found.
{%- endif %}
{%- if counts %}
{{ counts }}
{% endif %}
## Settings

{% if settings -%}
| key | value |
|---|---|
{% for name, value in settings -%}
| `{{ name }}` | `{{ value }}` |
{% endfor %}
{%- else -%}
Not known: no config of the run was found.
{%- endif %}

## Code

{% if commit -%}
Git commit `{{ commit }}`{% if changed %}, with uncommitted changes{% endif %}; {{ versions }}.
{%- else -%}
The commit is not known.
{%- endif %}

## Licence

{{ licence }}
"""


def write_card(
    folder: Path,
    origin: Origin,
    *,
    saved: Mapping,
    architecture: str | None = None,
    dtype: torch.dtype | None = None,
    adapter: LoraConfig | None = None,
) -> None:
    """Write `README.md` from the run's records; `saved` is the content of its `policy.pt`.

    `architecture` and `dtype` are those of the model in the folder; None: it holds only the `adapter`.
    """
    plan = origin.plan
    values = redact(plan.values) | {"model.trust_remote_code": origin.had_own_code} if origin.run_dir else {}
    base, name = plan.model.name_or_path, values.get("exp_name")
    loss: Any = plan.values.get("loss.name")
    sources = [(name, _find_dataset_source(plan, name)) for name in values.get("datasets", ())]
    form = find_prompt_format(origin) if origin.run_dir else None
    metrics = saved["metrics"] if isinstance(saved.get("metrics"), Mapping) else {}
    licence = _find_licence(base, plan.run.cache_dir)
    on_hub, alone = not Path(base).expanduser().exists() and HUB_ID.fullmatch(base) is not None, architecture is None
    runs_code = origin.had_own_code if alone else bool(list(folder.glob("*.py")))  # beside the base, or in the folder
    card = ModelCard.from_template(
        ModelCardData(
            model_name=name,
            base_model=base if on_hub and not (alone and origin.weights) else None,  # weights: of the base, own ones
            datasets=[source for _, source in sources if HUB_ID.fullmatch(source)] or None,
            **(ADAPTER if alone else MODEL),
            pipeline_tag="text-generation",
            tags=[tag for tag in (loss, adapter and "lora") if tag] or None,
            prompt_format=form,
            **licence,
        ),
        template_str=TEMPLATE,
        title=name or f"{Path(base).name}, {loss or 'trained'}",
        base=f"[{base}](https://huggingface.co/{base})" if on_hub else f"`{Path(base).name}`",
        loss={"sft": "SFT", "dpo": "DPO", "ipo": "IPO"}.get(loss, loss or "preferences"),
        data=", ".join(name for name, _ in sources),
        examples=f"{saved['step_idx']:,}" if isinstance(saved.get("step_idx"), int) else None,
        kind=_kind(architecture, dtype, adapter),
        place="PATH_OR_HUB_ID",
        prompt_format=f"`{MEANINGS[form]}`" if form == HH else form and MEANINGS[form],
        of_base=_base_options(origin) if alone else "",
        quantized=alone and plan.quantized,
        code=", trust_remote_code=True" if runs_code else "",
        metrics=[(name, f"{value:.6g}") for name, value in metrics.items() if isinstance(value, (int, float))],
        sources=sources,
        counts=_counts(origin.run_dir),
        settings=[(key, _cell(values[key])) for key in SETTINGS if key in values and key not in SHOWN_ELSEWHERE],
        **_code(origin.run_dir),
        licence=_on_licence(licence),
    )
    (folder / "README.md").write_text(card.content, encoding="utf-8")


def _base_options(origin: Origin) -> str:
    """The options for loading an adapter's base, so that it computes as in training.

    Without them transformers would take another dtype, from the base's own config.
    """
    plan = origin.plan
    options = f', dtype="{plan.compute_dtype}"'
    return options + (f", quantization_config={IN_4_BITS}" if plan.quantized else "")


def _kind(architecture: str | None, dtype: torch.dtype | None, adapter: LoraConfig | None) -> str:
    """A description of the folder's content."""
    model = f"Class: `{architecture}`, weights in {str(dtype).removeprefix('torch.')}."
    if adapter is None:
        return model
    targets = adapter.target_modules
    layers = (
        f"`{targets}`"
        if isinstance(targets, str)
        else ", ".join(sorted({f"`{name.rpartition('.')[2]}`" for name in targets or ()}))
    )
    lora = f"LoRA adapter (r {adapter.r}, alpha {adapter.lora_alpha:g}; {layers})"
    return (
        f"This is the {lora}: peft loads it with its base; keep the dtype below, or the logits differ from training."
        if architecture is None
        else f"The {lora} is merged into it. {model}"
    )


def _find_dataset_source(plan: Plan, name: str) -> str:
    """The source of a dataset: its Hub id, or the name of a local file without its private directory."""
    value = plan.data.dataset_sources.get(name)
    if value is None:
        return HUB_IDS.get(name, "made by the training code")
    source = Source.parse(name, value)
    if source.local is not None:
        return f"local files: {source.local.name}"
    return source.path


def _cell(value: Any) -> str:
    """A value as code in a table's cell; only the last part of a path."""
    text = value if isinstance(value, str) else json.dumps(value)
    text = Path(text).name if text.startswith(("/", "~", "./", "../")) else text
    return " ".join(text.replace("|", "\\|").replace("`", "'").split())


def find_prompt_format(origin: Origin) -> str | None:
    """The form of the prompts a model was trained on, from its run or from the card of one of our exports."""
    if origin.run_dir is not None:
        recorded = _read_training_data(origin.run_dir).get("prompt_formats")
        formats = recorded if isinstance(recorded, Mapping) else {}
        return common_format({name: _known(form) for name, form in formats.items()}, origin.plan.data.datasets)
    if origin.weights is not None and origin.adapter is None:
        return None
    source = find_source(origin.plan)
    place = source["name"] if origin.adapter is None else str(origin.adapter)
    return _known(read_metadata(place, source["cache_dir"], ask_hub=True).get("prompt_format"))


def _known(form: Any) -> str | None:
    return form if isinstance(form, str) and form in MEANINGS else None


def _read_training_data(run_dir: Path | None) -> Mapping[str, Any]:
    """The preflight record of a run's training split."""
    train = _read_json(run_dir, "preflight.json").get("train")
    return train if isinstance(train, Mapping) else {}


def _counts(run_dir: Path | None) -> str:
    train = _read_training_data(run_dir)
    examples, prompts = train.get("examples"), train.get("prompts")
    if not isinstance(examples, int) or not isinstance(prompts, int):
        return ""
    return f"\n{count(examples, 'example')} of {count(prompts, 'prompt')} in the training split."


def _code(run_dir: Path | None) -> dict[str, Any]:
    facts = _read_json(run_dir, "env.json")
    packages = facts.get("packages")
    packages = packages if isinstance(packages, Mapping) else {}
    versions = ", ".join(f"{name} {packages[name]}" for name in ("torch", "transformers") if name in packages)
    commit = facts.get("git_commit")
    return {
        "commit": commit,
        "changed": facts.get("git_uncommitted_changes"),
        "versions": versions or "versions unknown",
    }


def _read_json(run_dir: Path | None, name: str) -> Mapping[str, Any]:
    """A record that the run has written about itself; empty if there is none."""
    if run_dir is None or not (run_dir / name).exists():
        return {}
    try:
        content = read_json(run_dir / name)
    except InputError as error:
        raise InputError(f"{error}: move it away, or restore it") from error
    return content if isinstance(content, Mapping) else {}


def read_metadata(model: str, cache_dir: str | None, *, ask_hub: bool = False) -> Mapping[str, Any]:
    """The metadata of a model's card, in its directory or the cache; {} without a readable card."""
    folder = Path(model).expanduser()
    try:
        if folder.exists():
            check_readable(folder / "README.md")
            return metadata_load(folder / "README.md") or {}
        try:
            return metadata_load(hf_hub_download(model, "README.md", cache_dir=cache_dir, local_files_only=True)) or {}
        except LocalEntryNotFoundError:  # a download would be retried many times
            card = model_info(model, timeout=HUB_SECS).card_data if ask_hub else None
            return card.to_dict() if card else {}
    except Exception:  # anything may be there, and nothing depends on it
        return {}


def _find_licence(base: str, cache_dir: str | None) -> dict[str, str]:
    """The licence in the base model's card, if that is on this machine; a link to one of its files is left out."""
    data = read_metadata(base, cache_dir)
    found = {key: data.get(key) for key in ("license", "license_name", "license_link")}
    found = {key: value for key, value in found.items() if isinstance(value, str) and value}
    if not found.get("license_link", "https://").startswith(("https://", "http://")):
        del found["license_link"]
    return {"license": OTHER if found.keys() - {"license_link"} else UNKNOWN} | found


def _on_licence(licence: Mapping[str, str]) -> str:
    if licence["license"] == UNKNOWN:
        return "Not known here: that of base model and data applies. Fill in `license` above before you publish."
    name = licence.get("license_name", licence["license"])
    return f"That of the base model: {_cell(name)}. The data may have terms of its own."
