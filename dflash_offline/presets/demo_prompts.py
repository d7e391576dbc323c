"""Write the prompts of the demo's conversations: short tasks whose answers are regular.

Run it, then let the target answer (`docs/demo-data.md` tells the whole way):

    python dflash_offline/presets/demo_prompts.py > demo_prompts.jsonl

Everything is written here, from a seed; no text is taken from a data set.
"""

import json
import random
from collections.abc import Callable

NUM_PROMPTS = 2400
SEED = 20261129

NOUNS = (
    "Apple Book Camera Desk Engine Flower Garden House Island Jacket Kettle Lamp Mirror Notebook "
    "Order Piano Queue River Student Table Umbrella Vehicle Window Account Bottle Customer Device "
    "Employee Forest Guitar Hotel Invoice Journal Kitchen Library Movie Network Office Product "
    "Recipe Sensor Ticket User Village Wallet Yacht Zebra Bridge Course"
).split()
FIELDS = (
    "name age color size price weight height title author year city country email phone status "
    "score level speed width length owner brand model type category date code rating amount"
).split()
NAMES = (
    "Anna Ben Clara David Emma Frank Grace Henry Iris Jack Kate Liam Mia Noah Olivia Paul Rosa Sam "
    "Tina Victor Wendy Yusuf Zoe"
).split()
CITIES = "London Paris Berlin Madrid Rome Vienna Oslo Dublin Lisbon Athens Prague Warsaw".split()
WORDS = "red blue green sun moon star cat dog bird tree leaf rain snow wind fire stone".split()


def count(rng: random.Random) -> str:
    """Counting up by one."""
    start = rng.randint(1, 60)
    return f"Count from {start} to {start + rng.randint(12, 30)}, separated by commas."


def count_by(rng: random.Random) -> str:
    """Counting up by a step."""
    step = rng.choice([2, 3, 4, 5, 10])
    start = step * rng.randint(1, 20)
    return f"Count by {step}s from {start} to {start + step * rng.randint(10, 18)}."


def table(rng: random.Random) -> str:
    """A multiplication table."""
    factor = rng.randint(2, 25)
    return f"Write the multiplication table of {factor} from {factor} x 1 to {factor} x 12."


def addition_list(rng: random.Random) -> str:
    """A list of sums."""
    number = rng.randint(2, 90)
    return f"Write the sums {number} + 1, {number} + 2 and so on up to {number} + 12, one per line."


def python_class(rng: random.Random) -> str:
    """A class skeleton."""
    noun, fields = rng.choice(NOUNS), rng.sample(FIELDS, rng.randint(3, 5))
    return f"Write a Python class {noun} with the attributes {', '.join(fields)}. Only code."


def getters(rng: random.Random) -> str:
    """Getter functions."""
    noun, fields = rng.choice(NOUNS), rng.sample(FIELDS, 3)
    return f"Write Python getter methods of a class {noun} for {', '.join(fields)}. Only code."


def json_record(rng: random.Random) -> str:
    """A JSON record."""
    fields = rng.sample(FIELDS, rng.randint(3, 5))
    return f"Write a JSON list of three records with the keys {', '.join(fields)}. Only JSON."


def repeat(rng: random.Random) -> str:
    """A word repeated."""
    return f"Write the words {' '.join(rng.sample(WORDS, 2))} ten times, one pair per line."


def markdown_table(rng: random.Random) -> str:
    """A Markdown table."""
    people = ", ".join(rng.sample(NAMES, 4))
    return f"Make a Markdown table with the columns name, age and city for {people}."


def sentences(rng: random.Random) -> str:
    """The same sentence with other names."""
    names, city = rng.sample(NAMES, 5), rng.choice(CITIES)
    return f'For each of {", ".join(names)} write the line "NAME lives in {city}."'


TASKS: tuple[Callable[[random.Random], str], ...] = (
    count,
    count_by,
    table,
    addition_list,
    python_class,
    getters,
    json_record,
    repeat,
    markdown_table,
    sentences,
)


def prompts(num_prompts: int, *, seed: int) -> list[str]:
    """Different prompts, the kinds of task in turn.

    Args:
        num_prompts: How many.
        seed: Seed of every choice.
    """
    rng = random.Random(seed)
    found: dict[str, None] = {}
    turn = 0
    while len(found) < num_prompts:
        found[TASKS[turn % len(TASKS)](rng)] = None
        turn += 1
    return list(found)


def main() -> None:
    """Prints one JSON line a prompt."""
    for index, prompt in enumerate(prompts(NUM_PROMPTS, seed=SEED)):
        message = {"role": "user", "content": prompt}
        print(json.dumps({"id": f"demo-{index:05d}", "messages": [message]}))


if __name__ == "__main__":
    main()
