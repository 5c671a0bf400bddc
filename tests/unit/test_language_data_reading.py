"""Documents out of files: what is read, and what is said of what cannot be."""

import json
from pathlib import Path

import pytest

from distiller.config.causal_lm import LanguageData
from distiller.errors import UserError
from distiller.language.data.corpus import documents_of, open_corpus
from distiller.language.data.documents import Answer, Chat, Text


def read(**data):
    options = LanguageData(**data)
    return list(documents_of(open_corpus(options), options.max_samples))


def write(file: Path, content: bytes | str) -> str:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(file)


def test_a_text_file_is_a_document_whatever_its_line_ends_and_byte_order_mark(tmp_path):
    ways = {
        "lf": "one\ntwo é\n".encode(),
        "crlf": "one\r\ntwo é\r\n".encode(),
        "bom": "\ufeffone\ntwo é\n".encode(),
    }
    texts = [read(path=write(tmp_path / name, content)) for name, content in ways.items()]
    assert [[document.text for document in documents] for documents in texts] == [["one\ntwo é\n"]] * 3
    assert [d.text for d in read(path=write(tmp_path / "short", "one line without newline"))] == [
        "one line without newline"
    ]


def test_a_folder_and_a_glob_are_read_in_the_order_of_their_paths_and_blank_files_are_no_documents(tmp_path):
    write(tmp_path / "b.txt", "second")
    write(tmp_path / "a" / "z.txt", "first")
    write(tmp_path / "a" / "empty.txt", "")
    write(tmp_path / "a" / "blank.txt", " \r\n\n")
    write(tmp_path / "a" / "notes.md", "third")
    assert [document.text for document in read(path=str(tmp_path))] == ["first", "second"]
    assert [document.text for document in read(path=f"{tmp_path}/**/*.md")] == ["third"]
    assert [document.text for document in read(path=str(tmp_path), max_samples=1)] == ["first"]


def test_folders_of_json_lines_have_two_suffixes_in_any_case(tmp_path):
    for name in ("a.ndjson", "b.JSONL", "c.jsonl", "d.txt"):
        write(tmp_path / name, json.dumps({"text": name}))
    assert [document.text for document in read(kind="jsonl", path=str(tmp_path))] == ["a.ndjson", "b.JSONL", "c.jsonl"]


CHAT_WITH = '{"messages": [{"role": "assistant", "content": "x"}], %s}'


def test_lines_of_json_hold_documents_of_three_forms(tmp_path):
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    lines = [
        json.dumps({"text": "plain", "id": 3}),
        "",
        json.dumps({"prompt": "p", "completion": "c"}),
        "   ",
        json.dumps({"messages": chat}),
        json.dumps({"text": "  "}),
    ]
    for ends in ("\n", "\r\n"):
        file = tmp_path / f"{len(ends)}.jsonl"
        path = write(file, "\ufeff" + ends.join(lines))
        assert read(kind="jsonl", path=path) == [
            Text(f"{file} line 1", "plain"),
            Answer(f"{file} line 3", "p", "c"),
            Chat(f"{file} line 5", tuple(chat)),
        ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ("[" * 100_000, "line 2 is not JSON"),
        ("[1]", "line 2 is no JSON object: [1]"),
        ('{"prompt": "p"}', "line 2 has the keys prompt; write one of"),
        ('{"text": "a", "messages": []}', "line 2 has 2 forms at once"),
        ('{"text": 3}', "line 2: text is 3; it must be text"),
        ('{"prompt": "p", "completion": null}', "line 2: completion is nothing; it must be text"),
        ('{"text": "\\ud800"}', "line 2: text holds characters that are no text"),
        ('{"messages": []}', "line 2: messages is []"),
        ('{"messages": [{"content": "x"}]}', "is no message; it needs a role and a content"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "line 2: no message has the role assistant"),
        ('{"messages": [{"role": "assistant"}]}', "line 2: content is nothing; it must be text"),
        (CHAT_WITH % '"tools": {"name": "f"}', "line 2: tools is {'name': 'f'}; it must be a list of objects"),
        (CHAT_WITH % '"tools": "[{"', "line 2: tools is '[{', which is not JSON"),
        (CHAT_WITH % '"documents": ["a"]', "line 2: documents is ['a']; it must be a list of objects"),
        (CHAT_WITH % '"tools": [{"name": "\\ud800"}]', "line 2: name holds characters that are no text"),
        (CHAT_WITH % '"chat_template_kwargs": 3', "line 2: chat_template_kwargs is 3; it must be an object"),
        (CHAT_WITH % '"chat_template_kwargs": {"tokenize": true}', "line 2 says tokenize, which is not the data's"),
        (CHAT_WITH % '"chat_template": "x"', "line 2 says chat_template, which is not the data's"),
        (CHAT_WITH % '"functions": [{"name": "f"}]', "line 2 says functions, which is not the data's"),
        ('{"text": "a", "tools": [{"name": "f"}]}', "line 2 has tools and no messages"),
        (b'{"text": "\xff"}', "line 2 is not UTF-8 text"),
        (b'{"text": "a\x00"}', "line 2 holds a NUL character"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, message):
    content = b'{"text": "fine"}\n' + (line if isinstance(line, bytes) else line.encode()) + b"\n"
    file = tmp_path / "data.jsonl"
    with pytest.raises(UserError) as caught:
        read(kind="jsonl", path=write(file, content))
    assert message in str(caught.value)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"), [(b"a\nb\xff", "line 2 is not UTF-8"), (b"a\n\nb\x00", "line 3 holds a NUL character")]
)
def test_a_text_that_is_none_is_named_by_its_line(tmp_path, content, message):
    with pytest.raises(UserError, match=message):
        read(path=write(tmp_path / "data.txt", content))


