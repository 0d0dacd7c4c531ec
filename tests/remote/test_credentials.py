"""Who we are: profiles as the AWS tools keep them, the environment before them, and no secret anywhere."""

import logging
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

import layerstore
from layerstore import Keep, Store
from layerstore.errors import AlreadyExists, InvalidInput, LayerstoreError, StorageIO, Unsupported
from layerstore.history import pushed_to
from layerstore.redact import redacted
from layerstore.remote import Bucket
from layerstore.remote.credentials import s3_options
from tests.remote.conftest import KEY, SECRET
from tests.unit.checkpoints import Checkpoints

CREDENTIALS = f"""
[default]
aws_access_key_id = DEFAULTDEFAULT
aws_secret_access_key = default-secret

[lab]
aws_access_key_id = {KEY}
aws_secret_access_key = {SECRET}
aws_session_token = a-token%with$signs
"""
CONFIG = """
[default]
region = eu-west-1

[profile lab]
region = us-west-2
endpoint_url = http://lab:9000

[profile ours]
services = minio
region = us-east-2
aws_access_key_id = AKIAOURS
aws_secret_access_key = ours

[services minio]
s3 =
  endpoint_url = http://minio:9000
  addressing_style = path

[profile role]
role_arn = arn:aws:iam::1:role/reader
source_profile = default
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Return an environment whose profiles are ours."""
    (tmp_path / "credentials").write_text(CREDENTIALS)
    (tmp_path / "config").write_text(CONFIG)
    return {
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "credentials"),
        "AWS_CONFIG_FILE": str(tmp_path / "config"),
    }


@pytest.mark.parametrize(
    ("profile", "expected"),
    [
        (
            None,
            {"region": "eu-west-1", "access_key_id": "DEFAULTDEFAULT", "secret_access_key": "default-secret"},
        ),
        (
            "lab",
            {
                "region": "us-west-2",
                "endpoint": "http://lab:9000",
                "access_key_id": KEY,
                "secret_access_key": SECRET,
                "session_token": "a-token%with$signs",
            },
        ),
        (
            "ours",
            {
                "region": "us-east-2",
                "endpoint": "http://minio:9000",
                "access_key_id": "AKIAOURS",
                "secret_access_key": "ours",
            },
        ),
    ],
)
def test_profiles(environment: dict[str, str], profile: str | None, expected: dict[str, str]) -> None:
    """From both files; an endpoint may also be that of a service."""
    assert s3_options(environment | ({} if profile is None else {"AWS_PROFILE": profile})) == expected


def test_the_environment_goes_before(environment: dict[str, str]) -> None:
    """obstore reads it by itself."""
    ours = {"AWS_ACCESS_KEY_ID": "a", "AWS_REGION": "b", "AWS_ENDPOINT_URL": "http://c", "AWS_PROFILE": "lab"}
    assert s3_options(environment | ours) == {}


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "the profile's endpoint_url"])
def test_an_endpoint_without_a_scheme(environment: dict[str, str], name: str) -> None:
    """Refused before anything is asked there."""
    if name.startswith("AWS"):
        environment[name] = "minio:9000"
    else:
        config = Path(environment["AWS_CONFIG_FILE"])
        config.write_text(config.read_text().replace("http://lab:9000", "lab:9000"))
        environment["AWS_PROFILE"] = "lab"
    with pytest.raises(InvalidInput, match=f"^{name} is not a URL"):
        s3_options(environment)


