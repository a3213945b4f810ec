"""An object store that speaks S3: moto's server, in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass

import boto3
from botocore.exceptions import EndpointConnectionError

from tests.support.waiting import wait_until

KEY, SECRET, REGION = "ours", "secret", "eu-1"


@dataclass(frozen=True)
class ObjectStore:
    """A running store with one bucket."""

    url: str
    bucket: str

    @property
    def of_delta(self) -> dict[str, str]:
        """Storage options by delta-rs's names."""
        return {
            "AWS_ENDPOINT_URL": self.url, "AWS_ALLOW_HTTP": "true", "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": REGION,
        }  # fmt: skip

    @property
    def of_iceberg(self) -> dict[str, str]:
        """Catalog properties by pyiceberg's names."""
        return {"s3.endpoint": self.url, "s3.access-key-id": KEY, "s3.secret-access-key": SECRET, "s3.region": REGION}


@contextlib.asynccontextmanager
async def object_store(bucket: str) -> AsyncIterator[ObjectStore]:
    """Run a store until the block ends."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port),
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    client = boto3.client(
        "s3", endpoint_url=url, aws_access_key_id=KEY, aws_secret_access_key=SECRET, region_name=REGION
    )

    def made() -> bool:
        assert process.returncode is None
        with contextlib.suppress(EndpointConnectionError):
            client.create_bucket(Bucket=bucket, CreateBucketConfiguration={"LocationConstraint": REGION})
            return True
        return False

    try:
        await wait_until(lambda: asyncio.to_thread(made))
        yield ObjectStore(url, bucket)
    finally:
        client.close()
        process.kill()
        await process.wait()
