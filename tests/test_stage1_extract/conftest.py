"""Small tokenizers and tiny random targets, made once for all tests of stage 1."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma2Config,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from stage1_extract.config import DataConfig, ExtractConfig, ExtractRun, StoreConfig, TargetConfig

CHATML = """\
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}"""

CHATML_WITH_MARKERS = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\n' }}
{%- if message['role'] == 'assistant' -%}
{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}
{%- else -%}
{{ message['content'] + '<|im_end|>\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\n' }}
{%- endif -%}"""

LLAMA3 = """\
{{- bos_token -}}
{%- for message in messages -%}
{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
{{- message['content'] | trim + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif -%}"""

THINKING = """\
{%- set ns = namespace(last_query=0) -%}
{%- for message in messages -%}
{%- if message['role'] == 'user' -%}{%- set ns.last_query = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\n' }}
{%- set content = message['content'] -%}
{%- if message['role'] == 'assistant' -%}
{%- set thought = '' -%}
{%- if '</think>' in content -%}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') -%}
{%- set content = content.split('</think>')[-1].lstrip('\n') -%}
{%- endif -%}
{%- if loop.index0 > ns.last_query and (loop.last or thought) -%}
{{ '<think>\n' + thought + '\n</think>\n\n' }}
{%- endif -%}
{%- endif -%}
{{ content + '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and not enable_thinking -%}
{{ '<think>\n\n</think>\n\n' }}
{%- endif -%}
{%- endif -%}"""

GEMMA = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('Conversation roles must alternate user/assistant') }}
{%- endif -%}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<start_of_turn>model\n' }}
{%- endif -%}"""

# As of Mistral: nothing stands before an answer but the end of the question.
INSTRUCTIONS = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message['role'] == 'user' -%}
{{ '(INST) ' + message['content'] + ' (/INST)' }}
{%- else -%}
{{ ' ' + message['content'] | trim + eos_token }}
{%- endif -%}
{%- endfor -%}"""

