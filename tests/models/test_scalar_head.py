"""A reward model: its rewards are those of transformers, and its updates those of TRL."""

from pathlib import Path

import peft
import pytest
import torch
import transformers
from support.models import FAMILIES, list_examples, nearly
from support.pytests import refused, slow
from support.runs import GOLDEN, TINY, read_json, run_card
from support.trainers import compose, make

from dpo.analysis.ledger import read_ledger
from dpo.checkpoint.files import read_state
from dpo.data.examples import Example, encode_examples, text_digest
from dpo.data.loading import load_splits
from dpo.data.schema import Prompt
from dpo.models.answers import Answer
from dpo.models.export import export
from dpo.models.layouts import Padded, SharedPrefix, choose_layout
from dpo.models.logprobs import HEAD_WEIGHT, install_scalar_head
from dpo.models.paths import ModelPath
from dpo.models.pretrained import disable_dropout, load_model
from dpo.models.scoring import load_scorer
from dpo.settings.plan import resolve

LORA = ("lora=lora", "lora.r=4", "lora.alpha=8", "lr=1e-2")


def build(family: str):
    """A small reward model."""
    config = FAMILIES[family]()
    config.num_labels, config.pad_token_id = 1, None
    torch.manual_seed(0)
    model = transformers.AutoModelForSequenceClassification.from_config(config, attn_implementation="eager")
    disable_dropout(model)
    install_scalar_head(model)
    return model.eval()


@pytest.mark.parametrize("family", ["llama", "gpt2, tied", "gemma2"])
def test_each_response_gets_the_reward_of_its_text_alone(family):
    model, examples = build(family), [*list_examples(6, shared=True), Example((), ((9,), (5, 6, 9)))]
    examples[1] = examples[1]._replace(cuts=((0, 1), (1, 2)))  # which no reward depends on
    texts = [[torch.tensor([[*e.prompt, *e.responses[side]]]) for e in examples] for side in (0, 1)]
    alone = [[model(ids).logits.item() for ids in one_side] for one_side in texts]
    packed, why = choose_layout("shared_prefix", model, max_length=40, compute_dtype=torch.float32)
    assert isinstance(packed, SharedPrefix), why
    for layout in (Padded(gives_rewards=True), Padded(masked=False, gives_rewards=True), packed):
        [microbatch] = layout.split(examples, 1)
        rewards = layout.forward(model, microbatch.inputs).logps
        assert rewards.shape == (2, 7, 1)
        torch.testing.assert_close(rewards.squeeze(2), torch.tensor(alone), rtol=1e-5, atol=1e-5)


def test_a_model_without_such_a_head_is_refused(tiny_llama, tmp_path):
    with refused(r"LlamaForCausalLM is not a sequence classification model .* loss=bradley_terry needs"):
        make(compose(tmp_path, "run", "loss=bradley_terry"), policy=tiny_llama)


# --- TRL: benchmarks/trl_reward.py made the numbers -------------------------------------------------------------------

TRL = read_json(GOLDEN / "trl_reward.json")


@pytest.mark.parametrize("layout", ["shared_prefix", slow("padded")])
@pytest.mark.parametrize("case", TRL["losses"])
def test_the_loss_of_every_update_is_that_of_trl(case, layout, tmp_path):
    policy = load_model(ModelPath(str(TINY), scalar_head=True), dtype=torch.float32)
    with torch.no_grad():
        policy.score.weight.copy_(torch.tensor([TRL["head"]]))
    centering = TRL["centering"] if case == "centering" else 0
    settings = (f"loss.centering={centering}", f"lr={TRL['lr']}", "max_grad_norm=inf", f"layout={layout}")
    trainer = make(compose(tmp_path, "run", "loss=bradley_terry", *settings), policy=policy)
    lengths = {"max_length": 160, "max_prompt_length": 80}

    found, size = [], TRL["batch_size"]
    for start in range(0, len(TRL["rows"]), size):
        examples = []
        for row in TRL["rows"][start : start + size]:
            pair = Prompt(
                row["prompt"], [row["chosen"], row["rejected"]], [{"chosen": 0, "rejected": 1}], "keep_end", False
            )
            examples += encode_examples([(pair, 0)], trainer.data.encode, **lengths)
        if case == "margin":
            margins = [TRL["margins"][i % 3] for i in range(start, start + size)]
            examples = [example._replace(margin=margin) for example, margin in zip(examples, margins, strict=True)]
        batch = trainer.batches.lay_out(examples, 1)
        found.append(trainer.train_step(batch).metrics["loss/train"])
    assert found == pytest.approx(TRL["losses"][case], rel=1e-4, abs=1e-4)
    assert max(found) - min(found) > 0.1  # it has moved


# --- what a run writes ------------------------------------------------------------------------------------------------


