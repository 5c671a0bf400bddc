"""Which tokens a document becomes, and which of them are learnt."""

import pytest
from tokenizers import processors

from distiller.errors import UserError
from distiller.language.data.documents import Answer, Chat, Text
from distiller.language.data.tokenization import BATCH, DocumentTokenizer
from tests.toy_language import CHAT, MARKED_CHAT, byte_level, word_level

MESSAGES = (
    {"role": "system", "content": "be short."},
    {"role": "user", "content": "a cat?"},
    {"role": "assistant", "content": "the dog 🦕"},
    {"role": "user", "content": "and?"},
    {"role": "assistant", "content": "b"},
)


def parts(tokenizer, document):
    """The text that is learnt and the text that is not."""
    (found,) = tokenizer.tokenise([document])
    decode = tokenizer._tokenizer.decode
    return decode(found.tokens[found.learnt]), decode(found.tokens[~found.learnt])


def test_a_text_is_learnt_whole_and_ends_once(tmp_path):
    words, pairs = DocumentTokenizer(word_level(tmp_path / "w")), DocumentTokenizer(byte_level(tmp_path / "b"))
    assert parts(words, Text("", "a red cat")) == ("<s> a red cat </s>", "")
    assert parts(pairs, Text("", "a 漢 cat\n")) == ("a 漢 cat\n<|endoftext|>", "")
    assert parts(pairs, Text("", "a cat<|endoftext|>")) == ("a cat<|endoftext|>", "")


def test_an_answer_is_learnt_with_its_end_and_its_prompt_is_not(tmp_path):
    words, pairs = DocumentTokenizer(word_level(tmp_path / "w")), DocumentTokenizer(byte_level(tmp_path / "b"))
    answer = Answer("", "what does the cat do ? ", "the cat sits .")
    assert parts(words, answer) == ("the cat sits . </s>", "<s> what does the cat do ?")
    assert parts(pairs, answer) == (" the cat sits .<|endoftext|>", "what does the cat do ?")
    # A token that begins in the prompt and ends in the completion is the answer's, here and with the space above.
    assert parts(words, Answer("", "what do", "es the")) == ("does the </s>", "<s> what")


@pytest.mark.parametrize("template", [CHAT, MARKED_CHAT])
def test_of_a_conversation_the_assistants_turns_are_learnt(tmp_path, template):
    tokenizer = DocumentTokenizer(byte_level(tmp_path, template))
    learnt, rest = parts(tokenizer, Chat("", MESSAGES))
    assert learnt == "the dog 🦕<|end|>b<|end|>"
    assert rest == ("<|system|>be short.<|end|><|user|>a cat?<|end|><|assistant|><|user|>and?<|end|><|assistant|>")


TOOLS = [{"name": "f"}]


@pytest.mark.parametrize("template", [CHAT, MARKED_CHAT])
def test_a_template_is_given_what_stands_beside_the_messages(tmp_path, template):
    beside = (
        "{% if tools %}<|system|>{{ tools | map(attribute='name') | join }}<|end|>{% endif %}"
        "{% for one in documents or [] %}{{ one.text }}{% endfor %}{{ mood }}"
    )
    tokenizer = DocumentTokenizer(byte_level(tmp_path, beside + template))
    options = {"tools": TOOLS, "documents": [{"text": "cats"}], "mood": "calm"}
    learnt, rest = parts(tokenizer, Chat("", MESSAGES, options))
    assert learnt == "the dog 🦕<|end|>b<|end|>"
    assert rest.startswith("<|system|>f<|end|>catscalm<|system|>be short.<|end|>")
    assert parts(tokenizer, Chat("", MESSAGES))[1].startswith("<|system|>be short.<|end|>")


def test_tools_that_a_template_leaves_out_are_refused(tmp_path):
    tokenizer = DocumentTokenizer(byte_level(tmp_path, CHAT))
    with pytest.raises(UserError, match=r"x line 3 has tools, of which the tokenizer's chat template writes nothing"):
        list(tokenizer.tokenise([Chat("x line 3", MESSAGES, {"tools": TOOLS})]))


def test_a_tokenizers_own_template_for_tools_is_taken(tmp_path):
    """It marks what is learnt, without which it would be refused, and the other one does not."""
    templates = {"default": CHAT, "tool_use": "{{ tools[0].name }}{{ messages | length }}" + MARKED_CHAT}
    tokenizer = DocumentTokenizer(byte_level(tmp_path, templates))
    chats = [Chat("", MESSAGES), Chat("", MESSAGES, {"tools": TOOLS}), Chat("", MESSAGES)]
    found = [tokenizer._tokenizer.decode(document.tokens) for document in tokenizer.tokenise(chats)]
    assert found == [found[0], f"f5{found[0]}", found[0]]


def test_templates_that_cannot_say_what_is_the_answer_are_refused_by_name(tmp_path):
    forgetful = "{% for m in messages %}{% if loop.last %}{{ m['content'] }}{% endif %}{% endfor %}"
    raising = "{{ raise_exception('roles must alternate') }}"
    for template, message in (
        (None, "no chat template"),
        (forgetful, "x line 3: the chat template writes message"),
        (raising, "x line 3: the chat template refuses the conversation .roles must alternate"),
    ):
        tokenizer = DocumentTokenizer(byte_level(tmp_path / str(len(message)), template))
        with pytest.raises(UserError, match=message):
            list(tokenizer.tokenise([Chat("x line 3", MESSAGES)]))


def test_documents_of_all_forms_keep_their_order_over_batches(tmp_path):
    tokenizer = DocumentTokenizer(byte_level(tmp_path, CHAT))
    forms = [Text("", "a"), Chat("", MESSAGES), Answer("", "a", "b")]
    documents = [forms[number % 3] for number in range(BATCH + 5)]
    together = [found.tokens.tolist() for found in tokenizer.tokenise(documents)]
    alone = [next(iter(tokenizer.tokenise([form]))).tokens.tolist() for form in forms]
    assert together == [alone[number % 3] for number in range(BATCH + 5)]


def test_the_digest_follows_what_the_tokenizer_does(tmp_path):
    digests = [
        DocumentTokenizer(folder).digest
        for folder in (
            word_level(tmp_path / "1"),
            word_level(tmp_path / "2"),
            word_level(tmp_path / "3", begins=False),
            byte_level(tmp_path / "4"),
            byte_level(tmp_path / "5", CHAT),
        )
    ]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 4


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(UserError, match="holds no tokenizer"):
        DocumentTokenizer(tmp_path)


def test_spaces_at_the_end_of_an_answer_are_learnt(tmp_path):
    """Their token may have the empty range of characters at the end of the text."""
    tokenizer = DocumentTokenizer(byte_level(tmp_path, CHAT))
    backend = tokenizer._tokenizer.backend_tokenizer
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    (document,) = tokenizer.tokenise([Answer("", "a", " b ")])
    texts = [tokenizer._tokenizer.decode([token]) for token in document.tokens]
    assert texts[-2] == " "
    assert document.learnt[-2:].tolist() == [True, True]


def test_a_conversation_that_begins_with_the_assistant_is_named(tmp_path):
    tokenizer = DocumentTokenizer(byte_level(tmp_path, CHAT))
    chat = Chat("x line 3", ({"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}))
    with pytest.raises(UserError, match=r"x line 3 begins with the assistant, and the chat template does not mark"):
        list(tokenizer.tokenise([chat]))
