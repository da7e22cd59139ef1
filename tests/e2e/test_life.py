"""Starting, dying and stopping: the real command, real signals."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.support.server_process import ServerProcess, is_alive, run_to_end, until

pytestmark = pytest.mark.e2e

ENDLESS = {
    "messages": [{"role": "user", "content": "go on"}],
    "max_tokens": 700,
    "ignore_eos": True,
    "stream": True,
    "temperature": 0,
}


def read_stream(url: str, body: dict[str, object]) -> tuple[int, list[dict[str, object]], bool]:
    """Status, the data objects, and whether [DONE] came. A broken connection raises."""
    events: list[dict[str, object]] = []
    done = False
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as answer:
        if answer.status_code != 200:
            return answer.status_code, [json.loads(answer.read())], False
        for line in answer.iter_lines():
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                events.append(json.loads(line[6:]))
    return 200, events, done


def slow(model: Path, *more: str) -> ServerProcess:
    """A server whose streams last for seconds: many tokens, eight slots."""
    return ServerProcess("--gguf", str(model), "--parallel", "8", "--ctx-size", "8192", *more)


def test_kill_9_of_the_engine_under_eight_streams(tiny_model: Path) -> None:
    with slow(tiny_model) as server, ThreadPoolExecutor(8) as pool:
        engine = server.engine_pid
        assert engine is not None
        streams = [pool.submit(read_stream, server.url, ENDLESS) for _ in range(8)]
        until("all to arrive", lambda: metric(server, "glmserve_jobs_submitted_total") == 8)
        os.kill(engine, signal.SIGKILL)
        for stream in streams:
            status, events, done = stream.result()
            if status == 200:
                assert done or "error" in events[-1], events[-1]
            else:
                assert status == 503
        until("the server to be healthy again", server.is_healthy)
        assert server.engine_pid != engine
        _, events, done = read_stream(server.url, {**ENDLESS, "max_tokens": 5})
        assert done
        assert "error" not in events[-1]
        assert metric(server, "glmserve_engine_restarts_total") == 1
        last = server.engine_pid
        assert server.stop() == 0
        assert last is not None
        assert not is_alive(last)


def metric(server: ServerProcess, name: str) -> float | None:
    text = httpx.get(f"{server.url}/metrics", timeout=5).text
    for line in text.splitlines():
        if line.startswith(f"{name} "):
            return float(line.split()[1])
    return None


def test_sigterm_lets_running_requests_finish_and_takes_no_new_ones(tiny_model: Path) -> None:
    with slow(tiny_model, "--metrics") as server, ThreadPoolExecutor(4) as pool:
        url = server.url
        streams = [pool.submit(read_stream, url, ENDLESS) for _ in range(4)]
        until("all to arrive", lambda: metric(server, "glmserve_jobs_submitted_total") == 4)
        server.signal(signal.SIGTERM)
        until("new connections to be refused", lambda: refused(url))
        for stream in streams:
            status, events, done = stream.result()
            assert (status, done) == (200, True)
            assert events[-1]["choices"][0]["finish_reason"] == "length"  # type: ignore[index]
        assert server.wait_end() == 0, server.output


def refused(url: str) -> bool:
    try:
        httpx.get(f"{url}/health", timeout=5)
    except httpx.TransportError:
        return True
    return False


def test_after_the_grace_streams_end_with_an_error_event(tiny_model: Path) -> None:
    one_long = ["--gguf", str(tiny_model), "--parallel", "1", "--ctx-size", "32768", "--shutdown-grace", "0.2"]
    with ServerProcess(*one_long) as server, ThreadPoolExecutor(1) as pool:
        stream = pool.submit(read_stream, server.url, {**ENDLESS, "max_tokens": 32000})
        until("it to arrive", lambda: metric(server, "glmserve_jobs_submitted_total") == 1)
        server.signal(signal.SIGTERM)
        status, events, done = stream.result()
        assert status == 200
        assert not done
        assert "shutting down" in events[-1]["error"]["message"]  # type: ignore[index]
        assert server.wait_end() == 0


def test_a_second_sigterm_stops_at_once(tiny_model: Path) -> None:
    with slow(tiny_model) as server, ThreadPoolExecutor(8) as pool:
        streams = [pool.submit(read_stream, server.url, ENDLESS) for _ in range(8)]
        until("all to arrive", lambda: metric(server, "glmserve_jobs_submitted_total") == 8)
        server.signal(signal.SIGTERM)
        until("the first to be noticed", lambda: "SIGTERM: stopping" in server.output)
        server.signal(signal.SIGTERM)
        began = time.monotonic()
        assert server.wait_end() == 0
        assert time.monotonic() - began < 5
        for stream in streams:
            stream.exception()


def test_no_orphan_when_the_http_process_is_killed(tiny_model: Path) -> None:
    with ServerProcess("--gguf", str(tiny_model)) as server:
        engine = server.engine_pid
        assert engine is not None
        server.signal(signal.SIGKILL)
        server.wait_end()
        until("the engine to end", lambda: not is_alive(engine), 5)


def test_a_port_in_use_is_told_in_one_sentence(tiny_model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, output = run_to_end(["--gguf", str(tiny_model), "--port", str(port)])
    assert code == 5
    assert f"cannot listen on 127.0.0.1 port {port}: Address already in use; choose another with --port" in output
    assert "Traceback" not in output


def test_a_wrong_grammar_for_all_requests_ends_the_start(tiny_model: Path) -> None:
    code, output = run_to_end(["--gguf", str(tiny_model), "--port", "0", "--grammar", "root ::= ("])
    assert code == 2, output
    assert "error: --grammar: the grammar cannot be used" in output
    assert "ready in" not in output


def test_files_that_are_no_certificate_are_told_before_anything_starts(tiny_model: Path) -> None:
    files = ["--ssl-cert-file", "README.md", "--ssl-key-file", "README.md"]
    code, output = run_to_end(["--gguf", str(tiny_model), "--port", "0", *files])
    assert code == 2, output
    assert "are no certificate and key that belong together" in output
    assert "Traceback" not in output


def test_a_model_that_llama_cpp_refuses_is_told_with_its_own_words(tmp_path: Path) -> None:
    from tests.support.tiny_gguf import write_tiny_gguf

    model = write_tiny_gguf(tmp_path / "odd.gguf", architecture="not-an-architecture")
    code, output = run_to_end(["--gguf", str(model)])
    assert code == 4, output
    assert [line for line in output.splitlines() if line.startswith("error:") and "not-an-architecture" in line]
    assert "the model could not be loaded" not in output, "told once, in llama.cpp's own words"
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 7\n", "LFS"),
        (b"<!DOCTYPE html><html></html>", "a web page"),
        (b"GGUF\x03\x00\x00\x00", "cut|truncated|ends"),
        (b"", "empty"),
    ],
)
def test_a_file_that_is_no_model_is_told_in_one_sentence(tmp_path: Path, content: bytes, words: str) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(content)
    code, output = run_to_end(["--gguf", str(model)])
    assert code == 3, output
    assert any(word in output for word in words.split("|")), output
    assert len([line for line in output.splitlines() if line.startswith("error:")]) == 1
    assert "Traceback" not in output


def test_a_cut_model_is_refused_before_anything_is_loaded(tiny_model: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny_model.read_bytes()[:-1000])
    code, output = run_to_end(["--gguf", str(cut)])
    assert code == 3
    assert str(cut) in output
    assert "Traceback" not in output


def test_ctrl_c_is_a_clean_stop(tiny_model: Path) -> None:
    with ServerProcess("--gguf", str(tiny_model)) as server:
        server.signal(signal.SIGINT)
        assert server.wait_end() == 0
        assert "Traceback" not in server.output


def test_a_unix_socket_serves_and_is_removed(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "server.sock"
    with ServerProcess("--gguf", str(tiny_model), "--host", str(path), wait=False) as server:
        until("the socket", path.exists)
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as client:
            until("health over the socket", lambda: client.get("http://localhost/health").status_code == 200)
        assert server.stop() == 0
    assert not path.exists()


def test_while_loading_health_says_so_and_the_rest_is_503(tiny_model: Path) -> None:
    """The engine is stopped in mid-start, so that loading lasts as long as the test looks."""
    port = free_port()
    with ServerProcess("--gguf", str(tiny_model), "--port", str(port), wait=False) as server:
        engine = until("the engine process", lambda: server.engine_pid)
        os.kill(engine, signal.SIGSTOP)
        url = f"http://127.0.0.1:{port}"

        def answer() -> httpx.Response | None:
            try:
                return httpx.get(f"{url}/health", timeout=5)
            except httpx.TransportError:
                return None

        health = until("an answer", answer)
        assert health.status_code == 503
        assert health.json()["error"]["type"] == "unavailable_error"
        turned_away = httpx.post(f"{url}/v1/chat/completions", json=ENDLESS, timeout=5)
        assert turned_away.status_code == 503
        assert int(turned_away.headers["retry-after"]) >= 1
        os.kill(engine, signal.SIGCONT)
        server.wait_ready()
        assert server.stop() == 0


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
