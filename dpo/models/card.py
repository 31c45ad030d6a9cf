"""The model card of an export: data, settings, evaluation."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData, metadata_load, try_to_load_from_cache

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

REWARD_TEXT = "The only output is the reward of a response, computed at the text's last token, its EOS."
LICENCE = "The licences of base model and data apply. State one as `license` above before you publish."
NO_CONFIG = "Not known: no config of the run was found."
# settings that determine the weights: keys that a resumed run may not change, and the length of training
SETTINGS = (*(key for key, row in KEYS.items() if row.resume is Resume.KEEP), "n_epochs", "n_examples")
SHOWN_ELSEWHERE = ("datasets", "model.name_or_path")
IN_4_BITS = 'BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)'


def write_card(folder: Path, origin: Origin, *, model: Any = None, adapter: StoredAdapter | None = None) -> None:
    """Write `README.md` for a `model` or for an `adapter` alone."""
    plan, run_dir = origin.plan, origin.run_dir
    checkpoint = read_file(origin.policy) if origin.policy else {}
    # the run's config; in `plan.values`, model.trust_remote_code is the option of the export, not the run's key
    values = redact(plan.values) | {"model.trust_remote_code": origin.had_own_code} if run_dir else {}
    base, name, loss = plan.model.name_or_path, values.get("exp_name"), plan.values.get("loss.name")
    title = _escape(str(name)) if name else f"{_escape(Path(base).name)}, {loss or 'trained'}"
    base_on_hub = not Path(base).expanduser().exists() and HUB_ID.fullmatch(base) is not None
    sources = {dataset: _find_dataset_source(plan, dataset) for dataset in values.get("datasets", ())}
    prompt_format = find_prompt_format(origin) if run_dir else None
    is_adapter = model is None
    has_archive_as_base = is_adapter and origin.weights.archive is not None
    metadata = ModelCardData(
        model_name=name,
        base_model=base if base_on_hub and not has_archive_as_base else None,
        datasets=[source for source in sources.values() if HUB_ID.fullmatch(source)] or None,
        library_name="peft" if is_adapter else "transformers",
        base_model_relation="adapter" if is_adapter else None,
        pipeline_tag="text-classification" if plan.loss.scalar_head else "text-generation",
        tags=[tag for tag in (loss, "lora" if adapter else None) if tag] or None,
        prompt_format=prompt_format,
        **_find_license(base, plan.run.cache_dir),
    )

    base_name = Path(base).name
    base_text = f"[{base}](https://huggingface.co/{base})" if base_on_hub else f"`{_format_cell(base_name)}`"
    settings = {
        f"`{key}`": f"`{_format_cell(values[key])}`" for key in SETTINGS if key in values and key not in SHOWN_ELSEWHERE
    }
    # the model's own Python code, if it has any, is in the folder of a whole model, or beside an adapter's base
    runs_code = origin.had_own_code if is_adapter else bool(list(folder.glob("*.py")))
    paragraphs = (
        f"---\n{metadata.to_yaml()}\n---",
        f"# {title}",
        f"{base_text} {_describe_training(loss, sources, checkpoint)}. {_describe_weights(model, adapter)}",
        _show_loading(plan, is_adapter=is_adapter, runs_code=runs_code),
        *([REWARD_TEXT] if plan.loss.scalar_head else []),
        _describe_prompts(prompt_format),
        "## Evaluation",
        _show_evaluation(_as_mapping(checkpoint.get("metrics"))),
        "## Training data",
        _make_table("dataset | source", {_escape(k): _escape(v) for k, v in sources.items()}, if_empty=NO_CONFIG),
        *_count_data(run_dir),
        "## Settings",
        _make_table("key | value", settings, if_empty=NO_CONFIG),
        "## Code",
        _describe_code(run_dir),
        "## Licence",
        LICENCE,
    )
    (folder / "README.md").write_text("\n\n".join(paragraphs) + "\n", encoding="utf-8")


def _find_license(base: str, cache_dir: str | None) -> dict[str, str]:
    """The license in the base's card, if this machine has one."""
    folder = Path(base).expanduser()
    if not folder.is_dir() and HUB_ID.fullmatch(base):
        cached = try_to_load_from_cache(base, "README.md", cache_dir=cache_dir)
        folder = Path(cached).parent if isinstance(cached, str) else folder
    published = _read_metadata(folder)
    names = ("license", "license_name", "license_link")
    return {name: published[name] for name in names if isinstance(published.get(name), str)}


def _describe_training(loss: str | None, sources: Iterable[str], checkpoint: Mapping[str, Any]) -> str:
    method = loss or "preferences"
    text = f"trained with {method.upper() if method in ('sft', 'dpo', 'ipo') else method}"
    if datasets := ", ".join(map(_escape, sources)):
        text += f" on {datasets}"
    if isinstance(checkpoint.get("step_idx"), int):
        text += f", {checkpoint['step_idx']:,} examples"
    return text


