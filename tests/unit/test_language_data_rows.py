"""Tokens as rows: what is in them, and that documents of a row are blind to each other."""

import pickle
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from distiller.data.order import RankSampler, UpdatePlan
from distiller.language.data.batch import IGNORED, collate, count, tokens
from distiller.language.data.documents import Answer, Text
from distiller.language.data.length_grouping import batches_by_length, in_rows_order
from distiller.language.data.packing import TextData, lay_out
from distiller.language.data.token_store import TokenStore, tokenise_corpus
from distiller.language.data.tokenization import DocumentTokenizer
from distiller.storage.stages import Stage
from tests.toy_language import word_level

PAD = 0


@pytest.fixture
def store(tmp_path):
    """Makes a store of documents of so many words (and an end each), or of so many in a prompt and in an answer."""

    def make(*sizes: int | tuple[int, int]) -> TokenStore:
        words, documents = ["a", "red", "cat", "runs", "."], []
        for size in sizes:
            text = " ".join(words[number % 5] for number in range(sum(size) if isinstance(size, tuple) else size))
            if isinstance(size, tuple):
                prompt = " ".join(text.split()[: size[0]])
                documents.append(Answer("", prompt, text.removeprefix(prompt)))
            else:
                documents.append(Text("", text))
        stage = Stage("tokens", {}, tmp_path / "stages")
        tokenizer = DocumentTokenizer(word_level(tmp_path / "tokenizer", begins=False))
        tokenise_corpus(stage, documents, tokenizer, None)
        return TokenStore(stage.folder)

    return make


def rows_of(store, **options):
    documents = range(len(store))
    layout = lay_out(store, documents, **options)
    data = TextData(store, layout)
    return layout, [data[0, number] for number in range(len(data))]


def test_packed_rows_are_full_and_hold_every_transition_of_every_document_once(store):
    store = store(5, 20, 1, 9, 30)
    layout, rows = rows_of(store, max_length=8, splits=True, joins=True)
    assert all(len(row.input_ids) == 8 for row in rows[:-1])
    said = [torch.cat([row.input_ids for row in rows]), torch.cat([row.labels for row in rows])]
    learnt = [pair for pair in torch.stack(said, dim=1).tolist() if pair[1] != IGNORED]
    whole = [store.tokens[start:end].tolist() for start, end in zip(store.starts, store.ends, strict=True)]
    assert learnt == [list(pair) for document in whole for pair in pairwise(document)]
    assert layout.num_cut == layout.num_left_out == 0
    for row in rows:
        begins = row.position_ids == 0
        assert begins[0]
        assert (row.position_ids[1:][~begins[1:]] == row.position_ids[:-1][~begins[1:]] + 1).all()


def test_rows_of_one_document_are_cut_and_learn_the_token_behind_the_cut(store):
    store = store(5, 20)
    layout, rows = rows_of(store, max_length=8, splits=False, joins=False)
    assert [len(row.input_ids) for row in rows] == [6, 8]
    assert rows[0].labels.tolist() == [*rows[0].input_ids[1:].tolist(), IGNORED]
    assert rows[1].labels.tolist() == store.tokens[7:15].tolist()
    assert (layout.num_cut, layout.num_left_out) == (1, 0)


def test_documents_that_are_split_lose_nothing_where_they_are_not_joined(store):
    store = store(20, 5)
    _, rows = rows_of(store, max_length=8, splits=True, joins=False)
    assert [len(row.input_ids) for row in rows] == [8, 8, 5, 6]
    assert sum(int((row.labels != IGNORED).sum()) for row in rows) == 20 + 5


def test_an_answer_keeps_its_prompt_in_its_row(store):
    store = store((2, 3), (2, 3), (2, 9), (8, 2), (9, 2))
    layout, rows = rows_of(store, max_length=8, splits=True, joins=True)
    # The first fits with nothing else; the third is cut; of the fourth the first word of its answer is learnt still.
    assert [len(row.input_ids) for row in rows] == [6, 6, 8, 8]
    assert [int((row.labels != IGNORED).sum()) for row in rows] == [4, 4, 7, 1]
    assert all(row.position_ids.tolist() == list(range(len(row.position_ids))) for row in rows)
    assert (layout.num_cut, layout.num_left_out) == (2, 1)


