"""The model that a path names, and its export for transformers or PEFT, with a model card.

Weights that do not change stay mapped from their file; merged or converted ones are in memory once.
"""

import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
import yaml
from huggingface_hub import ModelCard, ModelCardData, metadata_load, save_torch_state_dict
from safetensors import SafetensorError
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion
from transformers.dynamic_module_utils import custom_object_save

from dpo.checkpoint.files import EXPORTED, MANIFEST, check_complete, read_file, read_manifest
from dpo.data.asking import CHAT, HH, MEANINGS, RAW, apply_template
from dpo.data.tokenization import list_ends
from dpo.data.tokenizer import KeptTemplate, bind_template, explaining_load_errors, find_pad_token, load_tokenizer
from dpo.errors import InputError, RunError, explaining, one_sentence
from dpo.models.adapters import CONFIG, WEIGHTS, StoredAdapter, merge_adapter, read_adapter
from dpo.models.answers import list_end_tokens
from dpo.models.loading import check_base, find_source, load_base, resolve_name
from dpo.models.pretrained import DTYPES, load_config, load_generation_config, load_structure
from dpo.models.published import drop_copies, find_file, read_weights, rename_weights, spell_both_ways
from dpo.models.quantization import layers_to_quantize, round_to_4bit
from dpo.models.scoring import MARK, POLICY
from dpo.models.text_part import is_text_part
from dpo.models.weights import Weights, locate_weights, read_archive
from dpo.redaction import redact
from dpo.settings.keys import KEYS, Resume
from dpo.settings.places import BUILT_IN, HUB_ID, Source, check_exists
from dpo.settings.plan import Plan, resolve
from dpo.settings.validation import read_plan
from dpo.system.plain_files import check_readable, read_json, replacing, write_json
from dpo.system.waiting import after_rank_0, barrier_before_exit

RUN_CONFIG, POLICY_FILE = "config.yaml", "policy.pt"
SHARD_BYTES = 2 * 10**9
IN_4_BITS = 'BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)'
# how images and video are read
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
# whatever a user wrote is in the block of code at the end of a card, where it cannot be markup
CARD = """\
# A model trained with {method}

```python
from transformers import {auto_class}, AutoTokenizer{imported}

model = {auto_class}.from_pretrained("PATH_OR_HUB_ID"{options})
tokenizer = AutoTokenizer.from_pretrained("PATH_OR_HUB_ID"{trust})
{reward}```

Prompts were tokenized without special tokens added, and every response ended with an end token. {form}

The licences of base model and data apply. State one as `license` above before you publish.

## Training

Metrics are means over the evaluation examples at this checkpoint, if it was evaluated.

{facts}"""


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


class Origin(NamedTuple):
    plan: Plan  # the run's, or else one of defaults; `plan.model.name_or_path` always names the base
    weights: Weights = Weights()
    run_dir: Path | None = None  # the run's directory, which contains config.yaml
    base_digest: str | None = None  # the base on which an adapter was trained, if the run recorded it

    @property
    def policy(self) -> Path | None:
        """The checkpoint's own `policy.pt`, not its base's."""
        if self.weights.adapter is None:
            return self.weights.archive
        file = self.weights.adapter / POLICY_FILE
        return file if file.is_file() else None

    @property
    def parts(self) -> str:
        """What is read, which a stranger's run may have named."""
        model = self.plan.model
        return f"weights of {self.weights.archive or model.name_or_path}, tokenizer of {model.tokenizer}"


