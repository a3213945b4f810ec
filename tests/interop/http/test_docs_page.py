"""The page at /docs loads everything from the gateway, and its script can show the whole contract."""

import asyncio
import json
import re
import shutil
from pathlib import Path

import aiohttp
import yaml

from tests.support.gateway import GatewayProcess

CHECK = Path(__file__).with_name("viewer_check.js")


async def test_the_docs_page_shows_the_whole_contract(gateway: GatewayProcess, tmp_path: Path) -> None:
    host, port = gateway.address("http")
    async with aiohttp.ClientSession(f"http://{host}:{port}") as http:
        async with http.get("/openapi") as response:
            assert (response.status, response.content_type) == (200, "application/json")
            contract = await response.json()
        for path, accept in (
            ("/openapi.yaml", "*/*"),
            ("/openapi", "application/yaml"),
            ("/openapi/v3", "application/*"),
        ):
            async with http.get(path, headers={"Accept": accept}) as response:
                assert response.status == 200
                assert yaml.safe_load(await response.text()) == contract
        for path in ("/openapi", "/openapi/v3"):  # the paths that clients of Strimzi's bridge use
            async with http.get(path, headers={"Accept": "application/vnd.kafka.json.v2+json"}) as response:
                assert (response.status, response.content_type) == (200, "application/json")
                assert await response.json() == contract
        async with http.get("/openapi", headers={"X-Forwarded-Path": "/bridge"}) as response:
            assert (await response.json())["servers"] == [{"url": "/bridge"}]
        async with http.get("/docs") as response:
            assert (response.status, response.content_type) == (200, "text/html")
            assert "default-src 'none'" in response.headers["Content-Security-Policy"]
            page = await response.text()
        needed = re.findall(r'(?:src|href)="([^"]+)"', page)
        assert {"docs/viewer.js", "docs/viewer.css"} <= set(needed)
        for path in needed:
            assert "//" not in path  # no other host
            async with http.get(f"/{path}") as response:
                assert response.status == 200
                (tmp_path / Path(path).name).write_bytes(await response.read())
        async with http.get("/docs/other.js") as response:
            assert response.status == 404
    node = shutil.which("node")
    assert node is not None
    (tmp_path / "openapi.json").write_text(json.dumps(contract))
    process = await asyncio.create_subprocess_exec(
        node, str(CHECK), str(tmp_path / "viewer.js"), str(tmp_path / "openapi.json"), stdout=asyncio.subprocess.PIPE
    )
    printed, _ = await process.communicate()
    shown = json.loads(printed)
    operations = sum(
        "operationId" in entry
        for item in contract["paths"].values()
        for entry in item.values()
        if isinstance(entry, dict)
    )
    assert shown["failure"] == ""
    assert shown["operations"] == shown["forms"] == operations
