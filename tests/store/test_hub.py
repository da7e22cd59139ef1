"""Every way in which asking the hub for a list can end."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from server.errors import ConfigError, FetchError
from server.store.hub import DEFAULT_ENDPOINT, Hub
from server.store.names import HubName
from tests.support.fake_hub import FakeHub, Status, WebPage

REPO = "unsloth/GLM-GGUF"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setenv("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")
    with FakeHub() as hub:
        hub.add(REPO, {"m.gguf": b"model", "README.md": b"# GLM"})
        yield hub


def refusal(hub: Hub, name: str = REPO, revision: str = "main") -> str:
    with pytest.raises((FetchError, ConfigError)) as caught:
        hub.list_files(HubName(name, revision=revision), sleep=lambda _: None)
    assert "\n" not in caught.value.message
    return caught.value.message


def test_a_listing_has_sizes_and_sums(hub: FakeHub) -> None:
    listing = Hub(hub.endpoint).list_files(HubName(REPO))
    assert listing.commit == hub.repos[REPO].head
    assert [(file.path, file.size, file.sha256 is None) for file in listing.files] == [
        ("README.md", 5, True),
        ("m.gguf", 5, False),
    ]
    source = Hub(hub.endpoint, token="hf_right").source(listing, listing.files[1])
    assert source.url == f"{hub.endpoint}/{REPO}/resolve/{listing.commit}/m.gguf"
    assert (source.etag, source.token) == (listing.files[1].sha256, "hf_right")


def test_an_old_revision_can_be_asked_for(hub: FakeHub) -> None:
    old = hub.repos[REPO].head
    hub.commit(REPO, {"m.gguf": b"another model"})
    assert Hub(hub.endpoint).list_files(HubName(REPO, revision=old)).files[1].size == 5
    assert f"{REPO} has no revision 'v9'" in refusal(Hub(hub.endpoint), revision="v9")


def test_missing_and_private_repositories(hub: FakeHub) -> None:
    hub.add("a/private", {"m.gguf": b"x"}, private=True)
    for name in ("a/none", "a/private"):
        message = refusal(Hub(hub.endpoint), name)
        assert f"there is no model '{name}' at {hub.endpoint}, or it is private and needs a token" in message
    assert "did you mean unsloth/GLM-5.2-GGUF?" in refusal(Hub(hub.endpoint), "unsloth/GLM-5.2-GUFF")
    assert "or the token may not see it" in refusal(Hub(hub.endpoint, token="hf_other"), "a/private")
    assert "does not know the token" in refusal(Hub(hub.endpoint, token="hf_wrong"))
    assert Hub(hub.endpoint, token="hf_right").list_files(HubName("a/private")).files


def test_a_gate_may_stand_before_the_list(hub: FakeHub) -> None:
    gate = Status(401, {"X-Error-Code": "GatedRepo"})
    hub.fault(gate, site="hub", times=None)
    assert f"is gated; accept its terms at {hub.endpoint}/{REPO}, then give a token" in refusal(Hub(hub.endpoint))
    assert "the token may not see it; ask for access" in refusal(Hub(hub.endpoint, token="hf_right"))
    hub.clear_faults()
    disabled = Status(403, {"X-Error-Message": "Access to this resource is disabled."})
    hub.fault(disabled, site="hub")
    assert "has been disabled" in refusal(Hub(hub.endpoint))


def test_a_busy_hub_is_asked_again(hub: FakeHub) -> None:
    waited: list[float] = []
    hub.fault(Status(503), site="hub")
    hub.fault(Status(429, {"Retry-After": "7"}), site="hub", skip=0)
    assert Hub(hub.endpoint).list_files(HubName(REPO), sleep=waited.append).files
    assert waited == [1.0, 7.0]
    hub.fault(Status(503), site="hub", times=None)
    assert "answers 503 Service Unavailable for unsloth/GLM-GGUF; try later" in refusal(Hub(hub.endpoint))
    hub.clear_faults()
    hub.fault(Status(429, {"Retry-After": "4000"}), site="hub")
    assert "answers 429" in refusal(Hub(hub.endpoint))


def test_no_network_is_one_sentence() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{free.getsockname()[1]}"
    message = refusal(Hub(endpoint))
    assert f"{endpoint} cannot be reached (Connection refused); check the network" in message
    assert "fetch unsloth/GLM-GGUF on a connected machine" in message


def test_what_is_no_hub_is_told(hub: FakeHub) -> None:
    hub.fault(WebPage(), site="hub")
    assert "does not answer as a model hub (no JSON)" in refusal(Hub(hub.endpoint))


def test_a_hub_that_tells_no_sizes_is_of_no_use(hub: FakeHub) -> None:
    body = b'{"id": "unsloth/GLM-GGUF", "sha": "c0ffee", "siblings": [{"rfilename": "m.gguf"}]}'
    hub.fault(Status(200, {"Content-Type": "application/json"}, body), site="hub")
    assert "does not tell how large the files of unsloth/GLM-GGUF are" in refusal(Hub(hub.endpoint))


def test_impossible_names_and_forbidden_networks(hub: FakeHub) -> None:
    assert "cannot be a repository's name" in refusal(Hub(hub.endpoint), "a--b/c..d")
    assert "--offline or HF_HUB_OFFLINE forbids it" in refusal(Hub(hub.endpoint, offline=True))
    assert hub.requests == []


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, Hub(DEFAULT_ENDPOINT)),
        ({"HF_ENDPOINT": "https://mirror.example/"}, Hub("https://mirror.example")),
        ({"HF_TOKEN": "hf_x", "HF_HUB_OFFLINE": "yes"}, Hub(DEFAULT_ENDPOINT, "hf_x", offline=True)),
        ({"TRANSFORMERS_OFFLINE": "1"}, Hub(DEFAULT_ENDPOINT, offline=True)),
        ({"HF_HUB_OFFLINE": "0", "HF_TOKEN": ""}, Hub(DEFAULT_ENDPOINT)),
    ],
)
def test_the_environment_is_huggingface_hubs(environment: dict[str, str], expected: Hub) -> None:
    assert Hub.from_environment(environment) == expected


def test_an_endpoint_must_be_an_address() -> None:
    with pytest.raises(ConfigError, match=r"HF_ENDPOINT is 'hub\.example', but must be an address"):
        Hub.from_environment({"HF_ENDPOINT": "hub.example/"})