def find_origin(
    path: str | Path,
    *,
    model: str | None = None,
    trust_remote_code: bool = False,
    hub: bool = False,
    template: str | Path | None = None,
    run_plan: Plan | None = None,
) -> Origin:
    """Find the model that a path names; InputError if it names none.

    It is a `policy.pt`, its directory, a run, an adapter or a model, with `hub` also a Hub id. `model` is the base, if
    neither adapter nor run names it, or if it has moved; `template` is a file with a chat template, in place of the
    run's. `run_plan` is the run's, whose trust `trust_remote_code`
    replaces.
    """
    check_exists(str(path))
    path = Path(path).expanduser()
    is_whole_model = (path / "config.json").is_file() and not (path / POLICY_FILE).exists()
    if is_whole_model or (hub and not path.exists() and HUB_ID.fullmatch(str(path))):
        if model is not None:
            raise InputError(f"{path} is a whole model: --model names the base of a policy.pt or an adapter")
        plan = resolve({"model": {"name_or_path": str(path), "trust_remote_code": trust_remote_code}})
        return Origin(_choose_template(plan, template, {}, path))
    weights = locate_weights(path).resolve()
    adapter = weights.adapter
    if model is not None and adapter:
        weights = Weights(None, adapter)  # without the base or archive that the adapter names
    # another program's adapter has no policy.pt, and a config.yaml beside it is not a run's
    policy = adapter / POLICY_FILE if adapter else weights.archive
    folders = (policy.parent, policy.parent.parent) if policy.is_file() else ()
    run_dir = next((folder for folder in folders if (folder / RUN_CONFIG).is_file()), None)
    if run_plan is None and run_dir is not None:
        # the keys that decide anything here; others may be wrong
        decisive = ("model.", "lora.", "loss.name", "online.name", "datasets", "chat_template", "seed", "trainer")
        run_plan = read_plan(run_dir / RUN_CONFIG, prefixes=decisive)
    base = model or weights.base or (run_plan.model.name_or_path if run_plan else None)
    if base is None:
        raise InputError(f"{path} names no base model, and there is no {RUN_CONFIG} of its run beside it: give --model")
    plan = (run_plan or resolve({"model": {"name_or_path": base}})).change("model.name_or_path", base)
    plan = plan.change("model.trust_remote_code", trust_remote_code)
    if adapter and model:  # it has weights, even if the run's base had random ones
        plan = plan.change("model.random_init", False)
    if adapter and run_dir is None and list(adapter.glob("tokenizer*")):
        plan = plan.change("model.tokenizer_name_or_path", str(adapter))
    manifest = read_manifest(policy.parent) if policy and (policy.parent / MANIFEST).exists() else {}
    return Origin(_choose_template(plan, template, manifest, path), weights, run_dir, run_dir and manifest.get("base"))


def _choose_template(plan: Plan, given: str | Path | None, manifest: Mapping, path: Path) -> Plan:
    """The plan with a file's chat template, or with the text that a checkpoint keeps.

    A path in a run's config is not read: the file may have changed, or the run be a stranger's that names any file.
    """
    if given is not None:
        return plan.change("chat_template", str(given))
    if "chat_template" in manifest:
        for key in ("chat_template_args", "chat_template_date"):
            plan = plan.change(key, manifest["config"].get(key))
        return plan.change("chat_template", KeptTemplate(json.dumps(manifest["chat_template"])))
    if plan.chat.chat_template is not None:
        raise InputError(
            f"{path} is of a run that kept the path of its chat template, {plan.chat.chat_template}, and not "
            f"the text: give --template FILE with what it was trained on (dpo evaluate: --chat-template FILE)"
        )
    return plan


def export(
    checkpoint: str | Path,
    out: str | Path,
    *,
    dtype: str | None = None,
    merge: bool = False,
    verify: bool = True,
    plan: Plan | None = None,
    **options: Any,
) -> Path:
    """Write a directory for transformers, whole or not at all, and return its path.

    `checkpoint`, `plan` and `options` are those of `find_origin`. An adapter stays one, unless `merge` is given;
    `verify` compares files with the checkpoint's checksums. Raises InputError if the checkpoint cannot be exported or
    `out` is not empty, and RunError if writing fails.
    """
    out = Path(out).expanduser().absolute()
    if os.path.lexists(out) and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} exists already: remove it, or give another directory")
    origin = find_origin(checkpoint, run_plan=plan, **options)
    has_adapter = origin.weights.adapter is not None
    if origin.weights == Weights() or (merge and not has_adapter):
        raise InputError(f"{checkpoint} holds no policy.pt or adapter, or none that --merge could merge")
    as_adapter = has_adapter and not merge
    if as_adapter and (origin.policy is None or dtype is not None):
        raise InputError(f"{checkpoint} holds an adapter: to write a model without one, or in a dtype, give --merge")
    if verify:
        for file in {origin.policy, origin.weights.archive if merge else None}:
            # the reference implementation writes no manifest
            if file is not None and (file.parent / MANIFEST).exists():
                check_complete(file.parent, only={file.name, CONFIG, WEIGHTS})
    failures, said = (OSError, SafetensorError), f"{out} could not be written, and nothing was left there"
    with explaining(failures, lambda why: RunError(f"{said}: {why}")), replacing(out) as folder:
        folder.mkdir(parents=True)
        if as_adapter:
            _write_adapter(folder, origin)
        else:
            _write_model(folder, origin, None if dtype is None else DTYPES[dtype])
        for path in filter(Path.is_file, folder.rglob("*")):
            shutil.copymode(folder / "README.md", path)  # safetensors makes files that other users cannot read
    return out