def test_a_batch_is_padded_to_a_multiple_of_eight_that_nobody_learns(store):
    _, rows = rows_of(store(3, 9), max_length=16, splits=False, joins=False)
    batch = collate(rows, PAD)
    assert batch.input_ids.shape == (2, 16)
    assert batch.lengths == (4, 10)
    assert batch.input_ids[0, 4:].tolist() == [PAD] * 12
    assert batch.position_ids.tolist() == [[*range(16)], [*range(16)]]
    assert (count(batch), tokens(batch)) == (3 + 9, 14)
    assert collate(rows[:1], PAD).input_ids.shape == (1, 8)
    assert {tensor.dtype for tensor in (batch.input_ids, batch.position_ids, batch.labels)} == {torch.int64}
    assert batch.map(lambda tensor: tensor + 1).labels[0, 3] == IGNORED + 1


def test_padding_goes_on_with_the_last_document_of_a_packed_row(store):
    _, rows = rows_of(store(3, 5, 2), max_length=16, splits=True, joins=True)
    batch = collate(rows, PAD)
    length = batch.lengths[-1]
    begins = (batch.position_ids[-1] == 0).nonzero().flatten().tolist()
    assert batch.input_ids.shape[1] > length > begins[-1] > 0
    assert batch.position_ids[-1, begins[-1] :].tolist() == [*range(batch.input_ids.shape[1] - begins[-1])]


def llama():
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=20,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )


def gpt2():
    return GPT2LMHeadModel(GPT2Config(vocab_size=20, n_embd=32, n_layer=2, n_head=4, n_positions=64))


@pytest.mark.parametrize("make_model", [llama, gpt2])
@torch.no_grad()
def test_documents_of_a_packed_row_are_as_if_each_were_alone(store, make_model):
    store = store(5, 3, 1, 14, 9, 2)
    _, rows = rows_of(store, max_length=16, splits=True, joins=True)
    batch = collate(rows, PAD)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make_model().eval()
    assert model.config._attn_implementation == "sdpa"
    packed = model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
    compared = 0
    for row, length in enumerate(batch.lengths):
        begins = [place for place in range(length) if batch.position_ids[row, place] == 0]
        for start, end in zip(begins, [*begins[1:], length], strict=True):
            alone = model(input_ids=batch.input_ids[row : row + 1, start:end], use_cache=False).logits
            torch.testing.assert_close(packed[row, start:end], alone[0], rtol=0, atol=1e-6)
            compared += end - start
    assert compared == sum(batch.lengths)
    # Which test is none unless documents would see each other otherwise.
    blended = model(input_ids=batch.input_ids, use_cache=False).logits
    assert (blended - packed)[0, :16].abs().max() > 1e-3


def test_loader_processes_hand_out_the_same_rows(store):
    store = store(*range(3, 40))
    data = TextData(store, lay_out(store, range(len(store)), max_length=16, splits=True, joins=True))
    plan = UpdatePlan(len(data), 4, 1, 1, seed=3)
    found = []
    for num_workers, context in ((0, None), (2, "fork"), (1, "spawn")):
        loader = DataLoader(
            data,
            batch_sampler=RankSampler(plan, 0, 0, 2 * plan.updates_per_epoch),
            collate_fn=partial(collate, pad_id=PAD),
            num_workers=num_workers,
            multiprocessing_context=context,
        )
        found.append([(batch.sample_ids, batch.input_ids.tolist(), batch.labels.tolist()) for batch in loader])
    assert found[0] == found[1] == found[2]
    # What is sent to a process that is not forked is the file's name.
    assert len(pickle.dumps(store)) < 1000


def test_evaluation_batches_are_of_like_lengths_and_results_come_back_in_order():
    lengths = [3, 40, 9, 8, 17, 40, 1, 100]
    batches = batches_by_length(lengths, max_tokens=80)
    assert batches == [[7], [1, 5], [4, 2, 3], [0, 6]]
    assert in_rows_order(batches, [[lengths[row] for row in batch] for batch in batches]) == lengths
    assert batches_by_length([], 80) == []
