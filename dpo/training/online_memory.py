"""Memory for drawing online pairs: batch sizes of sampling and scoring, and their peaks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dpo.data.examples import list_examples
from dpo.data.preflight import TrainingData
from dpo.models.answers import Sampling, choosing
from dpo.models.generation import attention_of_generation
from dpo.models.pretrained import DTYPES
from dpo.models.reward_model import RewardModel
from dpo.settings.plan import Plan
from dpo.training.batches import Batch, Batches
from dpo.training.memory_tracker import MemoryTracker, on_device
from dpo.training.online import encode_prompt, some_prompts


class Rounds(NamedTuple):
    """Sizes in which the answers of an update are sampled and scored."""

    answers: int  # number of answers of an update, on all processes
    batches: int  # number of batches that a process samples, each with one forward per token
    rows: int  # answers in a batch
    scored: int  # texts that a reward model scores at a time

    @classmethod
    def of(cls, plan: Plan) -> Rounds:
        n, prompts = plan.online.n_samples, plan.data.batch_size - plan.n_offline
        own = -(-prompts // plan.dims.data_size)
        at_once = max(1, plan.data.eval_batch_size // plan.dims.data_size)
        scored = min(at_once, -(-prompts * n // plan.dims.world_size))
        return cls(prompts * n, -(-own // at_once), min(own, at_once) * n, scored)

    def tell(self, plan: Plan) -> str:
        n_new = plan.online.max_new_tokens
        return (
            f"an update samples up to {self.answers * n_new:,} tokens, of {self.answers:,} answers, in "
            f"{self.batches * n_new:,} forwards of each process, of {self.rows:,} rows"
        )


class LongestAnswers(Batches):
    """The batches of an online run with the longest answers, `max_new_tokens`, and the longest pairs of the data."""

    def train(self, *, skip: int = 0) -> Iterator[Batch]:
        return self._iterate_train(self._longest, [1] * len(self.data.train), skip=skip)

    def _longest(self, places: Sequence[tuple[int, int]]) -> Batch:
        plan, prompts = self.plan, self.read_prompts(places)
        answers = tuple((token,) * plan.online.max_new_tokens for token in (0, 1))  # with no token in common
        examples = [encode_prompt(prompt, self.data, plan)._replace(responses=answers) for prompt in prompts]
        if n := plan.n_offline:
            pairs = [self.encode(list_examples(prompt)) for prompt in prompts]
            longest = [max(of_prompt, key=lambda pair: pair.n_tokens) for of_prompt in pairs]
            more = [pair.n_tokens - drawn.n_tokens for pair, drawn in zip(longest, examples, strict=True)]
            for place in sorted(range(len(prompts)), key=lambda place: -more[place])[:n]:
                examples[place] = longest[place]
        microbatches = self.split(examples, plan.data.gradient_accumulation_steps)
        return Batch(examples, [1.0] * len(examples), microbatches, numbers=())


def longest_prompt(plan: Plan, data: TrainingData) -> int:
    """Tokens of the longest training prompt, truncated as for answering; from a sample if there are many."""
    return max(len(encode_prompt(prompt, data, plan).prompt) for prompt in some_prompts(data))


def longest_text(reward: RewardModel, plan: Plan, data: TrainingData) -> int:
    """Tokens of the longest text that a reward model may see: a whole prompt and the longest answer."""
    longest = max(len(reward.encode(prompt, "")) for prompt in some_prompts(data)) + plan.online.max_new_tokens
    return longest if reward.limit is None else min(longest, reward.limit)


def peak_of_sampling(
    policy: Any, sampling: Sampling, fake: FakeTensorMode, *, rows: int, n_prompt: int, autocast: str | None
) -> Counter[str]:
    """The peak memory of sampling `rows` answers to prompts of `n_prompt` tokens.

    It is reached while the prompts are read, or at the last token. `policy` has fake tensors.
    """
    device, n_new, peaks = policy.device, sampling.max_new_tokens, []
    with (
        fake,
        torch.no_grad(),
        attention_of_generation(policy.eval()),
        torch.autocast(device.type, dtype=DTYPES.get(autocast), enabled=autocast is not None),
    ):
        choose = choosing(sampling, range(rows), n_prompt=n_prompt)

        def forward(n_tokens: int, n_before: int, cache: Any) -> Any:
            ids = torch.zeros(rows, n_tokens, dtype=torch.long, device=device)
            last = {"logits_to_keep": 1} if policy._supports_logits_to_keep() else {}
            out = policy(input_ids=ids, past_key_values=cache, use_cache=True, **last)
            seen = torch.zeros(rows, n_before + n_tokens, dtype=torch.long, device=device)
            choose(seen, out.logits[:, -1].to(copy=True, dtype=torch.float32)).argmax(-1)
            return out.past_key_values

        for n_before in (0, n_new - 1):
            tracker = MemoryTracker.of(policy)
            cache = None if n_before == 0 else forward(n_prompt + n_before - 2, 0, None)
            with tracker:
                if n_before == 0:
                    cache = forward(n_prompt, 0, None)
                else:  # the first of two forwards replaces the whole cache by a tracked one
                    for more in (2, 1):
                        cache = forward(1, n_prompt + n_before - more, cache)
            peaks.append(_with_cache(tracker.peak, cache))
            del cache
    return max(peaks, key=lambda peak: peak.total())


def _with_cache(peak: Counter[str], cache: Any) -> Counter[str]:
    """A peak with the keys and values of a cache counted separately."""
    pairs = [(layer.keys, layer.values) for layer in getattr(cache, "layers", ()) if hasattr(layer, "keys")]
    kv = sum(tensor.nbytes for pair in pairs for tensor in pair)
    return peak + Counter(kv_cache=kv) - Counter(activations=kv)


def peak_of_scoring(
    reward: RewardModel, rounds: Rounds, fake: FakeTensorMode, device: str, *, length: int
) -> Counter[str]:
    """The peak memory of a reward model's forward on texts of `length` tokens; the model has no weights."""
    with fake, torch.no_grad():
        model = on_device(reward.model, device, None)
        model.config.get_text_config().pad_token_id = 0
        ids = torch.ones(rounds.scored, length, dtype=torch.long, device=device)
        with MemoryTracker((*model.parameters(), *model.buffers())) as tracker:
            model(input_ids=ids)
    return tracker.peak