def describe_export(folder: Path) -> str:
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    said = f"exported {folder} ({size / 1e9:,.3g} GB)"
    config = folder / "config.json"
    if config.exists() and read_json(config)["dtype"] == "float32":
        said += "; in half of that: dpo export RUN DIR --dtype bfloat16"
    return said


def export_last(plan: Plan, rank: int) -> None:
    """Export a complete run's last checkpoint into its `hf`, if wanted and missing; every process must call it."""
    if not plan.run.export or plan.run.debug:
        return
    latest = Path(plan.run.local_run_dir) / "LATEST"

    def export_latest() -> None:
        if rank != 0 or not latest.exists() or (latest / EXPORTED).exists():
            return
        try:
            is_trusted = plan.model.trust_remote_code  # decided by this run's command line, not by the checkpoint
            out = export(latest, latest.resolve() / EXPORTED, trust_remote_code=is_trusted, verify=False, plan=plan)
            print(describe_export(out), flush=True)
        except Exception as error:  # no error of an export may fail a run that is complete
            why = one_sentence(error)
            merge = " --merge" if "give --merge" in why else ""
            print(
                f"warning: the run is complete, but its export failed: {type(error).__name__}: {why}; to export it, "
                f"run dpo export {plan.run.local_run_dir} DIR{merge}",
                file=sys.stderr,
            )

    after_rank_0("the export", export_latest)
    barrier_before_exit()


def _find_base_for_peft(origin: Origin) -> str:
    """The base's name; InputError if PEFT cannot load it."""
    archive, adapter = origin.weights.archive, origin.weights.adapter
    if archive is not None:
        exported = archive.parent / EXPORTED
        if (exported / "config.json").is_file():
            return str(exported)
        raise InputError(
            f"the base of {adapter} is {archive}, which PEFT cannot load: give --merge, or export the base first: "
            f"dpo export {archive} {exported}"
        )
    if origin.plan.model.random_init:
        raise InputError(f"the base of {adapter} has random weights, which PEFT cannot load: give --merge")
    return resolve_name(origin.plan.model.name_or_path)


def _write_adapter(folder: Path, origin: Origin) -> None:
    directory = origin.weights.adapter
    config = read_json(directory / CONFIG) | {"base_model_name_or_path": _find_base_for_peft(origin)}
    write_json(folder / CONFIG, dict(sorted(config.items())))
    shutil.copyfile(directory / WEIGHTS, folder / WEIGHTS)
    base = load_structure(find_source(origin.plan), dtype=torch.float32)
    tokenizer = _write_tokenizer(folder, origin, base)
    if not origin.plan.loss.scalar_head:
        _write_generation_config(folder, origin, tokenizer)
    _write_card(folder, origin, base, adapter=read_adapter(directory))


