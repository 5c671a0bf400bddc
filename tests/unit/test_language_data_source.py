"""A recipe's documents: tokenised once, split the same way for everyone."""

import json
from datetime import datetime, timedelta

import pytest
import torch
from accelerate import Accelerator
from safetensors import SafetensorError

from distiller.config.causal_lm import LanguageData
from distiller.errors import UserError
from distiller.language.data.source import LanguageSource, held_out_documents
from distiller.language.data.tokenization import DocumentTokenizer
from distiller.storage.stages import digest_of
from tests.toy_language import CHAT, byte_level, language_recipe, word_level

TEXTS = [f"the red cat runs . {'a dog sits . ' * (number % 7)}" for number in range(60)]


@pytest.fixture
def corpus(tmp_path):
    file = tmp_path / "texts.jsonl"
    file.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    return {"kind": "jsonl", "path": str(file)}


def rows_of(data):
    return [tuple(data[0, number].input_ids.tolist()) for number in range(len(data))]


def stages(tmp_path):
    return sorted(folder.name for folder in (tmp_path / "cache").glob("tokens-*"))


def test_a_full_disk_and_texts_that_cannot_be_read_are_one_line(tmp_path, corpus, monkeypatch):
    def full(*_):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    tokenizer = byte_level(tmp_path / "tokenizer")
    with monkeypatch.context() as changed:
        changed.setattr("distiller.language.data.token_store.save_file", full)
        with pytest.raises(UserError, match=r"the tokens cannot be written to .*No space left .*set cache_dir="):
            LanguageSource(language_recipe(tmp_path, **corpus), tokenizer)
    # Readable by its rights, and not when it is read, as on a failing disk.
    with pytest.raises(UserError, match=r"data.path: /proc/self/mem cannot be read \(.*\); correct its files"):
        LanguageSource(language_recipe(tmp_path, kind="text", path="/proc/self/mem"), tokenizer)


def test_tokens_are_made_once_and_anew_when_the_data_or_the_tokenizer_change(tmp_path, corpus):
    tokenizer = byte_level(tmp_path / "tokenizer")
    first = LanguageSource(language_recipe(tmp_path, **corpus), tokenizer)
    made = (tmp_path / "cache" / stages(tmp_path)[0] / "tokens.safetensors").stat().st_mtime_ns
    again = LanguageSource(language_recipe(tmp_path, **corpus), tokenizer)
    assert rows_of(again.load()) == rows_of(first.load())
    assert (again.data_digest, again.num_samples) == (first.data_digest, first.num_samples)
    # How rows are laid out tokenises nothing anew, and changes what a sample is.
    other_rows = LanguageSource(language_recipe(tmp_path, **corpus, max_length=64), tokenizer)
    assert len(stages(tmp_path)) == 1
    assert (tmp_path / "cache" / stages(tmp_path)[0] / "tokens.safetensors").stat().st_mtime_ns == made
    assert other_rows.data_digest != first.data_digest
    other_tokenizer = LanguageSource(language_recipe(tmp_path, **corpus), word_level(tmp_path / "words"))
    assert len(stages(tmp_path)) == 2
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": "the dog"}) + "\n" + json.dumps({"text": "the cat"}))
    other_data = LanguageSource(language_recipe(tmp_path, **corpus), tokenizer)
    assert len(stages(tmp_path)) == 3
    assert len({source.data_digest for source in (first, other_rows, other_tokenizer, other_data)}) == 4


def test_held_out_documents_are_the_same_for_every_layout_and_never_trained_on(tmp_path, corpus):
    tokenizer = word_level(tmp_path / "tokenizer", begins=False)
    held_out = held_out_documents(len(TEXTS), 0.25)
    assert 5 < len(held_out) < 25
    for packing in (True, False):
        recipe = language_recipe(tmp_path, **corpus, held_out=0.25, packing=packing, max_length=512)
        source = LanguageSource(recipe, tokenizer)
        # One row a document, whether training rows are packed or not.
        assert len(source.held_out()) == len(held_out)
        words = [len(TEXTS[number].split()) + 1 for number in sorted(held_out)]
        assert source.held_out().lengths == words
        in_training = sum(source.load().lengths)
        assert in_training == sum(len(text.split()) + 1 for text in TEXTS) - sum(words)


def test_more_documents_change_no_choice_and_something_is_always_on_both_sides():
    few, many = held_out_documents(100, 0.1), held_out_documents(1000, 0.1)
    assert few == {number for number in many if number < 100}
    assert 60 < len(many) < 140
    assert len(held_out_documents(3, 1e-9)) == 1
    assert len(held_out_documents(3, 1 - 1e-9)) == 2
    assert len(held_out_documents(2, 1e-9)) == len(held_out_documents(2, 1 - 1e-9)) == 1
    # The document with the highest hash is the one to train on, here the last.
    assert held_out_documents(6, 1 - 1e-9) == {0, 1, 2, 3, 4}
    assert held_out_documents(1, 0.5) == held_out_documents(50, 0.0) == set()


