"""The export of a model for transformers or PEFT, with a model card.

Weights that do not change stay mapped from their file; merged or converted ones are in memory once.
"""

import json
import os
import re
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from huggingface_hub import ModelCard, ModelCardData, save_torch_state_dict
from safetensors import SafetensorError
from transformers.core_model_loading import revert_weight_conversion
from transformers.dynamic_module_utils import custom_object_save

from dpo.checkpoint.files import EXPORTED, MANIFEST, check_complete, read_file
from dpo.checkpoint.shards import join_in_files, list_shards
from dpo.data.prompt_forms import CHAT, HH, PROMPT_FORMS, RAW
from dpo.data.templates import apply_template
from dpo.data.tokenization import list_end_strings
from dpo.data.tokenizer import bind_template, explaining_load_errors, load_tokenizer
from dpo.errors import InputError, RunError, WarningLine, explaining, one_sentence
from dpo.losses import LOSSES
from dpo.models.adapters import WEIGHTS, merge_adapter, read_adapter
from dpo.models.answers import list_end_tokens
from dpo.models.paths import CONFIG, ModelPath, find_model, find_prompt_format, resolve_name
from dpo.models.pretrained import DTYPES, load_config, load_generation_config, load_model, load_structure, read_archive
from dpo.models.published import (
    Tensors,
    add_keys_for_both_versions,
    drop_copies,
    find_file,
    is_text_part,
    read_weights,
    rename_weights,
)
from dpo.models.quantization import layers_to_quantize, round_weight
from dpo.models.scoring import FORMAT_KEY, POLICY_FORMAT
from dpo.redaction import redact
from dpo.settings.keys import KEYS, ResumeRule
from dpo.settings.places import BUILT_IN, HUB_ID, Source
from dpo.settings.plan import Plan
from dpo.system.plain_files import read_json, replacing, resolve_path, write_json
from dpo.system.run_directory import read_run_facts
from dpo.system.waiting import barrier_before_exit, meet_rank_0

SHARD_BYTES = 2 * 10**9
# The card lists the settings that determine the weights, without `model.trust_remote_code`: it was set for the export,
# not for the run.
SETTINGS = {key for key, row in KEYS.items() if row.resume is ResumeRule.FIXED} - {"model.trust_remote_code"}
SETTINGS |= {"exp_name", "n_epochs", "n_examples"}
IN_4_BITS = 'BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)'
# These files have the settings by which images and video are read.
PROCESSOR_FILES = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
)
# A user's own texts are in the block of code at the end of a card, where they cannot be markup.
CARD = """\
# A model trained with {method}

```python
{code}{reward}```

Prompts were tokenized without special tokens added, and every response ended with an end token. {form}

The licences of base model and data apply. State one as `license` above before you publish.

## Training

Metrics are means over the evaluation examples at this checkpoint, if it was evaluated.

{facts}"""
LOADING = """\
from transformers import {auto_class}, AutoTokenizer{imported}

model = {auto_class}.from_pretrained("PATH_OR_HUB_ID"{options})
tokenizer = AutoTokenizer.from_pretrained("PATH_OR_HUB_ID"{trust})
"""
REWARD = """\
model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
text = {text} + {end}
inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt")
reward = model(**inputs).logits.item()  # read at the last token, which ends the answer
"""
EXAMPLES = {
    CHAT: 'tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=False, '
    'add_generation_prompt=True) + "Hi!"',
    HH: r'"\n\nHuman: Hello\n\nAssistant: Hi!"',
    RAW: '"Hello Hi!"',
}


