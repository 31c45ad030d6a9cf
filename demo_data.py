"""`datasets=[demo]`: small made-up dialogues in HH's format, the same on every machine.

Somebody asks where a thing is. The better answer is courteous, the worse one curt; both are put together from many
phrases, name the thing, and overlap in length, so that neither a constant string nor length alone tells them apart.
The SFT target is either of the two, as likely: SFT teaches both manners, and DPO has something to choose from.
"""

from __future__ import annotations

import random

from preference_data import PreferenceData

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
COURTEOUS = (
    ("Of course!", "Happy to help.", "With pleasure.", "Good question!", "Thank you for asking.", "Certainly."),
    ("The {thing} is {place}.", "You will find the {thing} {place}.", "I saw the {thing} {place} this morning.",
     "We keep the {thing} {place}."),
    ("", "Let me know if you need anything else.", "I can bring it to you.", "Shall I show you?", "Enjoy your day!"),
)  # fmt: skip
CURT = (
    ("No idea.", "Not my problem.", "Again?", "Stop asking.", "What do I know?", "Leave me alone."),
    ("Find the {thing} yourself.", "Maybe the {thing} is {place}, maybe not.", "Who cares about the {thing}.",
     "Somebody threw the {thing} away."),
    ("", "And do not ask me twice.", "I am busy with other things.", "You always lose it.", "Go away now."),
)  # fmt: skip


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
            better, worse = (_answer(rng, manner, thing) for manner in (COURTEOUS, CURT))
            if prompt in seen:
                continue
            seen.add(prompt)
            prompts[name].add_pair(prompt, better, worse)
            prompts[name][prompt]["sft_target"] = rng.choice([better, worse])
    return prompts[split]


def _answer(rng: random.Random, manner: tuple[tuple[str, ...], ...], thing: str) -> str:
    phrases = [rng.choice(options) for options in manner]
    return "".join(f" {phrase}" for phrase in phrases if phrase).format(thing=thing, place=rng.choice(PLACES))
