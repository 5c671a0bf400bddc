"""Small tokenizers of several kinds as transformers' folders, and recipes of what they read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from distiller.config.causal_lm import LanguageData
from distiller.config.recipe import Recipe, RecipeOf, TaskOptions, Train
from distiller.config.sections import Section
from distiller.config.teacher import Teacher

WORDS = ("a", "red", "blue", "cat", "dog", "runs", "sits", "what", "does", "the", "do", "?", ".")
SPECIAL = ("<pad>", "</s>", "<unk>", "<s>")
TEXTS = (
    "a red cat runs . the blue dog sits .",
    "what does the cat do ? the cat sits .",
    "naïve café, 漢字 and 🦕🦕: bytes of many kinds",
    "2024 2024 2024 2024 2024 2024 2024 2024",
)
CHAT = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKED_CHAT = (
    "{% for message in messages %}<|{{ message['role'] }}|>{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] }}<|end|>{% endgeneration %}{% else %}{{ message['content'] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def word_level(folder: Path, begins: bool = True) -> Path:
    """A token a word, between `<s>`, where it begins with one, and `</s>`, which it adds itself."""
    vocabulary = {word: number for number, word in enumerate((*SPECIAL, *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    single = "<s> $A </s>" if begins else "$A </s>"
    tokenizer.post_processor = processors.TemplateProcessing(single, special_tokens=[("<s>", 3), ("</s>", 1)])
    named = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(folder)
    return folder


def byte_level(folder: Path, chat_template: str | None = None) -> Path:
    """Byte pairs, as GPT-2's: any text, nothing added at its ends, and special tokens for conversations."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        show_progress=False,
        special_tokens=["<|endoftext|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")
    fast.chat_template = chat_template
    fast.save_pretrained(folder)
    return folder


def language_recipe(folder: Path, **data: Any) -> Recipe:
    """A recipe as far as the data side reads it: its section `data`, and a folder for stages."""
    return RecipeOf[TaskOptions, Section, LanguageData, Section](
        task=TaskOptions(kind="causal_lm"),
        teacher=Teacher(path="unused"),
        student=Section(),
        data=LanguageData(**data),
        train=Train(max_steps=1),
        evaluation=Section(),
        cache_dir=str(folder / "cache"),
    )