def export(
    checkpoint: str | Path,
    out: str | Path,
    *,
    dtype: str | None = None,
    merge: bool = False,
    verify: bool = True,
    **options: Any,
) -> Path:
    """Write a directory for transformers, or nothing if that fails; print its size, and return its path.

    `find_model` gets `checkpoint` as its path, and `options`. An adapter is exported as an adapter, unless `merge` is
    set. `verify` compares files with the checkpoint's checksums. Raises InputError if the checkpoint cannot be exported
    or `out` is not empty, and RunError if writing fails.
    """
    out = resolve_path(out)  # a directory could not replace a link
    if os.path.lexists(out) and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} exists already: remove it, or use another directory")
    source = find_model(checkpoint, **options)
    if source.adapter is None and (source.archive is None or merge):
        raise InputError(f"{checkpoint} holds no policy.pt or adapter, or no adapter for --merge")
    as_adapter = source.adapter is not None and not merge
    if as_adapter and (source.policy_file is None or dtype is not None):
        raise InputError(f"{checkpoint} holds an adapter: to write a model without one, or in a dtype, add --merge")
    files = {source.policy_file}
    if merge:
        files.add(source.archive)
    for file in files - {None}:
        if verify and (file.parent / MANIFEST).exists():  # the reference code writes none
            shards = (path.name for path in list_shards(file))
            check_complete(file.parent, only={file.name, CONFIG, WEIGHTS, *shards})
    problem = f"{out} could not be written, and nothing was left there"
    with explaining((OSError, SafetensorError), lambda why: RunError(f"{problem}: {why}")), replacing(out) as folder:
        folder.mkdir(parents=True)
        if as_adapter:
            _write_adapter(folder, source)
        else:
            _write_model(folder, source, dtype and DTYPES[dtype])
        for path in filter(Path.is_file, folder.rglob("*")):
            shutil.copymode(folder / "README.md", path)  # safetensors makes files that other users cannot read
    size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    sentence = f"exported {out} ({size / 1e9:,.3g} GB)"
    if not as_adapter and read_json(out / "config.json")["dtype"] == "float32":
        sentence += "; in half of that: dpo export RUN DIR --dtype bfloat16"
    print(sentence, flush=True)
    return out


def export_last(plan: Plan, rank: int) -> None:
    """Export a complete run's last checkpoint into its folder EXPORTED, if `plan.run.export` asks for that.

    A folder that exists is left as it is. Every process must call this function. A failure is only a warning.
    """
    if not plan.run.export or plan.run.debug:
        return
    latest = Path(plan.run.local_run_dir) / "LATEST"
    if rank == 0 and latest.exists() and not (latest / EXPORTED).exists():
        try:
            # This process wrote the checkpoint. Code is trusted by this run's command line, not by the checkpoint.
            is_trusted = plan.model.trust_remote_code
            export(latest, latest / EXPORTED, verify=False, trust_remote_code=is_trusted)
        except Exception as error:  # any failure is only a warning
            print(
                WarningLine(
                    f"the run is complete, but its export failed: {type(error).__name__}: {one_sentence(error)}; "
                    f"dpo export {plan.run.local_run_dir} DIR exports it"
                ),
                file=sys.stderr,
            )
    meet_rank_0("the export")  # the export may take longer than a barrier waits
    barrier_before_exit()


def _write_adapter(folder: Path, source: ModelPath) -> None:
    """Write an adapter with its tokenizer and a card; InputError if PEFT cannot load its base."""
    base_name = resolve_name(source.name)
    if source.archive is not None:
        exported = source.archive.parent / EXPORTED
        base_name = str(exported)
        if not (exported / "config.json").is_file():
            raise InputError(
                f"the base of {source.adapter} is {source.archive}, which PEFT cannot load: add --merge, or export the "
                f"base first: dpo export {source.archive} {exported}"
            )
    elif source.plan.model.random_init:
        raise InputError(f"the base of {source.adapter} has random weights, which PEFT cannot load: add --merge")
    config, _ = read_adapter(source.adapter)
    write_json(folder / CONFIG, config | {"base_model_name_or_path": base_name})
    shutil.copyfile(source.adapter / WEIGHTS, folder / WEIGHTS)
    base = load_structure(source, dtype=torch.float32)
    _write_tokenizer(folder, source, base)
    _write_card(folder, source, base, weights="an adapter")