def _describe_prompts(prompt_format: str | None) -> str:
    text = "Prompts were tokenized without special tokens added, and every response ended with the EOS token."
    if prompt_format is None:
        return text
    form = f"`{MEANINGS[HH]}`" if prompt_format == HH else MEANINGS[prompt_format]
    return f"{text} Form of a prompt: {form}."


def _show_evaluation(metrics: Mapping[str, Any]) -> str:
    rows = {f"`{key}`": f"{value:.6g}" for key, value in metrics.items() if isinstance(value, int | float)}
    if not rows:
        return "This checkpoint was saved without an evaluation."
    return "Means over the evaluation examples, at this checkpoint.\n\n" + _make_table("metric | value", rows)


def _make_table(header: str, rows: Mapping[str, str], *, if_empty: str = "") -> str:
    """A Markdown table of two columns, or the text `if_empty`."""
    if not rows:
        return if_empty
    return "\n".join((f"| {header} |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows.items())))


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


def _show_loading(plan: Plan, *, is_adapter: bool, runs_code: bool) -> str:
    """Code that loads the model, or the adapter with its base."""
    auto_class = "AutoModelForSequenceClassification" if plan.loss.scalar_head else "AutoModelForCausalLM"
    imports, options = f"{auto_class}, AutoTokenizer", ""
    own_code = ", trust_remote_code=True" if runs_code else ""
    if is_adapter:
        if plan.loss.scalar_head:
            options += ", num_labels=1"
        # without `dtype`, transformers loads the base in its config's dtype, which may differ from training's
        options += f', dtype="{plan.compute_dtype}"'
        if plan.quantized:
            imports += ", BitsAndBytesConfig"
            options += f", quantization_config={IN_4_BITS}"
    return f"""```python
from transformers import {imports}

model = {auto_class}.from_pretrained("PATH_OR_HUB_ID"{options}{own_code})
tokenizer = AutoTokenizer.from_pretrained("PATH_OR_HUB_ID"{own_code})
```"""


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


def _count_data(run_dir: Path | None) -> Iterable[str]:
    train = _as_mapping(_read_record(run_dir, "preflight.json").get("train"))
    examples, prompts = train.get("examples"), train.get("prompts")
    if isinstance(examples, int) and isinstance(prompts, int):
        yield f"{count(examples, 'example')} of {count(prompts, 'prompt')} in the training split."


def _describe_code(run_dir: Path | None) -> str:
    environment = _read_record(run_dir, "env.json")
    commit = environment.get("git_commit")
    if not commit:
        return "The commit is not known."
    packages = _as_mapping(environment.get("packages"))
    versions = ", ".join(
        f"{name} {_escape(str(packages[name]))}" for name in ("torch", "transformers") if name in packages
    )
    changed = ", with uncommitted changes" if environment.get("git_uncommitted_changes") else ""
    return f"Git commit `{_format_cell(commit)}`{changed}; {versions or 'versions unknown'}."


def find_prompt_format(origin: Origin) -> str | None:
    """The form of training prompts, from the run or an export's card.

    None if it is not known.
    """
    if origin.run_dir is not None:
        train = _as_mapping(_read_record(origin.run_dir, "preflight.json").get("train"))
        formats = _as_mapping(train.get("prompt_formats"))
        return common_format({name: _check_form(form) for name, form in formats.items()}, origin.plan.data.datasets)
    if origin.weights.archive is not None and origin.weights.adapter is None:  # a policy.pt alone
        return None
    folder = Path(origin.weights.adapter or origin.plan.model.name_or_path).expanduser()
    return _check_form(_read_metadata(folder).get("prompt_format"))


def _check_form(form: Any) -> str | None:
    """A file's entry for the prompt form, or None if unknown."""
    return form if isinstance(form, str) and form in MEANINGS else None


def _as_mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _read_record(run_dir: Path | None, name: str) -> Mapping[str, Any]:
    """The mapping in a run's JSON file; empty without a file."""
    if run_dir is None or not (run_dir / name).exists():
        return {}
    try:
        return _as_mapping(read_json(run_dir / name))
    except InputError as error:
        raise InputError(f"{error}: move the file away, or restore it") from error


def _read_metadata(folder: Path) -> Mapping[str, Any]:
    """The metadata of a model's card; empty without a readable card."""
    try:
        check_readable(folder / "README.md")
        return _as_mapping(metadata_load(folder / "README.md"))
    except Exception:  # no card, or not one of ours: a card may hold anything
        return {}