def score_as_anyone_would(model, folder: Path, texts: list[str]) -> list[float]:
    """All at once, padded by the tokenizer of `folder`."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(texts, padding=len(texts) > 1, return_tensors="pt")
    with torch.no_grad():
        return model.eval()(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])[0][:, 0].tolist()


def list_evaluated(run_dir: Path, rows: Path) -> tuple[list[Prompt], list[Answer], list[float]]:
    """The held-out pairs, and their last rewards by the ledger."""
    ledger = [row for row in read_ledger(run_dir).to_pylist() if row["split"] == "eval" and row["update"] == 6]
    rewards = {row["example"]: row for row in ledger}
    prompts, answers, found = [], [], []
    _, held_out = load_splits("hh", None, {"hh": str(rows / "hh")})
    for prompt in held_out.values():
        for pair in prompt.examples:
            texts = {side: prompt.responses[i] for side, i in pair.items()}
            scored = rewards.get(text_digest(prompt.text, texts))
            for side, text in texts.items() if scored else ():
                prompts.append(prompt)
                answers.append(Answer(text, (), True))
                found.append(scored[f"policy_{side}"])
    assert len(found) == 8
    return prompts, answers, found


SHOWN = "\n\nHuman: Hello\n\nAssistant: Hi!<|endoftext|>"  # in the card of a reward model


@pytest.mark.parametrize("with_adapter", [False, slow(True)], ids=["whole", "adapter"])
def test_what_is_exported_gives_the_rewards_of_the_run(with_adapter, finished, rows, tmp_path):
    run_dir = finished("loss=bradley_terry", "ledger=true", *(LORA if with_adapter else ()))
    prompts, answers, rewards = list_evaluated(run_dir, rows)
    texts = [f"{prompt.text}{answer.text}<|endoftext|>" for prompt, answer in zip(prompts, answers, strict=True)]
    model_class = transformers.AutoModelForSequenceClassification
    if with_adapter:
        adapter = export(run_dir, tmp_path / "adapter")
        base = model_class.from_pretrained(str(TINY), num_labels=1, dtype=torch.float32)
        model = peft.PeftModel.from_pretrained(base, adapter)
        tokenizer = transformers.AutoTokenizer.from_pretrained(adapter)
        assert tokenizer.pad_token is None  # no token can pad, and the base has no embedding for another
        model.config.pad_token_id = None  # the base's is EOS
        one_by_one = [score_as_anyone_would(model, adapter, [text])[0] for text in texts]
        assert one_by_one == nearly(rewards)
        shown = score_as_anyone_would(model, adapter, [SHOWN])
        assert run_card(adapter)["reward"] == pytest.approx(shown[0], rel=1e-4)

    out = export(run_dir, tmp_path / "whole", merge=with_adapter)
    model, loading = model_class.from_pretrained(out, output_loading_info=True)
    assert not any(loading.values())
    assert model.config.pad_token_id != model.config.eos_token_id
    assert score_as_anyone_would(model, out, texts) == nearly(rewards)
    shown = score_as_anyone_would(model, out, [SHOWN])
    assert run_card(out)["reward"] == pytest.approx(shown[0], rel=1e-4)

    online = ("online=online", "online.scorer=reward_model", f"online.reward_model={out}")
    plan = resolve(compose(tmp_path, "online", *online, "online.max_new_tokens=8"))
    scorer = load_scorer(plan, torch.device("cpu"), rows=3)
    assert scorer(prompts, answers) == nearly(rewards)
    cut_off = scorer(prompts, [answer._replace(ended=False) for answer in answers])
    assert cut_off != pytest.approx(rewards, rel=1e-3)


def test_the_body_of_a_policy_is_kept_and_the_head_is_drawn_from_the_seed(tiny_llama, tmp_path):
    with torch.no_grad():
        tiny_llama.model.norm.weight.add_(1)
    body, archive = tiny_llama.state_dict(), tmp_path / "policy.pt"
    torch.save({"step_idx": 0, "state": body, "metrics": {}}, archive)

    def load(seed: int, file: Path | None = archive) -> dict[str, torch.Tensor]:
        source = ModelPath(str(TINY), file, scalar_head=True, seed=seed)
        return load_model(source, dtype=torch.float32).state_dict()

    one, again, other, without = load(0), load(0), load(1), load(0, None)
    assert one.keys() == without.keys() == body.keys() - {"lm_head.weight"} | {HEAD_WEIGHT}
    assert all(torch.equal(one[name], body[name]) for name in body.keys() & one.keys())
    same = [torch.equal(one[HEAD_WEIGHT], state[HEAD_WEIGHT]) for state in (again, without, other)]
    assert same == [True, True, False]
    torch.save({"step_idx": 0, "state": other, "metrics": {}}, archive)  # of a reward model, whose head is kept
    assert torch.equal(load(0)[HEAD_WEIGHT], other[HEAD_WEIGHT])


@pytest.mark.slow
def test_an_adapter_of_a_policy_goes_on_with_a_new_head(finished, run, run_dir):
    sft = finished("loss=sft", *LORA)
    run("run", "loss=bradley_terry", *LORA, f"model.archive={sft}", "n_examples=4", "lr=1e-30")
    policy, reward = (read_state(folder / "LATEST" / "policy.pt") for folder in (sft, run_dir))
    [head] = reward.keys() - policy.keys()
    assert head.endswith(HEAD_WEIGHT)
    assert all(torch.equal(reward[name], tensor) for name, tensor in policy.items())