# As of DeepSeek-R1: the prompt opens a thought, and no rendering of an answer holds any.
DROPPED_THOUGHTS = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\n' }}
{%- if message['role'] == 'assistant' -%}
{{ message['content'].split('</think>')[-1] + '<|im_end|>' }}
{%- else -%}
{{ message['content'] + '<|im_end|>\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n<think>\n' }}{%- endif -%}"""

# As of gpt-oss: an answer names its channel, and the last one of all ends with another token.
CHANNELS = """\
{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}
{{ '<|im_start|>assistant<|start_header_id|>final<|end_header_id|>' + message['content'] }}
{{- '<|eot_id|>' if loop.last and not add_generation_prompt else '<|im_end|>' }}
{%- else -%}
{{ '<|im_start|>user<|end_header_id|>' + message['content'] + '<|im_end|>' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant' }}{%- endif -%}"""

# Tool calls as most families write them, and as those do that want text and no content at all.
TOOLS = """\
{%- for tool in tools or [] -%}
{{ 'tool ' + tool['name'] + '\n' }}
{%- endfor -%}
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] }}
{%- if message['content'] -%}{{ '\n' + message['content'] }}{%- endif -%}
{%- for call in message['tool_calls'] or [] -%}
{%- set call = call['function'] or call -%}
{{ '\n<call>' + call['name'] + ' ' + (call['arguments'] | tojson) + '</call>' }}
{%- endfor -%}
{{ '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"""

TOOLS_AS_TEXT = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\n' }}
{%- if message['content'] is not string -%}
{%- for call in message['tool_calls'] -%}
{{ '<call>' + call['function']['name'] + ' ' + call['function']['arguments'] + '</call>' }}
{%- endfor -%}
{%- else -%}
{{ message['content'] }}
{%- endif -%}
{{ '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"""

TEMPLATES = {
    "chatml": CHATML,
    "chatml_with_markers": CHATML_WITH_MARKERS,
    "llama3": LLAMA3,
    "thinking": THINKING,
    "gemma": GEMMA,
    "instructions": INSTRUCTIONS,
    "dropped_thoughts": DROPPED_THOUGHTS,
    "channels": CHANNELS,
    "tools": TOOLS,
    "tools_as_text": TOOLS_AS_TEXT,
}
SPECIAL_TOKENS = [
    *("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<start_of_turn>", "<end_of_turn>", "<bos>", "<eos>"),
]
VOCAB_SIZE = 288


def build_tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    """Bytes, a few merges (one of them across line breaks), and control tokens of all families."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ċ", "Ċ"), ("h", "e"), ("l", "l"), ("Ġ", "a")]
    vocabulary = {token: index for index, token in enumerate(alphabet)}
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    core.add_tokens([AddedToken(token, normalized=False) for token in ("<think>", "</think>")])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<bos>", eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    if template is not None:
        tokenizer.chat_template = TEMPLATES[template]
    return tokenizer


def other_bytes() -> list[int]:
    """Bytes that are no ASCII text; targets that never write them write text that comes back."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [index for index, token in enumerate(alphabet) if not "!" <= token <= "~"]


def target_config(kind: str) -> PretrainedConfig:
    """A tiny configuration of a target family."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "bos_token_id": 267,
        "eos_token_id": 261,
        "pad_token_id": None,
    }
    configs: dict[str, Callable[[], PretrainedConfig]] = {
        "llama": lambda: LlamaConfig(**sizes, tie_word_embeddings=True),
        "qwen2": lambda: Qwen2Config(**sizes, tie_word_embeddings=False),
        "qwen3": lambda: Qwen3Config(**sizes, tie_word_embeddings=False),
        "gemma2": lambda: Gemma2Config(
            **sizes, sliding_window=8, query_pre_attn_scalar=8, final_logit_softcapping=5.0
        ),
    }
    return configs[kind]()


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[[str | None], PreTrainedTokenizerFast]:
    """Gives a small tokenizer with the chat template of a family."""
    return build_tokenizer


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Gives the folder of a tiny random target; each kind is made once."""
    made: dict[tuple[str, str], Path] = {}

    def folder_of(kind: str = "llama", template: str = "chatml") -> Path:
        from transformers import AutoModelForCausalLM

        if (kind, template) not in made:
            folder = tmp_path_factory.mktemp(f"{kind}-{template}")
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(target_config(kind))
            for name, weight in model.named_parameters():
                if "norm" in name:  # Ones would hide a norm that is left out or taken twice.
                    torch.nn.init.normal_(weight, mean=0.5, std=0.2)
            for head in (model.get_input_embeddings(), model.get_output_embeddings()):
                head.weight.data[other_bytes()] = 0.0
            model.save_pretrained(folder)
            build_tokenizer(template).save_pretrained(folder)
            made[kind, template] = folder
        return made[kind, template]

    return folder_of


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., Path]:
    """Writes records (or raw text lines) to a JSONL file and gives its path."""

    def write(*records: Any, name: str = "conversations.jsonl") -> Path:
        path = tmp_path / name
        lines = [each if isinstance(each, str) else json.dumps(each) for each in records]
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return path

    return write


def conversation_lines(count: int, *, first: int = 0) -> list[dict[str, Any]]:
    """Short talks of different length."""
    return [
        {
            "id": f"c{index}",
            "messages": [
                {"role": "user", "content": f"say {index}"},
                {"role": "assistant", "content": "hello all " * (1 + index % 5)},
            ],
        }
        for index in range(first, first + count)
    ]


@pytest.fixture
def make_run(
    tmp_path: Path, target_folder: Callable[..., Path], write_jsonl: Callable[..., Path]
) -> Callable[..., ExtractRun]:
    """Gives a run on a tiny target; tables of settings may be changed by name."""

    def make(
        *records: Any,
        place: str = "run",
        kind: str = "llama",
        num_conversations: int = 24,
        **tables: dict[str, Any],
    ) -> ExtractRun:
        path = write_jsonl(*(records or conversation_lines(num_conversations)))
        target = {"model": str(target_folder(kind)), "dtype": "float32"}
        data = {"conversations": (str(path),), "max_sequence_tokens": 80}
        store = {"target_layer_ids": (0, 2), "encoding": "bf16"} | tables.get("store", {})
        # Below the smallest size that a run file may name, to have several units of a few tokens.
        store_config = StoreConfig(**store).model_copy(update={"shard_bytes": 40_000})
        return ExtractRun(
            target=TargetConfig(**(target | tables.get("target", {}))),
            data=DataConfig(**(data | tables.get("data", {}))),
            store=store_config,
            extract=ExtractConfig(**({"batch_tokens": 200} | tables.get("extract", {}))),
            store_dir=tmp_path / place / "store",
            run_dir=tmp_path / place,
        )

    return make


@pytest.fixture
def talks() -> Callable[..., list[dict[str, Any]]]:
    """Gives so many short talks of different length."""
    return conversation_lines


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Tests share their cores."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees or fills the user's cache folder, unless it asks for the embedded target."""
    monkeypatch.setenv("DFLASH_OFFLINE_CACHE", str(tmp_path / "cache"))
