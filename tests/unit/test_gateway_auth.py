import pytest

from hetero_llm.errors import KeyMissing, KeysUnreadable, KeyWrong
from hetero_llm.gateway.auth import KeyRing, hash_key, load_keys
from hetero_llm.gateway.options import KeyRecord

RING = KeyRing([KeyRecord(name="team-a", sha256=hash_key("sk-a")), KeyRecord(name="team-b", sha256=hash_key("sk-b"))])


def test_without_keys_everybody_is_let_in():
    assert KeyRing([]).check(None) is None


def test_a_right_key_gives_its_owner():
    assert RING.check(b"Bearer sk-b") == "team-b"


@pytest.mark.parametrize("header", [b"bearer sk-a", b"BEARER   sk-a", b"Bearer sk-a  "])
def test_the_scheme_is_read_without_regard_to_case_and_blanks(header):
    assert RING.check(header) == "team-a"


def test_the_key_may_come_in_x_api_key():
    assert RING.check(None, b"sk-a") == "team-a"


@pytest.mark.parametrize("header", [None, b"", b"Bearer", b"Bearer ", b"Basic sk-a", b"sk-a"])
def test_no_key_is_missing(header):
    with pytest.raises(KeyMissing):
        RING.check(header)


@pytest.mark.parametrize("header", [b"Bearer x", b"Bearer sk-a sk-b", b"Bearer \xff\xfe", b"Bearer " + b"k" * 10_000])
def test_another_key_is_wrong(header):
    with pytest.raises(KeyWrong):
        RING.check(header)


def test_the_error_does_not_repeat_the_key():
    with pytest.raises(KeyWrong) as caught:
        RING.check(b"Bearer sk-secret")
    assert "secret" not in repr(caught.value.report)


def test_a_key_file_is_read(tmp_path):
    (tmp_path / "keys.yaml").write_text("- {name: team-a, key: sk-a}\n- {name: team-b, key: sk-b}\n")
    assert load_keys(tmp_path / "keys.yaml") == (
        KeyRecord(name="team-a", sha256=hash_key("sk-a")),
        KeyRecord(name="team-b", sha256=hash_key("sk-b")),
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no list of keys"),
        ("[]", "no list of keys"),
        ("keys: []", "no list of keys"),
        ("- team-a", "entry 1"),
        ("- {name: a, key: k}\n- {name: b}", "entry 2"),
        ("- {name: a, key: k, admin: true}", "entry 1"),
        ("- {name: a, key: 12345}", "`key` of entry 1"),
        ("- {name: a, key: ''}", "`key` of entry 1"),
        ("- {name: a, key: 'x y'}", "`key` of entry 1"),
        ("- {name: a, key: k}\n- {name: a, key: l}", "same name"),
        ("- {name: a, key: k}\n- {name: b, key: k}", "same key"),
        ("- {name: a\n  key: [", "line"),
    ],
)
def test_a_key_file_of_another_shape_is_unreadable(tmp_path, text, says):
    (tmp_path / "keys.yaml").write_text(text)
    with pytest.raises(KeysUnreadable, match=says):
        load_keys(tmp_path / "keys.yaml")


def test_a_key_file_that_is_not_yaml_is_not_quoted(tmp_path):
    (tmp_path / "keys.yaml").write_text("- {name: a, key: sk-secret\n- :")
    with pytest.raises(KeysUnreadable) as caught:
        load_keys(tmp_path / "keys.yaml")
    assert "secret" not in repr(caught.value.report)


def test_a_missing_key_file_is_named(tmp_path):
    with pytest.raises(KeysUnreadable, match="nowhere"):
        load_keys(tmp_path / "nowhere.yaml")


def test_a_key_file_that_is_not_text_is_unreadable(tmp_path):
    (tmp_path / "keys.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(KeysUnreadable):
        load_keys(tmp_path / "keys.yaml")
