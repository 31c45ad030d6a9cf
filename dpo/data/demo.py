"""`datasets=[demo]`: small made-up dialogues in HH's format, the same on every machine.

Someone asks where a thing is. The better answer is courteous, the worse one curt. Both name the thing and the place,
and are composed of many phrases of similar length, so that no constant string tells them apart. The SFT target is
either of the two with equal probability: SFT teaches both manners, and DPO then has to prefer one.
"""

from __future__ import annotations

import random

from dpo.data.schema import PreferenceData

N_PROMPTS = {"train": 2048, "test": 128}

THINGS = (
    "red umbrella", "old map", "silver spoon", "garden key", "blue notebook", "wooden chess board", "winter coat",
    "bicycle pump", "tea kettle", "paint brush", "torch", "leather suitcase", "music box", "toolbox", "picnic basket",
    "camera", "chalk", "ladder", "sewing kit", "telescope", "big dictionary", "watering can", "violin", "hammer",
    "lantern", "rain boots", "fishing rod", "sketch book", "clock", "guitar",
)  # fmt: skip
PLACES = (
    "in the kitchen", "under the stairs", "on the top shelf", "behind the door", "in the garden shed", "by the window",
    "next to the piano", "in the attic", "beside the fireplace", "in the hall", "near the back gate", "on the desk",
)  # fmt: skip
QUESTIONS = (
    "Where is the {thing}?", "Have you seen the {thing}?", "I am looking for the {thing}.",
    "Could you tell me where the {thing} is?", "Do you know where we keep the {thing}?", "I need the {thing} today.",
    "Who moved the {thing}?", "Is the {thing} still here?",
)  # fmt: skip
SMALL_TALK = (
    ("Good morning.", "Good morning."), ("Hello there.", "Hello."), ("What a day.", "It is indeed."),
    ("I have a question.", "Go ahead."), ("It is raining again.", "So it is."), ("Are you busy?", "Not right now."),
)  # fmt: skip
BODIES = (
    "The {thing} is {place}.", "You will find the {thing} {place}.", "I saw the {thing} {place} this morning.",
    "We keep the {thing} {place}.",
)  # fmt: skip
COURTEOUS = ("Certainly!", "Gladly!", "Sure!", "Absolutely!", "Welcome!", "Yes, with pleasure.", "Happy to help.")
CURT = ("Whatever!", "Again!", "Ugh!", "Seriously!", "Hurry!", "No, not now.", "Busy as always.")


def get_demo(split: str) -> PreferenceData:
    """The made-up dialogues of `train` (2,048 prompts) or `test` (128 others), one pair each."""
    rng = random.Random(0)
    prompts: dict[str, PreferenceData] = {name: PreferenceData(truncation_mode="keep_end") for name in N_PROMPTS}
    seen = set()
    for name, count in N_PROMPTS.items():
        while len(prompts[name]) < count:
            thing = rng.choice(THINGS)
            turns = rng.sample(SMALL_TALK, rng.randint(0, 2))
            prompt = "".join(f"\n\nHuman: {ask}\n\nAssistant: {answer}" for ask, answer in turns)
            prompt += f"\n\nHuman: {rng.choice(QUESTIONS).format(thing=thing)}\n\nAssistant:"
            better, worse = (_answer(rng, openings, thing) for openings in (COURTEOUS, CURT))
            if prompt in seen:
                continue
            seen.add(prompt)
            prompts[name].add_pair(prompt, better, worse)
            prompts[name][prompt]["sft_target"] = rng.choice([better, worse])
    return prompts[split]


def _answer(rng: random.Random, openings: tuple[str, ...], thing: str) -> str:
    body = rng.choice(BODIES).format(thing=thing, place=rng.choice(PLACES))
    return f" {rng.choice(openings)} {body}"
