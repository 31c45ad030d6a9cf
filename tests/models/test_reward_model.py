"""A reward model scores each answer as it would alone."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import transformers
from support.formats import assistant, system, tool, user
from support.models import REWARD_MODELS, nearly, save_reward_model
from support.pytests import refused
from support.runs import TINY, change_json

from dpo.data.schema import Prompt
from dpo.models.answers import Answer
from dpo.models.scoring import load_scorer
from dpo.settings.keys import dotted
from dpo.settings.plan import make_plan

DIALOGUE = Prompt("\n\nHuman: Good morning.\n\nAssistant:", [], [])
RAW = Prompt("Once", [], [])
MESSAGES = [system("Be kind."), user("Hello")]
CHAT = Prompt("[system]Be kind.[user]Hello[assistant]", [], [], rendered=True, messages=MESSAGES)
TEXTS = [" Go away!", " Good day, and welcome.", "", " Yes" * 5]
PROMPTS, ANSWERS = zip(*((prompt, Answer(text, (), True)) for prompt in (DIALOGUE, RAW) for text in TEXTS), strict=True)


def plan_of(reward_model: str, *, most: int = 8, reward_format: str | None = None):
    scorer = {"scorer": "reward_model", "reward_model": reward_model, "reward_format": reward_format}
    online = {"name": "online", **scorer, "max_new_tokens": most}
    return make_plan({**dict(dotted({"online": online})), "max_length": 8 + most})


def scorer_of(reward_model: str, **options):
    return load_scorer(plan_of(reward_model, **options), torch.device("cpu"), rows=3)


def score_alone(folder: str, text: str, **options) -> float:
    """Score one text at a time, as transformers documents it."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        return model(**tokenizer(text, return_tensors="pt", **options)).logits.item()


