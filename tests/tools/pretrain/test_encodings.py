"""Text in any encoding of Unicode, and with any line ends, gives the documents that UTF-8 gives."""

import codecs
import random

import pytest

from bert_tools.pretrain.documents import Rules, sections
from bert_tools.pretrain.files import TextFile, encoding_of, with_encodings

WORDS = {
    "latin": ["river", "stone", "network", "memory", "street", "window"],
    "german": ["Straße", "Fluß", "größer", "über", "Höhle", "Mädchen"],
    "cyrillic": ["модель", "река", "камень", "сеть", "слово", "память"],
    "greek": ["ποτάμι", "πέτρα", "δίκτυο", "λέξη", "μνήμη", "δρόμος"],
    "hebrew": ["נהר", "אבן", "רשת", "מילה", "זיכרון", "רחוב"],
    "arabic": ["نهر", "حجر", "شبكة", "كلمة", "ذاكرة", "شارع"],
    "hindi": ["नदी", "पत्थर", "जाल", "शब्द", "स्मृति", "सड़क"],
    "thai": ["แม่น้ำ", "หิน", "เครือข่าย", "คำ", "ถนน", "หน้าต่าง"],
    "georgian": ["მდინარე", "ქვა", "ქსელი", "სიტყვა", "ქუჩა"],
    "korean": ["강물", "바위", "그물", "낱말", "기억", "거리"],
    "chinese": ["河流。", "石头，", "网络。", "词语，", "记忆。", "街道，"],  # noqa: RUF001
    "japanese": ["川の流れ。", "石ころ、", "ネットワーク。", "言葉と", "記憶、", "通り。"],
}
JOINED = ("chinese", "japanese")  # no space stands between their words
UNICODE = ("utf-8", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be")
LINE_ENDS = ("\n", "\r\n", "\r", "\x85", "\u2028")


def text_in(script, num_documents=12, line_end="\n"):
    rng = random.Random(script)
    between = "" if script in JOINED else " "
    documents = [
        between.join(rng.choice(WORDS[script]) for _ in range(40)) for _ in range(num_documents)
    ]
    return (2 * line_end).join(documents)


def documents_of(path, encoding, rule="empty-line"):
    file = TextFile(path, path.name, "text", "plain", path.stat().st_size, encoding)
    return [
        " ".join(" ".join(each.paragraphs).split()) for each in sections(file, Rules(rule, "text"))
    ]


@pytest.mark.parametrize("script", WORDS)
@pytest.mark.parametrize("encoding", UNICODE)
def test_every_script_is_known_by_its_bytes(script, encoding):
    contents = text_in(script).encode(encoding)
    assert encoding_of(contents) == encoding
    assert encoding_of(contents[: len(contents) // 2 + 1]) == encoding  # cut within a character
    mark = "\ufeff".encode(encoding)
    assert encoding_of(mark + "a".encode(encoding)) == encoding


@pytest.mark.parametrize(
    ("script", "encoding"),
    [
        ("cyrillic", "cp1251"),
        ("cyrillic", "koi8-r"),
        ("greek", "iso8859-7"),
        ("hebrew", "cp1255"),
        ("arabic", "cp1256"),
        ("thai", "cp874"),
        ("chinese", "gb18030"),
        ("chinese", "big5"),
        ("japanese", "shift-jis"),
        ("japanese", "euc-jp"),
        ("korean", "euc-kr"),
        ("german", "latin-1"),
    ],
)
def test_other_encodings_are_none_of_unicode(script, encoding, tmp_path):
    contents = text_in(script).encode(encoding, "ignore")
    for even_or_odd in (contents, contents[1:]):
        assert encoding_of(even_or_odd) is None
    path = tmp_path / "a.txt"
    path.write_bytes(contents)
    file = TextFile(path, path.name, "text", "plain", len(contents))
    assert with_encodings([file]) == ([], [file])


def test_a_few_wrong_bytes_and_control_characters_leave_it_utf8():
    text = text_in("german").encode()
    for contents in (
        b"",
        b"\n",
        b"a",
        text[:3] + b"\xff" + text[3:],
        b"\x1b[1m" + text,
        b"\0" * 64,
    ):
        assert encoding_of(contents) == "utf-8"


@pytest.mark.parametrize("line_end", LINE_ENDS)
@pytest.mark.parametrize("encoding", UNICODE)
def test_every_line_end_separates_documents(tmp_path, encoding, line_end):
    (tmp_path / "lf.txt").write_bytes(text_in("greek").encode())
    path = tmp_path / "other.txt"
    path.write_bytes(text_in("greek", line_end=line_end).encode(encoding))
    found = documents_of(path, encoding)
    assert found == documents_of(tmp_path / "lf.txt", "utf-8")
    assert len(found) == 12


def test_line_ends_cut_by_a_block_count_once(tmp_path, monkeypatch):
    monkeypatch.setattr("bert_tools.pretrain.documents.SAMPLE_BYTES", 3)
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffone\r\ntwo\r\n\r\nthrée\r\r\nfour".encode("utf-16-le"))
    assert documents_of(path, "utf-16-le") == ["\ufeffone two", "thrée", "four"]
    path.write_bytes(codecs.BOM_UTF8 + "ä\u2029b".encode())
    assert documents_of(path, "utf-8") == ["\ufeffä", "b"]
