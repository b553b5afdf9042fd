import pytest

from fastjax.data import ChatRecord, TextRecord, read_jsonl
from fastjax.errors import DataError


def write(folder, *lines):
    path = folder / "rows.jsonl"
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines))
    return path


def test_reads_texts_and_conversations_in_order(tmp_path):
    path = write(
        tmp_path,
        b"\xef\xbb\xbf" + b'{"text": "one", "id": 3}',
        "",
        '{"messages": [{"role": "user", "content": "hé", "name": null}, {"role": "assistant", "content": ""}]}',
    )
    text, chat = read_jsonl(path)
    assert text == TextRecord("one", f"{path}:1")
    assert chat == ChatRecord([{"role": "user", "content": "hé"}, {"role": "assistant", "content": ""}], f"{path}:3")


def test_reads_several_files_one_after_the_other(tmp_path):
    paths = [tmp_path / name for name in ("b.jsonl", "a.jsonl")]
    for path in paths:
        path.write_text(f'{{"text": "{path.name}"}}\n')
    assert [record.text for record in read_jsonl(paths)] == ["b.jsonl", "a.jsonl"]


def test_a_tool_call_needs_no_content(tmp_path):
    call = '{"role": "assistant", "content": null, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}'
    (record,) = read_jsonl(write(tmp_path, f'{{"messages": [{call}]}}'))
    assert "content" not in record.messages[0]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a"', r":2: not valid JSON at column \d+"),
        (b'{"text": "\xff"}', ":2: not valid UTF-8 at byte 10"),
        ("[1]", r":2: expected a JSON object with 'messages' or 'text', found \[1\]"),
        ('{"prompt": "a", "answer": "b"}', ":2: expected one of .* found the columns 'prompt', 'answer'"),
        ('{"text": "a", "messages": []}', ":2: expected one of .* found both"),
        ('{"text": 3}', ":2: 'text' must be a string that is not empty, found 3"),
        ('{"text": ""}', ":2: 'text' must be a string that is not empty"),
        ('{"messages": []}', ":2: 'messages' must be a list that is not empty"),
        ('{"messages": "hi"}', ":2: 'messages' must be a list"),
        ('{"messages": [{"content": "a"}]}', r":2: messages\[0\]: expected an object with 'role' and 'content'"),
        ('{"messages": [{"role": "bot", "content": "a"}]}', r":2: messages\[0\]: unknown role 'bot'; the roles are"),
        ('{"messages": [{"role": "user"}]}', r":2: messages\[0\]: 'content' must be a string, found null"),
        ('{"messages": [{"role": "user", "content": ["a"]}]}', r"'content' must be a string, found \[\"a\"\]"),
    ],
)
def test_what_is_wrong_is_named_with_file_and_line(tmp_path, line, message):
    path = write(tmp_path, '{"text": "fine"}', line)
    with pytest.raises(DataError, match=message) as caught:
        list(read_jsonl(path))
    assert str(caught.value).startswith(f"{path}:2: ")


def test_a_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        list(read_jsonl(tmp_path / "none.jsonl"))