def _write_model(folder: Path, source: ModelPath, dtype: torch.dtype | None) -> None:
    """Write a whole model, as much like the base's own directory as possible.

    Names of weights, config and other files are the base's, except what training or the export had to change.
    """
    if source.adapter is not None:
        read_adapter(source.adapter)  # a damaged one is refused before the base is loaded
    model = load_structure(source, dtype=dtype or torch.float32)
    state = drop_copies(model, _read_state(folder, model, source, dtype))
    _copy_files(folder, source, PROCESSOR_FILES)
    tokenizer = _write_tokenizer(folder, source, model)
    tensors = {}  # stays empty if weights cannot have the names in the base's files
    # The base's files lack a reward model's head, and may have nothing in common with a model with random weights.
    if not source.scalar_head and not source.plan.model.random_init:
        tensors = _update_stored(model, state, read_weights(source), dtype)
    config = load_config(source)  # again, with the base's dropout, which `load_structure` has set to 0
    if tensors or not is_text_part(config):
        written = read_json(Path(find_file(source, "config.json")))
    else:  # there are no weights of other parts
        config = config.get_text_config()
        written = json.loads(config.to_json_string())
    text = written.get("text_config", written)  # the same dict, unless the config has parts
    if not tensors:  # save the model alone, by the names that transformers gives
        rounded = dict(_round(model, state, dtype))
        if source.scalar_head:  # a new pad token gets an embedding of zeros, which is only read as padding
            embeddings = model.get_input_embeddings().weight
            name = next(name for name, weight in model.named_parameters() if weight is embeddings)
            n_missing = max(0, tokenizer.pad_token_id + 1 - len(embeddings))
            rounded[name] = torch.nn.functional.pad(rounded[name], (0, 0, 0, n_missing))
            text["vocab_size"] = len(rounded[name])
        tensors = revert_weight_conversion(model, rounded)
    storages = set()
    for name, tensor in tensors.items():
        # Safetensors refuses tensors that share a storage, such as a tied weight that the base's files have twice, or
        # views of several experts in one tensor.
        storage = tensor.untyped_storage()
        if storage.data_ptr() in storages or storage.nbytes() > tensor.nbytes:
            tensors[name] = tensor.clone()
        storages.add(storage.data_ptr())
    save_torch_state_dict(tensors, folder, max_shard_size=SHARD_BYTES, metadata={"format": "pt"})
    # If no dtype was asked for, the largest weight's dtype counts.
    dtype_name = str(dtype or max(state.values(), key=torch.numel).dtype).removeprefix("torch.")
    for part in (written, text):
        part |= {"dtype": dtype_name, "torch_dtype": dtype_name}  # as transformers 5 and 4 call it
        if not state.keys().isdisjoint(model.all_tied_weights_keys):  # the head is separate, unlike in the config
            part["tie_word_embeddings"] = False
    add_keys_for_both_versions(text, config.get_text_config())
    if not is_text_part(config):  # else the base's class stays, as the export has the parts that were not trained too
        written["architectures"] = [type(model).__name__]
    written.pop("auto_map", None)
    if model.is_remote_code():  # copy the Python files of the config's and the model's class
        config.save_pretrained(folder)
        custom_object_save(model, folder, config=config)
        written["auto_map"] = config.auto_map
    if source.scalar_head:
        text["pad_token_id"] = tokenizer.pad_token_id
        written |= {"id2label": config.id2label, "label2id": config.label2id, FORMAT_KEY: POLICY_FORMAT}
        written.pop("num_labels", None)
    write_json(folder / "config.json", written)
    _write_card(folder, source, model, weights=f"{type(model).__name__}, {dtype_name}")


