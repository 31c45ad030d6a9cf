"""Ask a policy and its reference, and show their answers one after the other.

    dpo sample CHECKPOINT_OR_DIR

CHECKPOINT_OR_DIR is a run's directory (which means its LATEST), one of its step-N, LATEST or BEST, a policy.pt, a
directory in Hugging Face's format or PEFT's, or a Hub id. Prompts are put into the form that the model was trained on,
which is printed. Typed or piped lines make a conversation with each model; /reset starts a new one. docs/export.md
explains the options. Exit status: 0, 2 bad input, 130 Ctrl-C.
"""

import itertools
import sys

from dpo.commands import add_model_options, add_sampling_options, command, make_parser, set_up_models
from dpo.data.prompt_forms import PROMPT_FORMS, RAW
from dpo.errors import InputError
from dpo.models.answers import Sampling
from dpo.models.generation import LoadedModel, load_for_generation
from dpo.redaction import redact

RESET = "/reset"


def converse(models: list[LoadedModel], sampling: Sampling) -> None:
    """Hold a conversation with each model, over typed or piped lines; in the form `raw` each line begins a new one."""
    print(f"Type a prompt of one line, then Enter; {RESET} starts a new conversation, and Ctrl-D ends.")
    histories = [[] for _ in models]  # messages so far, by model
    for index in itertools.count():  # the prompt's number, which is part of the seed
        try:
            line = input("> ").strip()
        except EOFError:
            break
        if line == RESET or models[0].form == RAW:
            histories = [[] for _ in models]
        if line in ("", RESET):
            continue
        conversations = [[*history, {"role": "user", "content": line}] for history in histories]
        try:  # all are encoded before the first answer, as a prompt that does not fit changes no history
            prompts = []
            for model, messages in zip(models, conversations, strict=True):
                prompts.append(model.encode(model.write(messages), n_new=sampling.max_new_tokens))
        except InputError as error:
            print(f"error: {redact(str(error))}; {RESET} starts a new conversation", file=sys.stderr)
            continue
        histories = conversations
        for model, prompt, history in zip(models, prompts, histories, strict=True):
            text = model.answer(prompt, index, sampling).strip()
            history.append({"role": "assistant", "content": text})
            # Control characters could steer a terminal.
            printable = "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
            print(f"--- {model.name} ---\n{printable}\n", flush=True)


@command
def main(arguments: list[str]) -> None:
    parser = make_parser("sample", __doc__)
    option = parser.add_argument
    option("path", metavar="CHECKPOINT_OR_DIR")
    option("--reference", choices=["none"], help="load none; default: what the run started from")
    add_sampling_options(parser)
    option("--model", metavar="DIR_OR_HUB_ID", help="base model of a policy.pt without a config.yaml")
    add_model_options(parser, "--template")
    options = parser.parse_args(arguments)
    set_up_models()
    models = load_for_generation(
        options.path,
        reference=options.reference,
        model=options.model,
        template=options.chat_template,
        trust_remote_code=options.trust_remote_code,
    )
    sampling = models[0].choose_sampling(options)
    form = models[0].form
    print(f"prompts are asked in the form {form}: {PROMPT_FORMS[form]}")
    print(f"answers are drawn with {sampling} (--temperature, --top-p, --top-k)")
    converse(models, sampling)