def _write_model(folder: Path, origin: Origin, dtype: torch.dtype | None) -> None:
    """Write the base's own directory with other weights: its names, config and files, but for what had to change."""
    source, is_reward_model = find_source(origin.plan), origin.plan.loss.scalar_head
    adapter = None if origin.weights.adapter is None else read_adapter(origin.weights.adapter)
    model = load_structure(source, dtype=dtype or torch.float32)
    state = drop_copies(model, _read_state(model, origin, adapter, dtype))
    _copy_files(folder, source, PROCESSOR_FILES)
    tokenizer = _write_tokenizer(folder, origin, model)
    # a reward model has another head than the files, and random weights may have nothing in common with them
    is_like_files = not is_reward_model and not origin.plan.model.random_init
    tensors = _complete(model, state, read_weights(source), dtype) if is_like_files else {}
    config = load_config(source)  # again, with the base's dropout, which `load_structure` has set to 0
    if tensors or not is_text_part(config):
        written = dict(read_json(Path(find_file(source, "config.json"))))
    else:  # there are no weights of other parts
        config = config.get_text_config()
        written = json.loads(config.to_json_string())
    if not tensors:
        rounded = dict(_round(model, state, dtype))
        if is_reward_model:
            _embed(model, rounded, tokenizer.pad_token_id)
        tensors = revert_weight_conversion(model, rounded)
    save_torch_state_dict(_separate(tensors), folder, max_shard_size=SHARD_BYTES, metadata={"format": "pt"})
    dtype_name = str(dtype or max(state.values(), key=torch.numel).dtype).removeprefix("torch.")
    text = written.get("text_config", written)
    for part in (written, text):
        part |= {"dtype": dtype_name, "torch_dtype": dtype_name}  # as transformers 5 and 4 call it
        if not state.keys().isdisjoint(model.all_tied_weights_keys):  # a head of its own, although the config ties it
            part["tie_word_embeddings"] = False
    spell_both_ways(text, config.get_text_config())
    if not is_text_part(config):  # else the class has more parts than the one that was trained
        written["architectures"] = [type(model).__name__]
    written.pop("auto_map", None)
    if model.is_remote_code():
        config.save_pretrained(folder)
        custom_object_save(model, folder, config=config)
        written["auto_map"] = config.auto_map
    if is_reward_model:
        n_embeddings = max(config.get_text_config().vocab_size, tokenizer.pad_token_id + 1)
        text |= {"pad_token_id": tokenizer.pad_token_id, "vocab_size": n_embeddings}
        written |= {"id2label": config.id2label, "label2id": config.label2id, MARK: POLICY}
        written.pop("num_labels", None)
    else:
        _write_generation_config(folder, origin, tokenizer)
    write_json(folder / "config.json", written)
    _write_card(folder, origin, model, adapter=adapter, dtype=dtype_name)


def _read_state(
    model: Any, origin: Origin, adapter: StoredAdapter | None, dtype: torch.dtype | None
) -> dict[str, Tensor]:
    if adapter is None:
        return read_archive(origin.weights.archive, model)
    plan, has_run = origin.plan, origin.run_dir is not None
    # the base as the run had it: in its precision, and of 4 bits what they keep
    base_dtype = DTYPES[plan.model.policy_dtype] if has_run else None
    base = load_base(plan, base_dtype, origin.weights.archive, attn_implementation="eager")
    check_base(base, origin.base_digest, plan)
    if has_run and plan.quantized:
        for layer in map(base.get_submodule, layers_to_quantize(base)):
            layer.weight.data = round_to_4bit(layer.weight.detach(), layer)
    return merge_adapter(base, adapter, dtype)


def _embed(model: Any, state: dict[str, Tensor], token_id: int) -> None:
    """Add a row of zeros for a token, which is only read as padding."""
    embeddings = model.get_input_embeddings().weight
    name = next(name for name, weight in model.named_parameters() if weight is embeddings)
    n_missing = max(0, token_id + 1 - len(embeddings))
    state[name] = torch.nn.functional.pad(state[name], (0, 0, 0, n_missing))


def _round(model: Any, state: Mapping[str, Tensor], dtype: torch.dtype | None) -> Mapping[str, Tensor]:
    """Cast weights to `dtype`, but for those that transformers keeps in float32 in such a model."""
    if dtype is None:
        return state
    rounded = type(model).from_pretrained(None, config=model.config, state_dict=dict(state), dtype=dtype).state_dict()
    return {name: rounded[name] for name in state}


