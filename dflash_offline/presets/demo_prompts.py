"""Write the prompts of the demo's conversations: small pieces of code and records to write.

Run it, then let the target answer (`docs/demo-data.md` tells the whole way):

    python dflash_offline/presets/demo_prompts.py > demo_prompts.jsonl

Everything is written here, from a seed; no text is taken from a data set.
"""

import json
import random
from collections.abc import Callable

NUM_PROMPTS = 2000
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


def sql_table(noun: str, fields: str) -> str:
    """A table definition."""
    return f"Write an SQL table {noun} with the columns {fields}. Only code."


def c_struct(noun: str, fields: str) -> str:
    """A struct of C."""
    return f"Write a C struct {noun} with the fields {fields}. Only code."


def rust_struct(noun: str, fields: str) -> str:
    """A struct of Rust."""
    return f"Write a Rust struct {noun} with the fields {fields}. Only code."


def go_struct(noun: str, fields: str) -> str:
    """A struct of Go."""
    return f"Write a Go struct {noun} with the fields {fields}. Only code."


def typescript_interface(noun: str, fields: str) -> str:
    """An interface of TypeScript."""
    return f"Write a TypeScript interface {noun} with the fields {fields}. Only code."


def python_class(noun: str, fields: str) -> str:
    """A class of Python."""
    return f"Write a Python class {noun} with the attributes {fields}. Only code."


def java_class(noun: str, fields: str) -> str:
    """A class of Java."""
    return f"Write a Java class {noun} with the private fields {fields}. Only code."


def json_object(noun: str, fields: str) -> str:
    """A JSON object."""
    return f"Write a JSON object of a {noun} with the keys {fields}. Only JSON."


def markdown_table(noun: str, fields: str) -> str:
    """A Markdown table."""
    return f"Make a Markdown table of each {noun} with the columns {fields} and ten rows."


TASKS: tuple[Callable[[str, str], str], ...] = (
    sql_table,
    c_struct,
    rust_struct,
    go_struct,
    typescript_interface,
    python_class,
    java_class,
    json_object,
    markdown_table,
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
        fields = ", ".join(rng.sample(FIELDS, rng.randint(3, 5)))
        found[TASKS[turn % len(TASKS)](rng.choice(NOUNS), fields)] = None
        turn += 1
    return list(found)


def main() -> None:
    """Prints one JSON line a prompt."""
    for index, prompt in enumerate(prompts(NUM_PROMPTS, seed=SEED)):
        message = {"role": "user", "content": prompt}
        print(json.dumps({"id": f"demo-{index:05d}", "messages": [message]}))


if __name__ == "__main__":
    main()
