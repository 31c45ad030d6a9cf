"""Language models in `experiments.hh` and `experiments.sentiment`: adapters, samples and KL."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dpo.models.adapters import switch
from dpo.models.answers import Answer, Sampling, Tokens
from dpo.models.logprobs import logit_scale
from dpo.models.pretrained import load_model
from dpo.models.side_by_side import REFERENCE, Choices, Side, load_panel
from experiments.runs import CONTINUE, QUIET

# the base in float32, its forward passes in bfloat16
ADAPTER = ("lora=lora", "lora.r=8", "lora.alpha=16", "model.autocast=bfloat16", "warmup_steps=5")
SAMPLED_AT_ONCE, SCORED_AT_ONCE = 64, 8


def list_overrides(model: Path, root: Path) -> tuple[str, ...]:
    """List the overrides that all runs from this model have in common."""
    return (*QUIET, *ADAPTER, CONTINUE, f"model.name_or_path={model}", f"local_dirs=[{root / 'cache'}]")


def load_reference(model: Path) -> Side:
    """Load the model from which all runs start, in float32."""
    loaded = load_model(str(model), dtype=torch.float32, attn_implementation="sdpa").eval()
    return Side(REFERENCE, loaded, beta=None, autocast=None)


def load_policy(checkpoint: Path) -> tuple[Side, Side]:
    """Load a run's policy and its reference, in float32, on one base."""
    panel = load_panel([checkpoint], Choices(), log=lambda text: None)
    assert panel.reference is not None
    return panel.policies[0], panel.reference


def sample(
    side: Side, tokenizer: Any, prompts: Sequence[Tokens], sampling: Sampling, *, n_samples: int = 1, first: int = 0
) -> list[list[Answer]]:
    """Sample answers to each prompt.

    The random numbers of answer k to prompt i depend on (first + i, k) alone, so all policies get the same.
    """
    # (prompt, number of the answer) for each answer; the number determines the random numbers
    requests = [(prompt, (first + i) * n_samples + k) for i, prompt in enumerate(prompts) for k in range(n_samples)]
    requests.sort(key=lambda request: len(request[0]))  # prompts of a batch need little padding
    answers: dict[int, Answer] = {}  # by number
    for start in range(0, len(requests), SAMPLED_AT_ONCE):
        batch_prompts, numbers = zip(*requests[start : start + SAMPLED_AT_ONCE], strict=True)
        answers |= zip(numbers, side.answer(tokenizer, batch_prompts, numbers, sampling), strict=True)
    in_order = [answers[number] for number in sorted(answers)]
    return [in_order[start : start + n_samples] for start in range(0, len(in_order), n_samples)]


@torch.no_grad()
def sum_kls(policy: Side, reference: Side, prompts: Sequence[Tokens], answers: Sequence[Answer]) -> list[float]:
    """Estimate KL(policy || reference) from each answer of the policy.

    An estimate is the sum, over the answer's tokens, of the KL between the two models' distributions of the token given
    the tokens before (Rao-Blackwell; arXiv 2504.10637). `benchmarks.preference_scores.divergence` does it for one.
    """
    kls: list[float] = []
    texts = [(prompt, answer.tokens) for prompt, answer in zip(prompts, answers, strict=True)]
    for start in range(0, len(texts), SCORED_AT_ONCE):
        batch = texts[start : start + SCORED_AT_ONCE]
        # padding on the right, where causal attention does not look
        rows = [torch.tensor([*prompt, *tokens]) for prompt, tokens in batch]
        input_ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)  # (B, T)
        hidden = []  # of the policy and the reference, (B, T, H)
        for side in (policy, reference):
            with switch(side.model, side.adapter)():
                hidden.append(side.model.base_model(input_ids, use_cache=False).last_hidden_state)
        for row, (prompt, tokens) in enumerate(batch):
            predicting = slice(len(prompt) - 1, len(prompt) + len(tokens) - 1)  # places before the answer's tokens
            logps = find_logps(policy, hidden[0][row, predicting])  # (N, V)
            reference_logps = find_logps(reference, hidden[1][row, predicting])
            kls.append(float((logps.exp() * (logps - reference_logps)).sum()))
    return kls


def find_logps(side: Side, hidden: torch.Tensor) -> torch.Tensor:
    """Compute log-probabilities of the vocabulary, (N, V), from hidden states (N, H)."""
    with switch(side.model, side.adapter)():  # the head may be adapted
        logits = side.model.get_output_embeddings()(hidden)
    return logit_scale(side.model.config)(logits).float().log_softmax(-1)
