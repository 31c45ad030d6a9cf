"""`datasets=[demo]`: small made-up dialogues in HH's format, the same on every machine.

The chosen answer is courteous, and the rejected one curt. The SFT target is courteous in two of five dialogues, so SFT
teaches both manners, and DPO has a preference to learn.
"""

import random

from dpo.data.published import Entries, add_responses

N_TRAIN = 6144  # prompts
N_TEST = 256
COURTEOUS_TARGETS = 0.4  # fraction of the SFT targets

THINGS = """\
red umbrella
old map
silver spoon
house key
blue notebook
wooden chess board
winter coat
bicycle pump
tea kettle
paint brush
torch
leather suitcase
music box
toolbox
picnic basket
camera
chalk
ladder
sewing kit
telescope
big dictionary
watering can
violin
hammer
lantern
raincoat
fishing rod
sketch book
clock
guitar
""".splitlines()
PLACES = """\
in the kitchen
under the stairs
on the top shelf
behind the door
in the garden shed
by the window
next to the piano
in the attic
beside the fireplace
in the hall
near the back gate
on the desk
""".splitlines()
QUESTIONS = """\
Where is the {thing}?
Have you seen the {thing}?
I am looking for the {thing}.
Could you tell me where the {thing} is?
Do you know where we keep the {thing}?
I need the {thing} today.
Who moved the {thing}?
Is the {thing} still here?
""".splitlines()
SMALL_TALK = (
    ("Good morning.", "Good morning."),
    ("Hello there.", "Hello."),
    ("What a day.", "It is indeed."),
    ("I have a question.", "Go ahead."),
    ("It is raining again.", "So it is."),
    ("Are you busy?", "Not right now."),
)
BODIES = """\
The {thing} is {place}.
You will find the {thing} {place}.
I saw the {thing} {place} this morning.
We keep the {thing} {place}.
""".splitlines()
COURTEOUS = ("Certainly!", "Gladly!", "Sure!", "Absolutely!", "Welcome!", "Yes, with pleasure.", "Happy to help.")
CURT = ("Whatever!", "Again!", "Ugh!", "Seriously!", "Hurry!", "No, not now.", "Busy as always.")


def make_demo(split: str) -> Entries:
    """Make up a split."""
    rng = random.Random(0)
    entries: Entries = {}
    while len(entries) < N_TRAIN + N_TEST:  # both splits are made, so that no test prompt is in train
        thing = rng.choice(THINGS)
        turns = rng.sample(SMALL_TALK, rng.randint(0, 2))
        prompt = "".join(f"\n\nHuman: {ask}\n\nAssistant: {answer}" for ask, answer in turns)
        prompt += f"\n\nHuman: {rng.choice(QUESTIONS).format(thing=thing)}\n\nAssistant:"
        answers = []
        for openings in (COURTEOUS, CURT):
            body = rng.choice(BODIES)
            place = rng.choice(PLACES)
            answers.append(f" {rng.choice(openings)} {body.format(thing=thing, place=place)}")
        if prompt not in entries:
            is_courteous = rng.random() < COURTEOUS_TARGETS
            add_responses(entries, prompt, answers)["sft_target"] = answers[0 if is_courteous else 1]
    pairs = list(entries.items())
    return dict(pairs[:N_TRAIN] if split == "train" else pairs[N_TRAIN:])