def test_of_a_single_document_the_last_rows_are_held_out(tmp_path):
    text = " ".join(f"{number}" for number in range(100))
    (tmp_path / "book.txt").write_text(text)
    tokenizer = byte_level(tmp_path / "tokenizer")
    rows = {}
    for share in (0.0, 1e-9, 0.25, 1 - 1e-9):
        recipe = language_recipe(tmp_path, kind="text", path=str(tmp_path / "book.txt"), held_out=share, max_length=16)
        source = LanguageSource(recipe, tokenizer)
        rows[share] = rows_of(source.load()), rows_of(source.held_out())
        assert source.num_samples == len(rows[share][0])
        assert source.notices() == []
        # Older versions trained on all rows: their runs are other data, and nothing else is.
        older = digest_of([source._store.digest, 16, True, share])
        assert (source.data_digest == older) == (share == 0)
    whole = rows[0.0][0]
    assert all(training + held_out == whole for training, held_out in rows.values())
    assert len(whole) > 8
    expected = (0, 1, round(len(whole) / 4), len(whole) - 1)
    assert tuple(len(held_out) for _, held_out in rows.values()) == expected
    for options in ({"packing": False, "max_length": 16}, {"max_length": 1024}):
        recipe = language_recipe(tmp_path, kind="text", path=str(tmp_path / "book.txt"), **options)
        (notice,) = LanguageSource(recipe, tokenizer).notices()
        assert "nothing is held out (a single document of one row)" in notice
        assert "distiller evaluate RUN data.path=OTHERS" in notice


def test_what_is_lost_is_said(tmp_path, capsys):
    lines = [{"text": "a red cat " * 20}, {"prompt": "a " * 30, "completion": "dog"}, {"text": "a cat"}]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, lines)))
    recipe = language_recipe(
        tmp_path, kind="jsonl", path=str(tmp_path / "x.jsonl"), packing=False, max_length=8, held_out=0.0
    )
    source = LanguageSource(recipe, word_level(tmp_path / "tokenizer", begins=False))
    source.prepare(Accelerator(cpu=True))
    said = capsys.readouterr().out
    assert "training: 2 rows of at most 8 tokens, 11 in all" in said
    assert "warning: training: documents that are longer than data.max_length 8 and were cut: 1" in said
    assert "warning: training: documents left out, since nothing of them is learnt within data.max_length 8: 1" in said
    assert "held out: 0 rows" in said
    assert source.held_out().lengths == []


def test_wrong_documents_leave_no_stage_and_empty_data_is_refused(tmp_path):
    tokenizer = byte_level(tmp_path / "tokenizer", CHAT)
    file = tmp_path / "x.jsonl"
    for content, message in (
        ("{}", "line 1 has the keys .none."),
        ("\n \r\n", "there is no document that is not blank"),
    ):
        file.write_text(content)
        with pytest.raises(UserError, match=message):
            LanguageSource(language_recipe(tmp_path, kind="jsonl", path=str(file)), tokenizer)
        assert stages(tmp_path) == []


def test_a_cache_that_cannot_be_written_is_the_users_mistake(tmp_path, corpus):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(UserError, match="set cache_dir="):
        LanguageSource(language_recipe(tmp_path, **corpus), byte_level(tmp_path / "tokenizer"))


def test_pythons_reference_becomes_rows(tmp_path):
    recipe = language_recipe(tmp_path, kind="python-docs", max_length=256, max_samples=10)
    source = LanguageSource(recipe, byte_level(tmp_path / "tokenizer"))
    sample = source.load()[0, 0]
    assert len(sample.input_ids) == 256
    assert sample.input_ids.dtype == torch.int64
    assert len(source.held_out()) >= 1


def test_a_path_is_given_where_one_is_read():
    with pytest.raises(ValueError, match=r"data\.kind=jsonl needs data\.path"):
        LanguageData(kind="jsonl")
    with pytest.raises(ValueError, match="python-docs reads no file"):
        LanguageData(kind="python-docs", path="x")


def test_the_datas_digest_is_that_of_the_tokens(tmp_path, monkeypatch):
    """A chat template may write the day, or special tokens, which are no part of the vocabulary's file."""
    file = tmp_path / "chats.jsonl"
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "a cat"}]
    file.write_text("\n".join(json.dumps({"messages": turns}) for _ in range(4)))
    corpus = {"kind": "jsonl", "path": str(file)}
    dated = byte_level(tmp_path / "dated", "{{ strftime_now('%A') }}" + CHAT)
    first = LanguageSource(language_recipe(tmp_path / "one", **corpus), dated)
    assert LanguageSource(language_recipe(tmp_path / "one", **corpus), dated).data_digest == first.data_digest
    plain = byte_level(tmp_path / "plain", "Blursday" + CHAT)
    assert LanguageSource(language_recipe(tmp_path / "one", **corpus), plain).data_digest != first.data_digest

    class Tomorrow(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.now(tz) + timedelta(days=1)

    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Tomorrow)
    other_day = LanguageSource(language_recipe(tmp_path / "two", **corpus), dated)
    assert other_day.data_digest != first.data_digest
    # Made once: what is in the folder stays what it was.
    assert LanguageSource(language_recipe(tmp_path / "one", **corpus), dated).data_digest == first.data_digest


def test_python_files_of_the_tokenizer_s_folder_run_only_where_they_are_trusted(tmp_path, corpus):
    folder = byte_level(tmp_path / "tokenizer")
    own_class = "from transformers import PreTrainedTokenizerFast\n\n\nclass OwnTokenizer(PreTrainedTokenizerFast):\n"
    (folder / "own_tokenizer.py").write_text(f"{own_class}    pass\n")
    own = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "own_tokenizer.OwnTokenizer"]}}
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | own))
    with pytest.raises(UserError, match="contains custom code"):
        LanguageSource(language_recipe(tmp_path, **corpus), folder)
    assert LanguageSource(language_recipe(tmp_path, **corpus), folder, trusts_code=True).num_samples > 0


def test_special_tokens_of_a_chat_template_belong_to_the_key(tmp_path):
    folders = [byte_level(tmp_path / name, "{{ bos_token }}" + CHAT) for name in ("one", "two")]
    config = folders[1] / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"bos_token": "<|system|>"}))
    assert DocumentTokenizer(folders[0]).digest != DocumentTokenizer(folders[1]).digest
