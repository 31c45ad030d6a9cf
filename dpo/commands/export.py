"""Export a checkpoint as a model of transformers, with a model card; push it to the Hub, or convert it for llama.cpp.

    dpo export CHECKPOINT OUT [--merge] [--dtype bfloat16] [--push USER/NAME]

Without `--merge` an adapter is exported in PEFT's format, with it CHECKPOINT may be such an adapter. With `--push`, OUT
may be left out. Exit status: 0 written, 1 could not be written, 2 bad input.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import transformers
from huggingface_hub import HfApi, ModelCard, get_token, hf_hub_download, metadata_load

from dpo import __version__
from dpo.analysis.curves import draw_charts
from dpo.analysis.runs import read_run
from dpo.analysis.verdict import describe_result
from dpo.commands import add_model_options, command, make_parser
from dpo.errors import InputError, RunError, explaining_library, one_sentence
from dpo.models.export import escape_markdown, export
from dpo.models.paths import ModelPath, find_model
from dpo.models.pretrained import DTYPES
from dpo.redaction import REMEMBERED, redact
from dpo.system.host import is_installed
from dpo.system.plain_files import has_form, read_json
from dpo.system.run_directory import read_run_facts

RUN_KEY = "dpo_run"  # in the metadata of a model card: the id of the run that made the repository
CONVERTER = "convert_hf_to_gguf.py"  # in llama.cpp's repository
# Patterns of the files that an export may have (weights, configs, tokenizer, code). `push` deletes earlier ones.
PUSHED = """model.safetensors model-*.safetensors pytorch_model*.bin *.index.json adapter_model.* model-*.gguf
    config.json generation_config.json adapter_config.json *processor_config.json curves/*.png
    tokenizer* special_tokens_map.json added_tokens.json chat_template* additional_chat_templates/* vocab.* merges.txt
    *.model *.tiktoken configuration_*.py modeling_*.py tokenization_*.py"""


@command
def main(arguments: list[str]) -> None:
    parser = make_parser("export", __doc__)
    option = parser.add_argument
    option("checkpoint", metavar="CHECKPOINT", help="a run, step-N, LATEST, BEST, or a policy.pt")
    option("out", metavar="OUT", nargs="?", type=Path, help="the directory to make")
    option("--merge", action="store_true", help="write an adapter and its base as one model")
    option("--dtype", choices=[*DTYPES], help="dtype of the exported weights (default: unchanged)")
    option("--model", metavar="DIR_OR_HUB_ID", help="the base model, instead of the run's own")
    option("--push", metavar="USER/NAME", help="upload to a repository of the Hub, private if it is new")
    option("--public", action="store_true", help="make the repository public")
    option("--yes", action="store_true", help="also push to a repository that something else filled")
    option("--gguf", metavar="TYPE", help="also write OUT/model-TYPE.gguf, as f16 or q8_0, by llama.cpp")
    option("--llama-cpp", metavar="DIR", type=Path, help="a checkout of llama.cpp, for --gguf")
    add_model_options(parser, "--template")
    options = parser.parse_args(arguments)
    if options.out is None and not options.push:
        parser.error("pass OUT, --push or both")
    if bool(options.gguf) != bool(options.llama_cpp):
        parser.error("--gguf and --llama-cpp go together")
    transformers.utils.logging.disable_progress_bar()
    if options.push and not re.fullmatch(r"[\w.-]+/[\w.-]+", options.push):
        raise InputError(f"--push {options.push} must be USER/NAME")
    if options.llama_cpp and not (options.llama_cpp / CONVERTER).is_file():
        raise InputError(f"--llama-cpp {options.llama_cpp} has no {CONVERTER}: name a checkout of llama.cpp")
    model_options = {
        "model": options.model,
        "template": options.chat_template,
        "trust_remote_code": options.trust_remote_code,
    }
    source = find_model(options.checkpoint, **model_options)
    print(f"reading {source.describe()}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        out = options.out or Path(scratch, "model")
        folder = export(options.checkpoint, out, dtype=options.dtype, merge=options.merge, **model_options)
        if options.gguf:
            convert(folder, options.gguf, options.llama_cpp)
        if options.push:
            run_id = read_run_facts(source.run_dir).get("run") if source.run_dir else None
            complete_card(folder, source, run_id)
            push(folder, options.push, run_id, public=options.public, may_overwrite=options.yes)


def convert(folder: Path, kind: str, llama_cpp: Path) -> None:
    """Write `model-KIND.gguf` beside an exported model; KIND is a type of the converter, such as q8_0."""
    if not (folder / "config.json").exists():
        raise InputError(f"{folder} is an adapter, and llama.cpp's converter takes a whole model: pass --merge")
    file = folder / f"model-{kind}.gguf"
    command = [sys.executable, llama_cpp / CONVERTER, folder, "--outfile", file, "--outtype", kind]
    if subprocess.run(command, check=False).returncode or not file.exists():
        raise RunError(f"{file} was not written: the output above says why; {folder} is complete")
    print(f"converted {file}")


def complete_card(folder: Path, source: ModelPath, run_id: str | None) -> None:
    """Add to a model's card its run's id, verdict and curves, and what evaluations of the model say."""
    file = folder / "README.md"
    card = ModelCard.load(file)
    card.data[RUN_KEY] = run_id
    card.data.tags = [*(card.data.tags or []), "dpo-train"]
    if source.run_dir is not None:
        run = read_run(source.run_dir)
        texts = ["## Results", escape_markdown(describe_result(run))]
        texts += map(escape_markdown, list_evaluations(source.run_dir, str(source.policy_file)))
        if is_installed("matplotlib"):
            (folder / "curves").mkdir(exist_ok=True)
            for i, (title, png) in enumerate(draw_charts([run])):
                (folder / "curves" / f"{i}.png").write_bytes(png)
                texts.append(f"![{title}](curves/{i}.png)")
        card.text = "\n\n".join([card.text.rstrip(), *map(redact, texts)]) + "\n"
    card.save(file)


def list_evaluations(run_dir: Path, model: str) -> Iterator[str]:
    """Yield what each evaluation in a run's directory says of a model, whose policy.pt has the path `model`."""
    for file in sorted(run_dir.glob("evaluation/evaluation-*.json")):
        result = None
        with suppress(InputError):
            result = read_json(file)
        if not has_form(result, {"settings": dict, "sentences": list}):
            print(f"left out of the card: {file} is not a result of dpo evaluate")
        elif result["settings"].get("model") == model:
            judge = file.stem.split("-")[1]
            yield " ".join([f"Judged by {judge}:", *map(str, result["sentences"])])


def push(folder: Path, name: str, run_id: str | None, *, public: bool, may_overwrite: bool) -> None:
    """Upload an exported model to a repository of the Hub.

    Files of an earlier model are deleted there, as a loader could prefer them. Raises InputError for a repository that
    something other than this run filled, unless `may_overwrite`.
    """
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    print(f"these files go to {name} ({'public' if public else 'private'} if it is new):")
    for file in files:
        print(f"  {file.relative_to(folder)} ({file.stat().st_size / 1e6:,.2f} MB)", flush=True)
    api = HfApi(library_name="dpo-train", library_version=__version__)
    with explaining_library(lambda error: RunError(f"{name} was not pushed: {one_sentence(error)}")):
        REMEMBERED.add(get_token() or "")  # so that no message of an error shows it
        if not api.repo_exists(name):
            api.create_repo(name, private=not public)
        else:
            card = {}
            if not may_overwrite and api.file_exists(name, "README.md"):
                card = metadata_load(hf_hub_download(name, "README.md", force_download=True)) or {}
            if not may_overwrite and (run_id is None or card.get(RUN_KEY) != run_id):
                raise InputError(f"{name} exists, and this run did not make it: choose another name, or pass --yes")
            if public:
                print(f"{name} exists, and stays private or public as it is: --public is for a new repository")
        message = f"Trained by dpo {__version__}"
        api.upload_folder(repo_id=name, folder_path=folder, commit_message=message, delete_patterns=[*PUSHED.split()])
    print(f"pushed to {api.endpoint}/{name}")
