"""No secret of a storage's URL is shown, however it is written."""

import optuna
import pytest
import sqlalchemy

from ksopt.cli.main import main
from ksopt.errors import InvalidInputError
from ksopt.search.request import SearchRequest
from ksopt.search.saved_study import replay
from ksopt.search.storage import Storage
from ksopt.search.storage_url import without_password, without_secrets

URLS = [
    "postgresql://ann:S3CRET@host/db",
    "postgresql://ann:S3CRET/S3CRET@host/db",
    "postgresql://ann:S3CRET@S3CRET@host/db",
    "postgresql://ann:S3CRET?S3CRET@host/db",
    "postgresql://ann:S3CRET#S3CRET:S3CRET@host/db",
    "postgresql://ann:%53S3CRET%2F@host/db",
    "postgresql://ann:S3CRET",
    "postgresql://ann:S3CRET/db",
    "postgresql://:S3CRET@host/db",
    "postgresql:/ann:S3CRET@host/db",
    "postgresql:///ann:S3CRET@host/db",
    "postgresql+psycopg://ann@corp:S3CRET@host:5432/db?connect_timeout=3",
    "ann:S3CRET@host/db",
    "mysql://host/db?user=me&password=S3CRET",
    "mysql://host/db?password=S3CRET&user=me",
    "mysql://host/db?password=S3CRET&S3CRET&user=me",
    "mysql://host/db?password=S3/CRET/S3CRET?S3CRET;S3CRET#S3CRET=S3CRET@S3CRET",
    "mysql://host/db?passwd=S3CRET",
    "mysql://host/db?PWD=S3CRET",
    "mysql://host/db?p%61ssword=S3CRET",
    "postgresql://host/db?sslpassword=S3CRET",
    "postgresql://host/db?token=S3CRET&secret=S3CRET&api_key=S3CRET",
    "mssql+pyodbc:///?odbc_connect=DRIVER%3DX%3BUID%3Dann%3BPWD%3DS3CRET",
    "sqlite+pysqlcipher://:S3CRET@/file.db",
    "host=localhost user=ann password=S3CRET dbname=x",
    "host=localhost password='S3CRET S3CRET'",
]


@pytest.mark.parametrize("url", URLS)
def test_a_secret_is_masked(url: str) -> None:
    shown = without_password(url)
    assert "S3CRET" not in shown
    assert "CRET" not in shown
    assert "***" in shown


@pytest.mark.parametrize("url", URLS)
@pytest.mark.filterwarnings("ignore")
def test_a_secret_is_in_no_error(
    url: str, capsys: pytest.CaptureFixture[str], tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for use in (lambda: Storage(url).load("x"), lambda: replay(url)):
        with pytest.raises(InvalidInputError) as refused:
            use()
        assert "CRET" not in str(refused.value)
    small = ("--dims", "32x64", "--batch", "16", "--device", "cpu", "--trials", "3")
    assert main(["search", *small, "--storage", url, "--out", "report"]) == 2
    with pytest.raises(SystemExit):
        main(["space", "--dims", "8x8", "--storage", url])
    printed = capsys.readouterr()
    assert "CRET" not in printed.out + printed.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("url", URLS)
def test_a_secret_is_in_no_command_and_no_repr(url: str) -> None:
    request = SearchRequest("32x64", storage=url)
    for text in (request.command, repr(request), repr(Storage.__new__(Storage))):
        assert "CRET" not in text


@pytest.mark.parametrize(
    "url",
    [
        "sqlite:///study.db",
        "sqlite:////home/ann:x@y/study.db?timeout=5",
        "postgresql://ann@host:5432/db",
        "postgresql://host:5432/db?application_name=x",
        "journal:/home/ann@work/a:b@c.log",
    ],
)
def test_what_is_no_secret_is_shown(url: str) -> None:
    assert without_password(url) == url


@pytest.mark.parametrize("secret", ["hunter2", "a b", "p@ss", "x", "it's", "päss/word", "$1%"])
def test_a_driver_may_quote_the_secret_in_any_form(secret: str) -> None:
    url = sqlalchemy.URL.create("postgresql", "ann", secret, "host", database="db")
    raw = f"postgresql://ann:{secret}@host/db"
    for text in (url.render_as_string(hide_password=False), raw):
        quoting = f"FATAL: {secret} {secret!r} {text!r}"
        assert secret not in without_secrets(quoting, text).replace("FATAL", "").split(" ")
        assert f"'{secret}'" not in without_secrets(quoting, text)


def test_a_refused_storage_gets_no_lock_file(tmp_path) -> None:
    (tmp_path / "garbage.db").write_bytes(b"\x00garbage" * 1000)
    (tmp_path / "garbage.log").write_text("{]\n")
    url = f"sqlite:///{tmp_path}/other.db"
    optuna.create_study(storage=url, study_name="ksopt-search")
    before = sorted(tmp_path.iterdir())
    for storage in (f"sqlite:///{tmp_path}/garbage.db", f"journal:{tmp_path}/garbage.log", url):
        with pytest.raises(InvalidInputError):
            replay(storage)
        assert sorted(tmp_path.iterdir()) == before