def make_tokenizer(names: Sequence[str] = (), **segments: str) -> transformers.PreTrainedTokenizerFast:
    """A tokenizer of characters with special tokens around each text.

    `names` are of inputs that it makes besides ids and masks.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *map(chr, range(32, 127)), "\n"]
    inner = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", **segments, special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_input_names=["input_ids", "attention_mask", *names],
    )


@pytest.fixture(scope="module")
def words() -> transformers.PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.mark.parametrize("family", REWARD_MODELS)
def test_without_a_template_prompt_and_answer_are_one_text(family, words, tmp_path):
    folder = save_reward_model(tmp_path, family, words, template=None, max_position_embeddings=100)
    scores = scorer_of(folder)(PROMPTS, ANSWERS)

    texts = [prompt.text + answer.text for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)]
    assert scores == nearly([score_alone(folder, text) for text in texts])
    assert len({round(score, 4) for score in scores}) == len(scores)


@pytest.mark.parametrize("padding", [None, 5])
def test_a_text_ends_with_eos_if_the_answer_did(padding, tokenizer, tmp_path):
    """TRL trains reward models on text in this way."""
    folder = save_reward_model(tmp_path, "llama", tokenizer, template=None, pad_token_id=padding)
    answers = [answer._replace(ended=i % 2 == 0) for i, answer in enumerate(ANSWERS)]
    texts = [prompt.text + answer.text for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)]
    expected = [
        score_alone(folder, text + "<|endoftext|>" * answer.ended) for text, answer in zip(texts, answers, strict=True)
    ]
    scorer = scorer_of(folder)
    assert scorer(PROMPTS, answers) == nearly(expected)
    assert scorer.notes == ["the reward model gets prompt and answer in the form text_eos (docs/online.md)"]
    plain = [score_alone(folder, text) for text in texts]
    assert scorer_of(folder, reward_format="text")(PROMPTS, answers) == nearly(plain)


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_a_tokenizer_with_a_separator_gives_two_segments(family, tmp_path):
    """With types that tell them apart, if the model has any."""
    has_types = family == "bert"
    segments = make_tokenizer(["token_type_ids"] * has_types, pair="[CLS] $A [SEP] $B:1 [SEP]:1")
    folder = save_reward_model(tmp_path, family, segments, template=None, max_position_embeddings=100)
    scores = scorer_of(folder)(PROMPTS, ANSWERS)

    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    for prompt, answer, score in zip(PROMPTS, ANSWERS, scores, strict=True):
        inputs = segments(prompt.text, answer.text, return_tensors="pt")
        if has_types and answer.text:  # transformers makes one segment if the other is empty
            assert {0, 1} == set(inputs["token_type_ids"][0].tolist())
        with torch.no_grad():
            assert score == nearly(model(**inputs).logits.item())
    assert scores != pytest.approx(scorer_of(folder, reward_format="text")(PROMPTS, ANSWERS), rel=1e-3)


@pytest.mark.parametrize(
    ("wanted", "said"),
    [("chat", "chat template rejects the prompt 'Hello'"), ("pair", "puts no separator between texts")],
)
def test_a_format_that_the_tokenizer_lacks_is_refused(wanted, said, tokenizer, tmp_path):
    folder = save_reward_model(tmp_path, "llama", tokenizer, template=None)
    with refused(said):
        scorer_of(folder, reward_format=wanted)


def test_no_row_is_so_long_that_it_changes_the_rope_of_all_rows(tokenizer, tmp_path):
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    folder = save_reward_model(tmp_path, "llama", tokenizer, max_position_embeddings=16, rope_parameters=rope)
    assert scorer_of(folder, most=9).score.limit == 16


@pytest.mark.parametrize("padding", [None, 0, 7])  # none at all; what also ends turns; another
def test_with_a_template_prompt_and_answer_are_messages(padding, tokenizer, tmp_path):
    folder = save_reward_model(tmp_path, "llama", tokenizer, pad_token_id=padding)
    prompts = (*PROMPTS, CHAT)
    scores = scorer_of(folder)(prompts, (*ANSWERS, Answer(" Hi!\n", (), True)))

    end = "<|endoftext|>"
    said = [text.strip() for text in TEXTS]
    texts = [f"<user>Good morning.{end}<assistant>{text}{end}" for text in said]
    texts += [f"<user>Once{end}<assistant>{text}{end}" for text in said]
    texts += [f"<system>Be kind.{end}<user>Hello{end}<assistant>Hi!{end}"]
    expected = [score_alone(folder, text, add_special_tokens=False) for text in texts]
    assert scores == nearly(expected)


@pytest.mark.parametrize(
    ("form", "messages", "texts"),
    [
        ("text", MESSAGES, ["Be kind.\n\nHuman: Hello\n\nAssistant: Hi!"]),
        ("text_eos", MESSAGES[1:], ["\n\nHuman: Hello\n\nAssistant: Hi![EOS]"]),
        ("pair", MESSAGES[1:], ["Hello", "Hi!"]),
        ("pair", MESSAGES, ["Be kind.\n\nHuman: Hello\n\nAssistant:", "Hi!"]),
        ("text", [*MESSAGES[1:], assistant("H")], ["\n\nHuman: Hello\n\nAssistant: HHi!"]),
        ("pair", None, ["[BOS]Hello", "Hi!"]),
    ],
)
def test_without_a_template_a_chat_is_written_without_the_policys_tokens_or_a_second_bos(
    form, messages, texts, tmp_path
):
    tokenizer = make_tokenizer(pair="[CLS] $A [SEP] $B:1 [SEP]:1")
    tokenizer.bos_token, tokenizer.eos_token = "[CLS]", "[SEP]"
    folder = save_reward_model(tmp_path, "bert", tokenizer, template=None, max_position_embeddings=100)
    scorer = scorer_of(folder, most=60, reward_format=form)
    text = "[CLS]Hello" if messages is None else "[CLS]<system>Be kind.<user>Hello<assistant>"
    prompt = Prompt(text, [], [], rendered=messages is not None, messages=messages)
    read = scorer.score.encode(prompt, Answer("Hi![SEP]" if messages else "Hi!", (), ended=True))["input_ids"]
    expected = [each.replace("[EOS]", "").replace("[BOS]", "") for each in texts]
    assert read == tokenizer(*expected)["input_ids"]
    assert [read.count(2), read.count(3)] == [1, len(texts)]


def test_calls_and_results_have_no_place_in_texts(tokenizer, tmp_path):
    folder = save_reward_model(tmp_path, "llama", tokenizer, template=None)
    chat = [*MESSAGES, tool("42")]
    with refused("no turn of role 'tool' and no calls: choose the form chat"):
        scorer_of(folder).check(Prompt("<tool>42", [], [], rendered=True, messages=chat))


def test_a_model_of_ours_reads_the_end_token_with_which_a_chat_ends(tokenizer, tmp_path):
    folder = save_reward_model(tmp_path, "llama", tokenizer)
    change_json(Path(folder, "config.json"), reward_format="policy")
    score, answer = scorer_of(folder).score, Answer("Hi", (7, 9), True)
    assert [score.encode(prompt, answer)["input_ids"][-1] for prompt in (CHAT, DIALOGUE)] == [9, 0]
    assert score.encode(CHAT, Answer("Hi", (), True))["input_ids"][-1] == 0


@pytest.mark.parametrize("family", ["gpt2", "roberta"])
def test_the_end_of_a_text_that_is_too_long_is_scored(family, words, tmp_path):
    before = {"gpt2": 0, "roberta": 1}[family]  # its positions begin after that of padding
    folder = save_reward_model(tmp_path, family, words, template=None, max_position_embeddings=40 + before)
    scorer = scorer_of(folder, most=36)

    long = Prompt("x" * 100, [], [])
    [score] = scorer([long], [Answer("y" * 30, (), False)])
    assert score == pytest.approx(score_alone(folder, "x" * 8 + "y" * 30), rel=1e-4)  # 38, [CLS] and [SEP]
    assert [note.partition("; ")[2] for one in (scorer, scorer_of(folder, most=8)) for note in one.notes] == [
        "of texts with more than 40 tokens it sees the end", ""
    ]  # fmt: skip


def test_a_model_that_is_no_reward_model_is_refused(tokenizer, tmp_path):
    """The check before a run, which reads no weights, refuses it too."""
    two = save_reward_model(tmp_path / "two", "bert", tokenizer, num_labels=2)
    headless = save_reward_model(tmp_path / "headless", "llama", tokenizer)
    transformers.AutoModelForCausalLM.from_pretrained(TINY).save_pretrained(headless)
    labels = {"num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    change_json(Path(headless, "config.json"), **labels)
    odd = save_reward_model(tmp_path / "odd", "llama", tokenizer, template="{{ raise_exception('no, never') }}")
    said_of = {
        two: r"is a BertForSequenceClassification with 2 outputs \(num_labels\): use a sequence",
        str(TINY): r"is a LlamaForCausalLM with 2 outputs",
        headless: r"has no weights for score\.weight: use a sequence",
        odd: "its tokenizer's chat template rejects the prompt 'Hello': no, never",
    }
    for load in (scorer_of, lambda folder: load_scorer(plan_of(folder), "meta", rows=1)):
        for folder, said in said_of.items():
            with refused(rf"^online\.reward_model={folder}:? {said}"):
                load(folder)
        with refused(r"nowhere does not exist$"):
            load(str(tmp_path / "nowhere"))


def test_other_weights_another_template_and_another_vocabulary_have_another_digest(tokenizer, tmp_path):
    digests = [
        scorer_of(save_reward_model(tmp_path / name, "llama", tokenizer, **changes)).digest
        for name, changes in {"a": {}, "same": {}, "scaled": {"rms_norm_eps": 1e-3}, "bare": {"template": None}}.items()
    ]
    file = tmp_path / "same" / "model.safetensors"
    [*head, last] = file.read_bytes()
    file.write_bytes(bytes([*head, last ^ 1]))
    digests.append(scorer_of(str(tmp_path / "same")).digest)
    assert digests[0] == digests[1]
    assert len({*digests}) == 4
