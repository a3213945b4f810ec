"""The SCRAM file: valid and invalid files (errors quote nothing), and users who do not exist."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.security.login.scram import derive
from gateway.security.login.user_files import ScramUsers, read_scram_file, scram_line
from gateway.settings.config import ConfigError

KEY = "security.scram_file"
SALT = b"0123456789abcdef"
ANN_256 = derive("SCRAM-SHA-256", "secret", SALT, 4096)
ANN_512 = derive("SCRAM-SHA-512", "secret", SALT, 5000)
LINE = scram_line("ann", "SCRAM-SHA-256", ANN_256)


def read(tmp_path: Path, *lines: str) -> ScramUsers:
    path = tmp_path / "scram"
    path.write_text("\n".join(lines), encoding="utf-8")
    return read_scram_file(path, KEY)


def test_lines_are_read_as_they_are_written(tmp_path: Path) -> None:
    users = read(tmp_path, "# the plant", "", LINE, f"  {scram_line('ann', 'SCRAM-SHA-512', ANN_512)}  ")
    assert users.mechanisms == ("SCRAM-SHA-512", "SCRAM-SHA-256")
    assert users.credential("SCRAM-SHA-256", "ann") == ANN_256
    assert users.credential("SCRAM-SHA-512", "ann") == ANN_512
    assert read(tmp_path, LINE).mechanisms == ("SCRAM-SHA-256",)


def test_the_form_of_rfc_5803(tmp_path: Path) -> None:
    """The same user and password as in RFC 7677."""
    text = (
        "user:SCRAM-SHA-256$4096:W22ZaJ0SNY7soEsUEjb6gQ==$WG5d8oPm3OtcPnkdi4Uo7BkeZkBFzpcXkuLmtbsT4qY="
        ":wfPLwcE6nTWhTAmQ7tl2KeoiWGPlZqQxSrmfPwDl2dU="
    )
    credential = read(tmp_path, text).credential("SCRAM-SHA-256", "user")
    assert credential == derive("SCRAM-SHA-256", "pencil", credential.salt, 4096)
    assert scram_line("user", "SCRAM-SHA-256", credential) == text


def test_names_are_prepared(tmp_path: Path) -> None:
    users = read(tmp_path, LINE.replace("ann", "\uff41n\u00adn"))
    assert users.credential("SCRAM-SHA-256", "ann") == ANN_256


def test_an_unknown_name_looks_like_a_known_one(tmp_path: Path) -> None:
    users = read(tmp_path, LINE, LINE.replace("ann:", "bob:"))
    made_up = users.credential("SCRAM-SHA-256", "eve")
    assert made_up.iterations == ANN_256.iterations
    assert [len(part) for part in (made_up.salt, made_up.stored_key, made_up.server_key)] == [16, 32, 32]
    assert made_up.salt not in (ANN_256.salt, users.credential("SCRAM-SHA-256", "eva").salt)
    assert len(users.credential("SCRAM-SHA-512", "eve").stored_key) == 64
    # The same after a reload, when users came and went behind the first line.
    assert read(tmp_path, LINE, LINE.replace("ann:", "cleo:")).credential("SCRAM-SHA-256", "eve") == made_up


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        (["# nobody"], "has no user"),
        (["hunter2"], "line 1: expected name:SCRAM-SHA-256"),
        (["", "ann:hunter2"], "line 2: expected name:SCRAM-SHA-256"),
        (["ann:$argon2id$hunter2"], "line 1: expected name:SCRAM-SHA-256"),
        ([LINE.replace("SCRAM-SHA-256", "SCRAM-SHA-1")], "line 1: expected"),
        ([LINE.replace("$4096", "$4095")], "line 1: at least 4096"),
        ([LINE + "hunter2"], "line 1: salt or keys are not base64"),
        ([LINE.replace("SCRAM-SHA-256", "SCRAM-SHA-512")], "line 1: the keys have the wrong length"),
        ([LINE, LINE], "line 2: duplicate name"),
        ([LINE, LINE.replace("ann", "\uff41nn")], "line 2: duplicate name"),
        ([LINE.replace("ann", "anonymous")], "line 1: the name is empty or reserved"),
        ([LINE.replace("ann", "")], "line 1: the name is empty"),
        ([LINE.replace("ann", "a\u0221")], "line 1: the name contains a character"),
    ],
)
def test_a_bad_file_is_named_but_not_quoted(tmp_path: Path, lines: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, *lines)
    assert str(caught.value).startswith(f"{KEY}: ")
    assert complaint in str(caught.value)
    assert "hunter2" not in str(caught.value)


@given(st.text() | st.lists(st.sampled_from([*LINE, LINE, ":", "$", "\n", "#", "="])).map("".join))
def test_any_text_is_users_or_a_complaint(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any-scram"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        users = read_scram_file(path, KEY)
    except ConfigError as error:
        complaint = str(error)
    else:
        assert users.mechanisms == ("SCRAM-SHA-256",)
        return
    assert complaint.startswith(f"{KEY}: ")


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"^{KEY}: cannot read .*No such file"):
        read_scram_file(tmp_path / "none", KEY)
    (tmp_path / "latin").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_scram_file(tmp_path / "latin", KEY)