def test_a_conversation_keeps_what_its_template_is_given(tmp_path):
    tools, call = [{"name": "f", "parameters": {"x": None}}], {"name": "f", "arguments": {"x": 1, "y": None}}
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    row = {"messages": messages, "tools": tools, "chat_template_kwargs": {"thinks": False}, "source": "here"}
    lines = [row, row | {"tools": json.dumps(tools)}, {"messages": messages, "tools": None, "documents": []}]
    path = write(tmp_path / "chats.jsonl", "\n".join(map(json.dumps, lines)))
    found = read(kind="jsonl", path=path)
    assert [document.options for document in found] == [{"tools": tools, "thinks": False}] * 2 + [{}]
    # What stands within a call was written there; a message's own null is a key that it does not have.
    assert found[0].messages == ({"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [call]})


def test_nulls_of_a_table_are_no_part_of_a_conversation(tmp_path):
    """One column for all rows, one struct for all messages, calls and tools: most of their fields are null."""
    datasets = pytest.importorskip("datasets")
    first = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"x": 1}}]},
        {"role": "tool", "name": "f", "content": "2"},
        {"role": "assistant", "content": "a"},
    ]
    second = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "tool_calls": [{"name": "g", "arguments": {"y": 2}}]},
        {"role": "assistant", "content": "b"},
    ]
    rows = [
        {"messages": first, "tools": [{"name": "f", "parameters": {"x": "int"}}], "chat_template_kwargs": {"z": 1}},
        {"messages": second, "tools": [{"name": "g", "parameters": {"y": "int"}}]},
    ]
    saved = str(tmp_path / "saved")
    datasets.Dataset.from_list(rows).save_to_disk(saved)
    found = read(kind="datasets", path=saved)
    assert [list(document.messages) for document in found] == [first, second]
    tools = [row["tools"] for row in rows]
    assert [document.options for document in found] == [{"tools": tools[0], "z": 1}, {"tools": tools[1]}]


def test_what_is_not_there_is_named(tmp_path):
    for path, message in (
        (f"{tmp_path}/none.txt", "does not exist"),
        (f"{tmp_path}/*.txt", "no file matches"),
        (str(tmp_path), r"holds no \*.txt"),
    ):
        with pytest.raises(UserError, match=message):
            read(path=path)


def test_the_digest_is_that_of_the_content(tmp_path):
    path = write(tmp_path / "a.txt", "one")
    first = open_corpus(LanguageData(path=path)).digest
    assert open_corpus(LanguageData(path=path)).digest == first
    write(tmp_path / "a.txt", "two")
    assert open_corpus(LanguageData(path=path)).digest != first


def test_pythons_own_reference_is_there():
    documents = read(kind="python-docs")
    assert len(documents) > 50
    assert sum(len(document.text) for document in documents) > 300_000
    assert [document.origin for document in documents] == sorted(document.origin for document in documents)


def test_a_data_set_needs_its_package_or_a_form_that_it_knows(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        read(kind="datasets", path=str(tmp_path / "none"))
    with pytest.raises(UserError, match=r"is none of \.parquet"):
        read(kind="datasets", path=write(tmp_path / "data.xml", "<a/>"))


def test_data_sets_are_read_as_files_and_as_folders(tmp_path):
    import datasets

    rows = [{"text": "one"}, {"text": "two"}]
    path = write(tmp_path / "rows.jsonl", "\n".join(map(json.dumps, rows)))
    assert [document.text for document in read(kind="datasets", path=path)] == ["one", "two"]
    write(tmp_path / "rows.jsonl", json.dumps({"text": "three"}))
    assert [document.text for document in read(kind="datasets", path=path)] == ["three"]
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    write(tmp_path / "chats.jsonl", json.dumps({"messages": chat}))
    files = {"train": str(tmp_path / "chats.jsonl"), "test": path}
    cache = str(tmp_path / "cache")
    parts = {name: datasets.load_dataset("json", data_files=file, cache_dir=cache) for name, file in files.items()}
    saved = str(tmp_path / "saved")
    datasets.DatasetDict({name: part["train"] for name, part in parts.items()}).save_to_disk(saved)
    assert [document.messages for document in read(kind="datasets", path=saved)] == [tuple(chat)]
    assert [document.text for document in read(kind="datasets", path=saved, split="test")] == ["three"]
    with pytest.raises(UserError, match="has no validation; there are: train, test"):
        read(kind="datasets", path=saved, split="validation")