def _read_state(folder: Path, model: Any, source: ModelPath, dtype: torch.dtype | None) -> Tensors:
    """Return the trained weights, with an adapter merged, by their names in `model`; not yet rounded to `dtype`.

    Tensors of a sharded checkpoint are joined in files in `folder`.
    """
    if source.adapter is None:
        state = read_archive(source.archive, model, stays_in_files=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:  # mapped files stay readable after they are removed
            return join_in_files(state, Path(scratch))
    base_dtype = None
    if source.run_dir is not None:  # the base as the run had it: in its dtype, and rounded to 4 bits if it was
        base_dtype = DTYPES[source.plan.model.policy_dtype]
    base = load_model(source, dtype=base_dtype)
    if source.run_dir is not None and source.plan.quantized:
        for layer in map(base.get_submodule, layers_to_quantize(base)):
            round_weight(layer)
    return merge_adapter(base, source.adapter, dtype)


def _round(model: Any, state: Tensors, dtype: torch.dtype | None) -> Tensors:
    """Cast weights to `dtype`, except those that transformers keeps in float32 for the model's class."""
    if dtype is None:
        return state
    rounded = type(model).from_pretrained(None, config=model.config, state_dict=dict(state), dtype=dtype).state_dict()
    return {name: rounded[name] for name in state}


def _update_stored(model: Any, state: Tensors, stored: Tensors, dtype: torch.dtype | None) -> Tensors:
    """Return `stored`, the tensors of the base's files, with the trained weights in place of the old ones.

    Returns {} if it is unclear which is which. With `dtype`, tensors are cast to it, except those that are in float32
    in files whose other tensors have 16 bits.
    """
    trained = rename_weights(model, _round(model, state, dtype), stored)
    if not trained:
        return {}
    updated = {**stored, **trained}
    if dtype is None:
        return updated
    is_in_16_bits = any(tensor.dtype in (torch.bfloat16, torch.float16) for tensor in stored.values())
    unrounded = {**stored, **rename_weights(model, state, stored)}
    for name, tensor in unrounded.items():
        if is_in_16_bits and stored[name].dtype == torch.float32:
            updated[name] = tensor
        elif name not in trained and tensor.is_floating_point():
            updated[name] = tensor.to(dtype)
    return updated


def _copy_files(folder: Path, source: ModelPath, files: Iterable[str]) -> None:
    """Copy those of the files that `source` has."""
    for file in files:
        if path := find_file(source, file):
            shutil.copyfile(path, folder / file)


def _find_pad_token(tokenizer: Any, n_embeddings: int) -> int | None:
    """Find the id of a special token, other than EOS, that has an embedding; None if there is none.

    A scalar head reads the reward at the last token that is not padding, so EOS and words cannot pad.
    """
    added = tokenizer.added_tokens_decoder
    for id in (tokenizer.pad_token_id, tokenizer.bos_token_id):
        if id in added and added[id].special and id != tokenizer.eos_token_id and id < n_embeddings:
            return id
    return None


def _write_tokenizer(folder: Path, source: ModelPath, model: Any) -> Any:
    """Copy the tokenizer's files, and return the tokenizer.

    The files are changed if the run has another chat template, or if the pad token has no embedding. A reward model
    gets a pad token, a new one if no other token can pad; an adapter gets none if the new one would have no embedding.
    Other models also get a generation config.
    """
    name = source.plan.model.tokenizer
    with explaining_load_errors("tokenizer", name):
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, **source.options)
    # Below, these published values are compared with the changed ones.
    template = tokenizer.chat_template
    pad_token = tokenizer.pad_token
    n_tokens = len(tokenizer)
    bind_template(tokenizer, source.plan.chat)
    n_embeddings = model.get_input_embeddings().num_embeddings
    if source.scalar_head:
        pad = _find_pad_token(tokenizer, n_embeddings)
        # A whole model can get an embedding for a new token; the base of an adapter must have one to spare.
        if pad is None and (n_tokens < n_embeddings or not (folder / CONFIG).exists()):
            tokenizer.add_special_tokens({"pad_token": "<|pad|>"})
        else:
            tokenizer.pad_token_id = pad
    elif (tokenizer.pad_token_id or 0) >= n_embeddings:
        tokenizer.pad_token_id = tokenizer.eos_token_id
    _copy_files(folder, source._replace(name=name), {*TOKENIZER_FILES, *tokenizer.vocab_files_names.values()})
    config_file = folder / "tokenizer_config.json"
    published = read_json(config_file) if config_file.exists() else {}
    config = dict(published)
    if type(tokenizer).__module__.startswith("transformers."):  # not the model's own code
        config.pop("auto_map", None)
    else:
        custom_object_save(tokenizer, folder, config=config)
    # A template that did not change is in the copied files, but a dict of several may be in a folder, not copied.
    if tokenizer.chat_template != template or isinstance(template, dict):
        tokenizer.save_chat_templates(folder, config, None, save_jinja_files=True)
    if tokenizer.pad_token != pad_token:
        config["pad_token"] = tokenizer.pad_token
        legacy = folder / "special_tokens_map.json"
        if legacy.exists():
            write_json(legacy, read_json(legacy) | {"pad_token": tokenizer.pad_token})
    fast = folder / "tokenizer.json"
    if len(tokenizer) > n_tokens and fast.exists():  # other tokenizers add the token that `pad_token` names
        token = {"id": tokenizer.pad_token_id, "content": tokenizer.pad_token, "special": True}
        token |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        content = read_json(fast)
        write_json(fast, content | {"added_tokens": [*content["added_tokens"], token]})
    if config != published:
        write_json(config_file, config)
    if not source.scalar_head:
        _write_generation_config(folder, source, tokenizer)
    return tokenizer


def _write_generation_config(folder: Path, source: ModelPath, tokenizer: Any) -> None:
    """Write the base's generation config, with the trained end token as the first of all end tokens."""
    published = load_generation_config(source)
    file = find_file(source, "generation_config.json")
    values = read_json(Path(file)) if file else published.to_diff_dict()
    values.pop("_from_model_config", None)  # with it transformers would derive the settings from the model's config
    values["eos_token_id"] = list_end_tokens(published, tokenizer)
    pad = tokenizer.pad_token_id
    values["pad_token_id"] = tokenizer.eos_token_id if pad is None else pad
    write_json(folder / "generation_config.json", values)


# --- the model card --------------------------------------------------------------------------------------------------


def escape_markdown(text: str) -> str:
    """Return a text on one line, escaped so that a Markdown page shows it as it is.

    Names come from others, so none may be read as markup, HTML or a link.
    """
    escaped = re.sub(r"[^\w\s.,:;%()/=+'-]", lambda match: f"&#{ord(match[0])};", " ".join(text.split()))
    # Some pages make links of bare addresses, recognized by `www.` or `://`.
    return re.sub(r"(?<=www)\.|:(?=//)", lambda match: f"&#{ord(match[0])};", escaped, flags=re.IGNORECASE)


