"""The model card of an export: what was trained on what, how to load it, and the run's settings."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData, metadata_load

from dpo.checkpoint.files import read_file
from dpo.data.asking import DATASETS_IN_HH_FORMAT, HH, MEANINGS
from dpo.data.sources import HUB_IDS
from dpo.models.adapters import StoredAdapter
from dpo.models.origin import Origin
from dpo.settings.keys import KEYS, Resume
from dpo.settings.places import HUB_ID, Source
from dpo.settings.plan import Plan
from dpo.system.plain_files import check_readable, read_json
from dpo.system.redaction import redact

# settings that determine the weights: keys that a resumed run may not change, and the length of training
KEPT = {key for key, row in KEYS.items() if row.resume is Resume.KEEP}
# what `trust_remote_code` is in an export's plan was said to the export, and not to the run
SETTINGS = (*(key for key in KEYS if key in KEPT - {"model.trust_remote_code"}), "exp_name", "n_epochs", "n_examples")
IN_4_BITS = 'BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)'
# whatever a user wrote is in the block of code at the end, where it cannot be markup
BODY = """\
# A model trained with {method}

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
    values = redact(plan.values) if origin.run_dir else {}
    base, loss = plan.model.name_or_path, plan.values.get("loss.name")
    base_on_hub = not Path(base).expanduser().exists() and HUB_ID.fullmatch(base) is not None
    sources = {name: _describe_source(plan, name) for name in values.get("datasets", ())}
    form = find_prompt_format(origin) if origin.run_dir else None
    metadata = ModelCardData(
        base_model=base if base_on_hub and not (is_adapter and origin.weights.archive) else None,
        datasets=[source for source in sources.values() if HUB_ID.fullmatch(source)] or None,
        library_name="peft" if is_adapter else "transformers",
        base_model_relation="adapter" if is_adapter else None,
        pipeline_tag="text-classification" if plan.loss.scalar_head else "text-generation",
        tags=[tag for tag in (loss, "lora" if adapter else None) if tag] or None,
        prompt_format=form,
    )
    options = ", num_labels=1" if is_adapter and plan.loss.scalar_head else ""
    if is_adapter:
        # without `dtype`, transformers loads the base in its config's dtype, which may differ from training's
        options += f', dtype="{plan.compute_dtype}"' + f", quantization_config={IN_4_BITS}" * plan.quantized
    # the model's own Python code, if it has any, is in the folder of a whole model, or beside an adapter's base
    runs_code = plan.model.trust_remote_code if is_adapter else bool(list(folder.glob("*.py")))
    environment, train = _read_record(origin, "env.json"), _read_record(origin, "preflight.json").get("train") or {}
    facts = {
        "base": Path(base).name,
        "weights": "an adapter" if is_adapter else f"{type(model).__name__}, {str(model.dtype).removeprefix('torch.')}",
        "adapter": adapter and {"r": adapter.r, "alpha": adapter.alpha, "layers": _list_kinds(adapter)},
        "examples trained on": checkpoint.get("step_idx"),
        "metrics": {k: v for k, v in (checkpoint.get("metrics") or {}).items() if isinstance(v, int | float)},
        "data": sources,
        "training split": {name: train.get(name) for name in ("examples", "prompts") if name in train},
        "settings": {key: _hide_directory(values[key]) for key in SETTINGS if key in values},
        "commit": environment.get("git_commit"),
        "uncommitted changes": environment.get("git_uncommitted_changes"),
        "versions": {k: v for k, v in (environment.get("packages") or {}).items() if k in ("torch", "transformers")},
    }
    known = {name: fact for name, fact in facts.items() if fact not in (None, {})}
    body = BODY.format(
        method=loss or "preferences",
        auto_class="AutoModelForSequenceClassification" if plan.loss.scalar_head else "AutoModelForCausalLM",
        more_imports=", BitsAndBytesConfig" if IN_4_BITS in options else "",
        options=options,
        trust=", trust_remote_code=True" if runs_code else "",
        form=f"Form of a prompt: `{MEANINGS[form]}`." if form else "",
        facts=textwrap.indent(yaml.safe_dump(known, sort_keys=False, allow_unicode=True), "    "),  # a block of code
    )
    ModelCard(f"---\n{metadata}\n---\n\n{body}").save(folder / "README.md")


def _list_kinds(adapter: StoredAdapter) -> list[str]:
    """The names of adapted layers without those of their blocks."""
    return sorted({layer.rpartition(".")[2] for layer in adapter.layers})


def _describe_source(plan: Plan, name: str) -> str:
    """A dataset's Hub id, or its file's name without directory."""
    value = plan.data.dataset_sources.get(name)
    if value is None:
        return HUB_IDS.get(name, "made by the training code")
    source = Source.parse(name, value)
    return source.path if source.local is None else f"local files: {source.local.name}"


def _hide_directory(value: Any) -> Any:
    """A setting for strangers: a path without its directory."""
    if isinstance(value, Mapping):
        return {key: _hide_directory(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_hide_directory(item) for item in value]
    is_path = isinstance(value, str) and value.startswith(("/", "~", "./", "../"))
    return Path(value).name if is_path else value


def find_prompt_format(origin: Origin) -> str | None:
    """The form of training prompts, if all datasets have the same, by the run's record or an export's card."""
    if origin.run_dir is not None:
        recorded = (_read_record(origin, "preflight.json").get("train") or {}).get("prompt_formats", {})
        names = origin.plan.data.datasets
        forms = [HH if name in DATASETS_IN_HH_FORMAT else recorded.get(name) for name in names]
        form = forms[0] if forms and forms.count(forms[0]) == len(forms) else None
    elif origin.weights.archive is not None and origin.weights.adapter is None:  # a policy.pt alone
        return None
    else:
        card = Path(origin.weights.adapter or origin.plan.model.name_or_path, "README.md")
        try:
            check_readable(card)
            form = (metadata_load(card) or {}).get("prompt_format")
        except Exception:  # no card, or not one of ours: a card may hold anything
            return None
    return form if form in [*MEANINGS] else None


def _read_record(origin: Origin, name: str) -> Mapping[str, Any]:
    """A run's JSON file; empty without a file."""
    file = origin.run_dir and origin.run_dir / name
    return read_json(file) if file and file.exists() else {}