def test_no_profile_at_all(tmp_path: Path) -> None:
    """A machine's own role, say: obstore asks for it."""
    nothing = {"AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "a"), "AWS_CONFIG_FILE": str(tmp_path / "b")}
    assert s3_options(nothing) == {}
    with pytest.raises(InvalidInput, match="no profile 'lab'"):
        s3_options(nothing | {"AWS_PROFILE": "lab"})


def test_a_file_that_is_malformed(environment: dict[str, str]) -> None:
    """Its path is told, and none of its text, which may hold a key."""
    Path(environment["AWS_SHARED_CREDENTIALS_FILE"]).write_text(f"aws_secret_access_key {SECRET}")
    with pytest.raises(InvalidInput, match="credentials cannot be read") as told:
        s3_options(environment)
    assert SECRET not in f"{told.value!r} {told.value.__cause__!r}"


def test_a_role_needs_boto3(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """And says so; with boto3 it is asked when a request is made."""
    assumed = environment | {"AWS_PROFILE": "role"}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(Unsupported, match="role"):
        s3_options(assumed)


def test_secrets_are_nowhere(
    s3: str,
    store: Store,
    saved: Checkpoints,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Not in the store, the bucket, the mirror, errors, representations or logs; nor is the key's id."""
    caplog.set_level(logging.DEBUG)
    saved.into(store, 2)
    store.remotes.add("origin", s3)
    store.push()
    with layerstore.open(s3) as remote:
        remote.compose("r@2").write(tmp_path / "out")
    texts = [repr(Bucket(s3)), repr(store.remotes.urls()), repr(remote.repo), caplog.text]
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr("layerstore.remote.bucket.REMOTE_TRIES", 1)
    with pytest.raises(StorageIO) as told:
        store.push()
    texts += [str(told.value), repr(told.value), str(told.value.hint)]
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://me:{SECRET}@127.0.0.1:9")
    with pytest.raises(StorageIO) as told:
        store.push()
    texts += [str(told.value), repr(told.value), repr(told.value.__cause__)]
    files = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and "s3" not in path.parts)
    for secret in (KEY, SECRET):
        assert secret not in " ".join(texts)
        assert secret.encode() not in files


@pytest.mark.fault(121)
@pytest.mark.parametrize(
    "url",
    [
        "s3://key:secret@bucket/prefix",
        "s3://key:sec/ret+secret@bucket/prefix",
        "s3://key:secret",
        "s3://bucket/prefix#secret",
        "s3:/key:secret@bucket/prefix",
        "s3:///key:secret@bucket/prefix",
        "s3:key:secret@bucket",
        "s3:\\\\key:secret@bucket",
        "s3://key%3Asecret%40bucket/prefix",
        "s3:///key%3Asecret%40bucket/prefix",
        "s3://key:sec ret secret@bucket",
        "s3://[key:secret@bucket",
        "s3://key:secret@bucket\u2100/prefix",
        "S3://secret@bucket",
        "key:secret@bucket/prefix",
        "memory://key:secret@x",
        "file://key:secret@host/folder",
        "file:///folder#secret",
        "https://key:sec/secret@host/prefix",
        "s3://bucket/prefix?X-Amz-Signature=secret",
        "https://bucket.s3.amazonaws.com/prefix",
        "s3://",
        "file://relative/path",
        "ftp://host/path",
    ],
)
def test_urls_that_are_none(store: Store, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    They are refused in one line, which does not repeat a secret; nothing is recorded.

    Also where something else was expected, if it begins as a URL does and is one word.
    """
    monkeypatch.chdir(tmp_path)
    attempts: list[Callable[[], object]] = [
        lambda: store.remotes.add("origin", url),
        lambda: store.push(url),
        lambda: store.gc(Keep(last=1), pushed_to=url),
    ]
    elsewhere: list[Callable[[], object]] = [
        lambda: store.remotes.add(url, "s3://bucket"),  # the other way round
        lambda: layerstore.open(url),
        lambda: layerstore.clone(url, store.path / "clone"),
        lambda: layerstore.init(url),
        lambda: store.show(url),
    ]
    for attempt in (*attempts, *(elsewhere if ":/" in url and " " not in url else ())):
        with pytest.raises(LayerstoreError) as told:
            attempt()
        found = told.value
        chain = [found, found.__cause__, None if found.__suppress_context__ else found.__context__]
        texts = [*map(str, chain), *map(repr, chain), str(found.hint), *traceback.format_exception(found)[-1:]]
        assert "secret" not in " ".join(texts)
    assert store.remotes.urls() == {}
    assert b"secret" not in b"".join(path.read_bytes() for path in store.path.rglob("*") if path.is_file())


@pytest.mark.fault(121)
@pytest.mark.parametrize(
    "text",
    [
        "cannot mount nfs01:/export/ckpt",
        "/data/run:/x is full",
        "http://[::1]:9000/b: no answer",
        "(file:///data/a@1), 'file:///data/b:c@2'",
        "r@2: 12:30:01, r@4",
    ],
)
def test_what_is_no_key_stays_legible(text: str) -> None:
    """Paths of mounts, folders with colons, an endpoint that is a number."""
    assert redacted(text) == text


@pytest.mark.fault(121)
@pytest.mark.parametrize("sign", ["a", ":", "a:", "'a:", "(", "a:'", "s3:/", "@", "a@", "://"])
def test_a_long_word_is_read_in_a_moment(sign: str) -> None:
    """Messages repeat what somebody gave as an argument."""
    before = time.process_time()
    redacted(sign * 100_000)
    assert time.process_time() - before < 5


@pytest.mark.fault(121)
def test_a_key_that_somebody_has_written_into_the_notes_is_not_shown(store: Store) -> None:
    """In a list, an error, or what is written anew; the remote is refused, and can be removed."""
    store.repo.layout.remotes.write_text('{"origin": "s3://key:secret@bucket", "other": "s3://bucket"}')
    store.repo.layout.pushed.write_text('{"s3://key:secret@bucket": []}')

    assert store.remotes.urls() == {"origin": "s3://…", "other": "s3://bucket"}
    assert list(pushed_to(store.repo)) == ["s3://…"]
    with pytest.raises(AlreadyExists) as told:
        store.remotes.add("origin", "s3://bucket")
    assert "secret" not in repr(told.value)
    with pytest.raises(InvalidInput, match="holds more than a bucket"):
        store.push("origin")
    assert store.remotes.remove("origin") == "s3://…"
    assert store.remotes.urls() == {"other": "s3://bucket"}
