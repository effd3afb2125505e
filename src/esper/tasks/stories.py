"""`stories`: predict the next character of stories that a small grammar of ours writes.

Each story is about one child, one thing and one place, named at the start and again later: a model gets the easy
characters from the spelling, and the names only by looking back over tens of characters.
"""

from __future__ import annotations

import random

from esper.tasks.registry import Task, task
from esper.tasks.text import language_task

COUNT = 3_000
PEOPLE = {
    "she": ("Ada", "Bea", "Cleo", "Dora", "Edith", "Flora", "Greta", "Hilda", "Iris", "Juno"),
    "he": ("Abel", "Boris", "Cyril", "Dan", "Emil", "Felix", "Gus", "Hugo", "Ivan", "Jonas"),
}
HIS_OR_HER = {"she": "her", "he": "his"}
COLOURS = ("red", "blue", "green", "yellow", "white", "black", "golden", "striped")
THINGS = ("ball", "kite", "drum", "boat", "lamp", "book", "scarf", "bell", "basket", "spoon", "violin", "puzzle")
PLACES = ("garden", "kitchen", "forest", "market", "harbour", "attic", "meadow", "school", "mill", "orchard")
ANIMALS = ("dog", "cat", "goat", "crow", "fox", "hen", "mouse", "pony", "owl", "frog")

OPENINGS = (
    "{name} had a {colour} {thing}.",
    "One day {name} found a {colour} {thing} in the {place}.",
    "There was once a {colour} {thing}, and it belonged to {name}.",
    "Every morning {name} took a {colour} {thing} to the {place}.",
)
MIDDLES = (
    "A {animal} came by and looked at the {thing}.",
    "{They} showed the {thing} to {friend}.",
    "{friend} asked if the {thing} was {their} own.",
    "In the {place} {they} met a hungry {animal}.",
    "The {animal} ran off with the {thing}!",
    '"Is that {thing} yours?" asked {friend}.',
    "{They} hid {their} {thing} from the {animal}.",
    "{friend} and {name} went to the {place} together.",
    "It rained, and the {colour} {thing} got wet.",
    '"I like {colour} things," said the {animal}.',
)
ENDINGS = (
    "So {name} kept the {colour} {thing} for ever.",
    "At last {they} gave the {thing} to {friend}.",
    "And the {animal} slept beside the {colour} {thing}.",
    "Then {name} and {friend} went home from the {place}.",
)


def write_story(rng: random.Random) -> str:
    """One story: an opening, two to four middles, an ending, all about the same names and things."""
    they = rng.choice(tuple(PEOPLE))
    name = rng.choice(PEOPLE[they])
    words = {
        "name": name,
        "friend": rng.choice([other for names in PEOPLE.values() for other in names if other != name]),
        "they": they,
        "They": they.capitalize(),
        "their": HIS_OR_HER[they],
        "colour": rng.choice(COLOURS),
        "thing": rng.choice(THINGS),
        "place": rng.choice(PLACES),
        "animal": rng.choice(ANIMALS),
    }
    sentences = [rng.choice(OPENINGS), *rng.sample(MIDDLES, rng.randint(2, 4)), rng.choice(ENDINGS)]
    return " ".join(sentences).format_map(words)


def write_stories(count: int, seed: int) -> str:
    rng = random.Random(seed)
    return "\n".join(write_story(rng) for _ in range(count)) + "\n"


@task("stories")
def stories(seed: int, *, context: int = 64, width: int = 16, heads: int = 2, layers: int = 2) -> Task:
    """The next character of stories from a small grammar, transformer host."""
    sizes = {"context": context, "width": width, "heads": heads, "layers": layers}
    source = "the generated text"
    description = "the next character of stories written by a small grammar"
    return language_task("stories", description, write_stories(COUNT, seed), seed, source, sizes)