def _complete(
    model: Any, state: Mapping[str, Tensor], stored: dict[str, Tensor], dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """A base's tensors with trained ones in their places; none if these are unclear.

    With `dtype`, what is in float32 in files of 16 bits stays so.
    """
    named = rename_weights(model, _round(model, state, dtype), stored)
    if not named:
        return {}
    complete = {**stored, **named}
    if dtype is None:
        return complete
    is_in_16_bits = any(tensor.dtype in (torch.bfloat16, torch.float16) for tensor in stored.values())
    for name, tensor in (stored | rename_weights(model, state, stored)).items():
        if is_in_16_bits and stored[name].dtype == torch.float32:
            complete[name] = tensor
        elif name not in named and tensor.is_floating_point():
            complete[name] = tensor.to(dtype)
    return complete


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy what shares its storage: a tied weight that the base's files have twice, or an expert of several."""
    storages, separate = set(), {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        is_shared = storage.data_ptr() in storages or storage.nbytes() > tensor.nbytes
        separate[name] = tensor.clone() if is_shared else tensor
        storages.add(storage.data_ptr())
    return separate


def _copy_files(folder: Path, source: Any, files: Iterable[str]) -> None:
    for file in files:
        if path := find_file(source, file):
            shutil.copyfile(path, folder / file)


def _write_tokenizer(folder: Path, origin: Origin, model: Any) -> Any:
    """Copy the tokenizer's files, and change template and pad token there if the run, or a lack of embedding, asks.

    A reward model always gets a pad token, a new one if no other token can pad.
    """
    plan, source = origin.plan, find_source(origin.plan)
    name = plan.model.tokenizer
    with explaining_load_errors("tokenizer", name):
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, **source.options)
    template = tokenizer.chat_template
    pad_token = tokenizer.pad_token
    n_tokens = len(tokenizer)
    bind_template(tokenizer, plan.chat)
    n_embeddings = model.get_input_embeddings().num_embeddings
    pad = find_pad_token(tokenizer, n_embeddings)
    if plan.loss.scalar_head:
        if pad is None and (n_tokens < n_embeddings or not (folder / CONFIG).exists()):  # an adapter adds no embedding
            tokenizer.add_special_tokens({"pad_token": "<|pad|>"})
        else:
            tokenizer.pad_token_id = pad
    elif (tokenizer.pad_token_id or 0) >= n_embeddings:
        tokenizer.pad_token_id = tokenizer.eos_token_id if pad is None else pad
    _copy_files(folder, source._replace(name=name), {*TOKENIZER_FILES, *tokenizer.vocab_files_names.values()})
    config_file = folder / "tokenizer_config.json"
    published = read_json(config_file) if config_file.exists() else {}
    config = dict(published)
    if type(tokenizer).__module__.startswith("transformers."):  # its class is used, not the model's code
        config.pop("auto_map", None)
    else:
        custom_object_save(tokenizer, folder, config=config)
    if tokenizer.chat_template != template or isinstance(template, dict):  # else it is in the files
        tokenizer.save_chat_templates(folder, config, None, save_jinja_files=True)
    if tokenizer.pad_token != pad_token:
        config["pad_token"] = tokenizer.pad_token
        legacy = folder / "special_tokens_map.json"
        if legacy.exists():
            write_json(legacy, read_json(legacy) | {"pad_token": tokenizer.pad_token})
    fast = folder / "tokenizer.json"
    if len(tokenizer) > n_tokens and fast.exists():  # other tokenizers add what `pad_token` names
        token = {"id": tokenizer.pad_token_id, "content": tokenizer.pad_token, "special": True}
        token |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        content = read_json(fast)
        write_json(fast, content | {"added_tokens": [*content["added_tokens"], token]})
    if config != published:
        write_json(config_file, config)
    return tokenizer


def _write_generation_config(folder: Path, origin: Origin, tokenizer: Any) -> None:
    """Write the base's settings of generation, with end tokens of which the first is the one that was trained."""
    source = find_source(origin.plan)
    published = load_generation_config(source)
    file = find_file(source, "generation_config.json")
    values = dict(read_json(Path(file))) if file else published.to_diff_dict()
    values.pop("_from_model_config", None)  # by which transformers would make it anew
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    values |= {"eos_token_id": list_end_tokens(published, tokenizer), "pad_token_id": pad}
    write_json(folder / "generation_config.json", values)


# --- the model card --------------------------------------------------------------------------------------------------


def escape_markdown(text: str) -> str:
    """The text on one line, as a page shows it: no markup, HTML or link of its own, as names come from others."""
    escaped = re.sub(r"[^\w\s.,:;%()/=+'-]", lambda found: f"&#{ord(found[0])};", " ".join(text.split()))
    return re.sub(r"(?<=www)\.|:(?=//)", lambda found: f"&#{ord(found[0])};", escaped, flags=re.IGNORECASE)


def _find_end(tokenizer: Any, form: str | None) -> str:
    """The token that ends an answer in this form of prompts."""
    if form == CHAT:
        dialogue = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi!"}]
        behind = apply_template(tokenizer, dialogue).rpartition("Hi!")[2]
        found = [token for token in list_ends(tokenizer) if token in behind]
        if found:
            return min(found, key=behind.index)
    return tokenizer.eos_token


def _write_card(
    folder: Path, origin: Origin, model: Any, *, adapter: StoredAdapter | None, dtype: str | None = None
) -> None:
    """Write `README.md`, without the weights' `dtype` for an `adapter` alone."""
    plan = origin.plan
    is_adapter = dtype is None
    checkpoint = read_file(origin.policy) if origin.policy else {}
    values = redact(plan.values) if origin.run_dir else {}
    base, loss = plan.model.name_or_path, plan.values.get("loss.name")
    base_on_hub = not Path(base).expanduser().exists() and HUB_ID.fullmatch(base) is not None
    sources = {}  # of data: a Hub id, or a file's name without directory
    for name in values.get("datasets", ()):
        given = plan.data.dataset_sources.get(name)
        source = Source.parse(name, given or BUILT_IN.get(name) or name)
        # a directory that is named like one of BUILT_IN is not where that is read
        sources[name] = f"local files: {source.local.name}" if given and source.local else source.path
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
    # the model's own Python code, if it has any, is in the folder of a whole model, or beside an adapter's base
    runs_code = plan.model.trust_remote_code if is_adapter else bool(list(folder.glob("*.py")))
    options = trust = ", trust_remote_code=True" if runs_code else ""
    if is_adapter:
        # without `dtype`, transformers loads the base in its config's dtype, which may differ from training's
        options += f', dtype="{plan.compute_dtype}"' + f", quantization_config={IN_4_BITS}" * plan.quantized
        options += ", num_labels=1" * plan.loss.scalar_head
    auto_class = find_source(plan).auto_class.__name__
    if is_adapter and hasattr(model, "names_in_class"):  # the adapter has the names of the whole checkpoint's class
        auto_class = "AutoModelForImageTextToText"
    reward = ""
    if plan.loss.scalar_head:
        trained = load_tokenizer(plan.model.tokenizer, **find_source(plan).options, chat=plan.chat)
        reward = REWARD.format(text=EXAMPLES[form or RAW], end=json.dumps(_find_end(trained, form)))
    # settings that determine the weights, but for paths, and for what was said to the export and not to the run
    kept = {key for key, row in KEYS.items() if row.resume is Resume.KEEP} - {"model.trust_remote_code"}
    settings = {
        key: value
        for key, value in values.items()
        if key in kept | {"exp_name", "n_epochs", "n_examples"} and "/" not in str(value)
    }
    facts = {
        "base": Path(base).name,
        "weights": "an adapter" if is_adapter else f"{type(model).__name__}, {dtype}",
        "adapter": adapter and {"r": adapter.r, "alpha": adapter.alpha},
        "examples trained on": checkpoint.get("step_idx"),
        "metrics": {k: v for k, v in (checkpoint.get("metrics") or {}).items() if isinstance(v, int | float)},
        "data": sources,
        "settings": settings,
        "commit": _read_record(origin, "env.json").get("git_commit"),
    }
    known = {name: fact for name, fact in facts.items() if fact not in (None, {})}
    text = CARD.format(
        method=escape_markdown(loss or "preferences"),
        auto_class=auto_class,
        imported=", BitsAndBytesConfig" if IN_4_BITS in options else "",
        options=options,
        trust=trust,
        reward=reward,
        form=f"Form of a prompt: `{MEANINGS[form]}`." if form else "",
        facts=textwrap.indent(yaml.safe_dump(known, sort_keys=False, allow_unicode=True), "    "),  # a block of code
    )
    ModelCard(f"---\n{metadata}\n---\n\n{text}").save(folder / "README.md")


def find_prompt_format(origin: Origin) -> str | None:
    """The form of all training prompts, by the run's record or an export's card; None if they differ."""
    if origin.run_dir is not None:
        train = _read_record(origin, "preflight.json").get("train")
        recorded = train.get("prompt_formats") if isinstance(train, Mapping) else None
        names = origin.plan.data.datasets
        forms = {HH if name in BUILT_IN else str((recorded or {}).get(name)) for name in names}
        form = forms.pop() if len(forms) == 1 else None
    else:
        card = Path(origin.weights.adapter or origin.plan.model.name_or_path, "README.md")
        try:
            check_readable(card)
            form = (metadata_load(card) or {}).get("prompt_format")
        except Exception:  # no card, or not one of ours: a card may hold anything
            return None
    return form if form in [*MEANINGS] else None


def _read_record(origin: Origin, name: str) -> Mapping:
    file = origin.run_dir and origin.run_dir / name
    record = read_json(file) if file and file.exists() else {}
    if not isinstance(record, Mapping):
        raise InputError(f"{file} holds no mapping: restore it, or remove it")
    return record