def _write_card(folder: Path, source: ModelPath, model: Any, *, weights: str) -> None:
    """Write `README.md`, which says what the `weights` are."""
    is_adapter = (folder / CONFIG).exists()
    values = {}
    form = None
    if source.run_dir:
        values = redact(source.plan.values)
        form = find_prompt_format(source)
    method = "preferences"
    tags = []
    if source.plan.values.get("loss.name") in LOSSES:  # else the loss is unknown, or a plugin's
        method = source.plan.loss.name
        tags.append(method)
    if source.adapter is not None:
        tags.append("lora")
    data = _describe_datasets(source, values.get("datasets", ()))
    is_base_on_hub = HUB_ID.fullmatch(source.name) and not Path(source.name).exists()
    metadata = ModelCardData(
        base_model=source.name if is_base_on_hub and not (is_adapter and source.archive) else None,
        datasets=[name for name in data.values() if HUB_ID.fullmatch(name)] or None,
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-classification" if source.scalar_head else "text-generation",
        tags=tags or None,
        prompt_format=form,
    )
    checkpoint = read_file(source.policy_file) if source.policy_file else {}
    metrics = checkpoint.get("metrics") or {}
    facts = {
        "base": Path(source.name).name,
        "weights": weights,
        "data": data,
        "examples trained on": checkpoint.get("step_idx"),
        "metrics": {name: value for name, value in metrics.items() if isinstance(value, int | float)},
        # A value with a slash may be a local path.
        "settings": {key: value for key, value in values.items() if key in SETTINGS and "/" not in str(value)},
        "commit": read_run_facts(source.run_dir).get("git_commit") if source.run_dir else None,
    }
    known = {name: fact for name, fact in facts.items() if fact not in (None, {})}
    text = CARD.format(
        method=method,
        code=_write_code(folder, source, model, is_adapter=is_adapter),
        reward=_write_reward_code(source, form) if source.scalar_head else "",
        form=f"Form of a prompt: `{PROMPT_FORMS[form]}`." if form else "",
        facts=textwrap.indent(yaml.safe_dump(known, sort_keys=False, allow_unicode=True), "    "),  # a block of code
    )
    ModelCard(f"---\n{metadata}\n---\n\n{text}").save(folder / "README.md")


def _describe_datasets(source: ModelPath, names: Iterable[str]) -> dict[str, str]:
    """Map each dataset to its Hub id, or to the name of its local file, as a card must not show local directories."""
    described = {}
    for name in names:
        configured = source.plan.data.dataset_sources.get(name)
        data = Source.parse(name, configured or BUILT_IN.get(name) or name)
        described[name] = data.path
        if configured and data.local:  # a built-in dataset is read from the Hub, even if its id is a path here
            described[name] = f"local files: {data.local.name}"
    return described


def _write_code(folder: Path, source: ModelPath, model: Any, *, is_adapter: bool) -> str:
    """Write the Python code that loads the export; an adapter's base gets the dtype and quantization of training."""
    plan = source.plan
    # The model's own Python code, if it has any, is in the folder of a whole model, or beside an adapter's base.
    runs_code = plan.model.trust_remote_code if is_adapter else any(folder.glob("*.py"))
    trust = ", trust_remote_code=True" if runs_code else ""
    options = trust
    auto_class = source.auto_class.__name__
    imported = ""
    if is_adapter:
        # Without `dtype`, transformers loads the base in its config's dtype, which may differ from training's.
        options += f', dtype="{plan.compute_dtype}"'
        if plan.quantized:
            imported = ", BitsAndBytesConfig"
            options += f", quantization_config={IN_4_BITS}"
        if source.scalar_head:
            options += ", num_labels=1"
        if hasattr(model, "names_in_class"):  # the adapter has the names of the whole checkpoint's class
            auto_class = "AutoModelForImageTextToText"
    return LOADING.format(auto_class=auto_class, imported=imported, options=options, trust=trust)


def _write_reward_code(source: ModelPath, form: str | None) -> str:
    """Write the Python code that computes the reward of an example answer to a prompt in the form `form`."""
    tokenizer = load_tokenizer(source.plan.model.tokenizer, **source.options, chat=source.plan.chat)
    end = tokenizer.eos_token
    if form == CHAT:  # the first end token that the template writes after an answer
        dialogue = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi!"}]
        after = apply_template(tokenizer, dialogue).rpartition("Hi!")[2]
        end = min((token for token in list_end_strings(tokenizer) if token in after), key=after.index, default=end)
    return REWARD.format(text=EXAMPLES[form or RAW], end=json.dumps(end))
