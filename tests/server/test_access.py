"""A local server answers no page of another site, and its own clients as before."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import pytest
import tiny

import eagle3_jax as e3

pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")
pytest.importorskip("starlette")

from starlette.testclient import TestClient

from eagle3_jax.server.app import Server

ADDRESS = "http://127.0.0.1:8000"
PATHS = ["/", "/watch", "/v1/models", "/version", "/health", "/metrics", "/v1/completions", "/no"]


@functools.cache
def application() -> Any:
    return Server(e3.SpeculativeDecoder(tiny.target(13)), capacity=64, hosts=["Box.Local"]).app


def client(address: str = ADDRESS) -> TestClient:
    """Returns a client of a server whose engine is not started: it compiles for ever."""
    return TestClient(application(), base_url=address)


def post(headers: dict[str, str], path: str = "/v1/completions") -> Any:
    return client().post(path, content=b'{"prompt": [1]}', headers=headers)


JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("Host", "evil.example:8000"),
        ("Host", "127.0.0.1.evil.example"),
        ("Host", "localhost@evil.example"),
        ("Host", "localhost:evil"),
        ("Host", "192.168.1.9:8000"),
        ("Host", "[::2]"),
        ("Host", "::1"),
        ("Host", ""),
        ("Origin", "https://evil.example"),
        ("Origin", "http://localhost.evil.example:8000"),
        ("Origin", "http://192.168.1.9"),
        ("Origin", "null"),
        ("Origin", "localhost"),
        ("Origin", ""),
    ],
)
def test_a_page_of_another_site_reaches_nothing(path: str, header: str, value: str) -> None:
    for method in ("GET", "POST", "OPTIONS"):
        answer = client().request(method, path, headers={**JSON, header: value})
        assert answer.status_code == 403
        error = answer.json()["error"]
        assert error["code"] == 403 and error["message"].startswith(f"{header} is {value!r}")


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1:8000", "localhost", "LOCALHOST:9000", "[::1]:8000", "[0:0:0:0:0:0:0:1]",
        "box.local:8000", "BOX.LOCAL",
    ],
)  # fmt: skip
def test_the_names_of_this_machine_are_answered(host: str) -> None:
    for origin in ({}, {"Origin": f"http://{host}"}):
        assert client().get("/v1/models", headers={"Host": host, **origin}).status_code == 200
        answer = post({**JSON, "Host": host, **origin})
        assert (answer.status_code, answer.json()["error"]["type"]) == (
            503,
            "ServiceUnavailableError",
        )


@pytest.mark.parametrize("address", ["192.168.1.9", "[fd00::9]", "[::ffff:192.168.1.9]"])
def test_the_address_that_a_client_connected_to_is_answered(address: str) -> None:
    local = client(f"http://{address}:8000")
    host = "192.168.1.9" if "." in address else address
    assert local.get("/version", headers={"Host": f"{host}:8000"}).status_code == 200
    assert local.get("/version", headers={"Host": "192.168.1.10"}).status_code == 403


@pytest.mark.parametrize("hosts", [[], [b"localhost", b"evil.example"]])
def test_a_request_needs_one_host(hosts: list[bytes]) -> None:
    """A request of HTTP/1.0 may have none."""
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    headers = [(b"host", host) for host in hosts]
    scope = {"type": "http", "method": "GET", "path": "/version", "headers": headers}
    asyncio.run(application()({**scope, "query_string": b""}, None, send))
    assert sent[0]["status"] == 403


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/watch"])
@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None]
)
def test_a_form_is_refused_and_told_its_header(path: str, kind: str | None) -> None:
    answer = post({} if kind is None else {"Content-Type": kind}, path)
    assert answer.status_code == 415
    assert "-H 'Content-Type: application/json'" in answer.json()["error"]["message"]


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/JSON"])
def test_json_has_parameters_and_any_case(kind: str) -> None:
    assert post({"Content-Type": kind}).status_code == 503


def test_a_preflight_gets_no_permission() -> None:
    wishes = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "a"}
    for origin in ("http://localhost:3000", "https://evil.example"):
        answer = client().options("/v1/completions", headers={"Origin": origin, **wishes})
        assert answer.status_code in (403, 405)
        assert not [name for name in answer.headers if name.startswith("access-control")]


def test_the_model_is_found_by_its_id() -> None:
    (model,) = client().get("/v1/models").json()["data"]
    assert client().get(f"/v1/models/{model['id']}").json() == model
    for name in ("other", "an/other", f"{model['id']}/x"):
        answer = client().get(f"/v1/models/{name}")
        assert answer.status_code == 404
        assert answer.json()["error"]["param"] == "model"
