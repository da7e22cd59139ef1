"""python -m server fetch, and --gguf with a name: as a new user would try them, right and wrong."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from server.cli import main
from server.cli.build import build_config
from server.cli.commands.fetch import Rate
from server.cli.fetch_display import BarWatcher, JsonWatcher, LineWatcher, Meter, time_text, watcher_for
from server.cli.settings import Settings
from server.cli.values import BadValue
from server.errors import ConfigError, FetchError
from server.store.fetch import FileProgress, Plan, Stage
from server.store.hub import Listing
from server.store.quants import RemoteFile, RemoteQuant
from tests.cli.reading import settings_of
from tests.support.fake_hub import FakeHub, Slow
from tests.support.gguf_bytes import write_shards

REPO = "unsloth/GLM-GGUF"


def settings_for(*arguments: str) -> Settings:
    return settings_of(*arguments, env=os.environ)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    (tmp_path / "made").mkdir()
    files = {f"Q4_K_M/{path.name}": path.read_bytes() for path in write_shards(tmp_path / "made", 2)}
    with FakeHub() as hub:
        hub.add(REPO, {**files, "Q8_0/x-Q8_0.gguf": b"x" * 5000, "README.md": b"# GLM"})
        for name in [name for name in os.environ if name.startswith(("HF_", "GLMSERVE_", "LLAMA_ARG_"))]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.setenv("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")
        monkeypatch.setenv("GLMSERVE_MODELS_DIR", str(tmp_path / "models"))
        yield hub


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["fetch", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_model_comes_and_can_be_started_by_its_name(
    hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, f"{REPO}:Q4_K_M")
    folder = tmp_path / "models" / "unsloth--GLM-GGUF" / "Q4_K_M"
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith(f"{REPO}:Q4_K_M, 2 files, ")
    assert "(nothing there yet), revision " in lines[0]
    assert lines[1:3] == ["big-00001-of-00002.gguf: complete (1 of 2)", "big-00002-of-00002.gguf: complete (2 of 2)"]
    assert lines[3] == f"complete and checked; start it with: python -m server --gguf {folder}"
    n_requests = len(hub.requests)
    config = build_config(settings_for("--gguf", f"{REPO}:q4_k_m"))
    assert config.engine.model.path == str(folder / "big-00001-of-00002.gguf")
    assert len(hub.requests) == n_requests  # what is here is not asked for
    code, out, _ = run(capsys, REPO, "--quant", "Q4_K_M")
    assert "(all there)" in out
    code, out, _ = run(capsys, REPO, "--quant", "Q4_K_M", "--offline")
    assert out == lines[3] + "\n"


def test_the_server_fetches_what_is_not_here(hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for i, arguments in enumerate((
        ("--gguf", f"{REPO}:Q4_K_M"),
        ("-hf", f"{REPO}:Q4_K_M"),
        ("-hf", REPO, "-hff", "Q4_K_M/big-00001-of-00002.gguf"),
    )):  # fmt: skip
        folder = tmp_path / str(i)
        config = build_config(settings_for(*arguments, "--models-dir", str(folder), "--hf-token", "hf_right"))
        assert config.engine.model.path.startswith(str(folder))
        assert "complete (2 of 2)" in capsys.readouterr().err
    assert {request.token for request in hub.requests if request.site == "hub"} == {"hf_right"}


def test_what_is_in_hugging_faces_cache_is_used(
    hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshot = tmp_path / "hf" / "hub" / "models--unsloth--GLM-GGUF" / "snapshots" / "c0ffee" / "Q4_K_M"
    snapshot.mkdir(parents=True)
    (snapshot.parents[2] / "refs").mkdir()
    (snapshot.parents[2] / "refs" / "main").write_text("c0ffee")
    write_shards(snapshot, 2)
    assert run(capsys, f"{REPO}:Q4_K_M")[1].endswith(f"--gguf {snapshot}\n")
    assert build_config(settings_for("-hf", f"{REPO}:Q4_K_M")).engine.model.path.startswith(str(snapshot))
    assert hub.requests == []


def test_a_bundle_is_a_folder_with_a_model_inside(tmp_path: Path) -> None:
    (tmp_path / "data" / "model").mkdir(parents=True)
    (tmp_path / "bagit.txt").write_text("BagIt-Version: 1.0\n")
    first = write_shards(tmp_path / "data" / "model", 2)[0]
    assert build_config(settings_for("--gguf", str(tmp_path))).engine.model.path == str(first)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ((), 2, "python -m server fetch needs NAME"),
        (("nobody/nothing",), 6, "there is no model 'nobody/nothing' at http://127.0.0.1"),
        ((REPO,), 2, f"{REPO} has 2 quants; say which, as in {REPO}:Q4_K_M: Q4_K_M ("),
        ((f"{REPO}:Q5_K_M",), 2, f"{REPO} has no quant 'Q5_K_M'; it has Q4_K_M ("),
        ((REPO, "--revision", "v9", "-q", "Q8_0"), 6, f"{REPO} has no revision 'v9'"),
        ((f"{REPO}:Q8_0", "--quant", "Q4_K_M"), 2, "name different quants"),
        (("a/gated",), 6, "the model is gated or private; accept its terms"),
        (("glm-5.22",), 2, "did you mean glm-5.2"),
        (("tiny-glm",), 2, "is on this machine already"),
        (("./x.gguf",), 2, "there is no 'x.gguf' here, and a path is nothing to fetch"),
        ((f"{REPO}:Q8_0", "--offline"), 6, "forbids fetching it"),
        ((f"{REPO}:Q8_0", "--limit-rate", "fast"), 2, "--limit-rate is 'fast', but must be bytes per second"),
        ((f"{REPO}:Q8_0", "--to", "/dev/null/x"), 6, "the folder '/dev/null/x' cannot be used: Not a directory"),
    ],
)
def test_mistakes_are_one_sentence(
    hub: FakeHub, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: int, words: str
) -> None:
    hub.add("a/gated", {"m.gguf": b"x"}, gated=True)
    got, out, err = run(capsys, *arguments)
    assert got == code
    assert err.count("\n") == 1
    assert err.startswith("error: ")
    assert words in err
    assert "complete" not in out


def test_json_lines_tell_a_program_everything(hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, f"{REPO}:Q4_K_M", "--to", str(tmp_path / "to"), "--json")
    assert code == 0
    events = [json.loads(line) for line in out.splitlines()]
    assert [event["event"] for event in events] == ["begin", "file", "file", "done"]
    assert events[0]["quant"] == "Q4_K_M"
    assert events[0]["missing_bytes"] == events[0]["bytes"] == sum(file["bytes"] for file in events[0]["files"])
    assert events[-1]["path"] == str(tmp_path / "to" / "big-00001-of-00002.gguf")
    code, out, err = run(capsys, "nobody/nothing", "--json")
    assert json.loads(out)["code"] == "fetch_error"
    assert json.loads(out)["message"] in err


def test_ctrl_c_and_sigterm_say_how_to_go_on(hub: FakeHub, tmp_path: Path) -> None:
    hub.commit(REPO, {"Q8_0/x-Q8_0.gguf": b"x" * 400_000})
    hub.fault(Slow(20_000), times=None)
    for number in (signal.SIGINT, signal.SIGTERM):
        folder = tmp_path / f"to {number.name}"
        arguments = ["fetch", f"{REPO}:Q8_0", "--connections", "2", "--to", str(folder)]
        process = subprocess.Popen(
            [sys.executable, "-m", "server", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        part = folder / "x-Q8_0.gguf.part"  # its own sign; the hub may still be sending to the one before
        while not part.exists() and process.poll() is None:
            hub.closing.wait(0.01)
        process.send_signal(number)
        _, err = process.communicate(timeout=30)
        assert process.returncode == 130
        assert err == (f"\nstopped; to go on from here: python -m server fetch {REPO}:Q8_0 --to '{folder}'\n")
        assert part.exists()


# ── how it is shown ──────────────────────────────────────────────────────────────────────────────────────────────────

FILES = tuple(RemoteFile(f"m-0000{i}-of-00002.gguf", 1000, "a" * 64) for i in (1, 2))
PLAN = Plan(Listing("a/b", "c0ffee", FILES), RemoteQuant("Q4", FILES), Path("/m"), n_there=500, free_bytes=9000)


def half_way() -> list[FileProgress]:
    return [
        FileProgress(FILES[0], Stage.DONE, n_there=1000, n_received=1000),
        FileProgress(FILES[1], Stage.GETTING, n_there=500, n_received=500),
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_each_kind_of_output_has_its_watcher() -> None:
    assert isinstance(watcher_for(json=True, out=Terminal()), JsonWatcher)
    assert isinstance(watcher_for(json=False, out=Terminal()), BarWatcher)
    assert isinstance(watcher_for(json=False, out=io.StringIO()), LineWatcher)


def test_lines_come_now_and_then() -> None:
    out = io.StringIO()
    with LineWatcher(out, every_s=0.0) as watcher:
        watcher.begin(PLAN)
        watcher.tick(half_way())
        files = half_way()
        files[1].stage, files[1].n_checked = Stage.CHECKING, 250
        watcher.tick(files)
        watcher.say("a note")
    lines = out.getvalue().splitlines()
    assert lines[0] == "a/b:Q4, 2 files, 2.0 KiB (1.5 KiB to get), revision c0ffee, into /m"
    assert lines[1] == "m-00001-of-00002.gguf: complete (1 of 2)"
    assert lines[2].startswith("m-00002-of-00002.gguf (2 of 2): 1.5 KiB of 2.0 KiB (75.0 %), ")
    assert lines[2].endswith(" left")
    assert lines[3] == "m-00002-of-00002.gguf: checked 250 B of 1000 B"
    assert lines[4] == "a note"
    quiet = io.StringIO()
    LineWatcher(quiet, every_s=60).tick([FileProgress(FILES[0], Stage.GETTING)])
    assert quiet.getvalue() == ""


def test_json_progress_has_rate_and_time() -> None:
    out = io.StringIO()
    with JsonWatcher(out, every_s=0.0) as watcher:
        watcher.tick(half_way())
    progress: dict[str, Any] = json.loads(out.getvalue().splitlines()[-1])
    assert progress["event"] == "progress"
    assert (progress["file"], progress["stage"]) == (FILES[1].name, "getting")
    assert (progress["there_bytes"], progress["bytes"], progress["received_bytes"]) == (1500, 2000, 1500)
    assert progress["bytes_per_s"] > 0
    assert progress["left_s"] is not None


def test_bars_show_the_file_and_the_total(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.cli.fetch_display._BAR_EVERY_S", 0.0)
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    with BarWatcher(out) as watcher:
        watcher.begin(PLAN)
        watcher.tick(half_way())
        watcher.say("[bold]a note[/]")
        watcher.done(Path("/m/m-00001-of-00002.gguf"))
    text = out.getvalue()
    assert "got 500 B of 1000 B" in text
    assert "1.5 KiB of 2.0 KiB (75.0 %)" in text
    assert "[bold]a note[/]" in text  # texts of others are no markup
    assert "start it with: python -m server --gguf /m" in text


def test_the_rate_is_that_of_the_last_seconds() -> None:
    meter = Meter()
    assert (meter.bytes_per_s, meter.left_s(10)) == (0.0, None)
    for second in range(21):
        meter.note(float(second), 0 if second < 10 else (second - 10) * 100)
    assert meter.bytes_per_s == 100.0
    assert meter.left_s(500) == 5.0


def test_times_and_rates_in_words() -> None:
    assert [time_text(s) for s in (47, 725, 12_000)] == ["47 s", "12 min 5 s", "3 h 20 min"]
    assert [Rate().parse(text) for text in ("100", "50M", "1.5 MiB/s", "2kB", "1g")] == [
        100, 50 << 20, 1.5 * (1 << 20), 2048, 1 << 30,
    ]  # fmt: skip
    for text in ("", "0", "-5", "5T", "M"):
        with pytest.raises(BadValue):
            Rate().parse(text)


def test_an_interrupt_while_the_server_fetches_is_told(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("server.store.fetch.Fetch.run", interrupt)
    assert main(["--gguf", f"{REPO}:Q4_K_M"]) == 130
    assert capsys.readouterr().err == "stopped; the same command goes on from here\n"


def test_nothing_is_left_running(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    before = threading.active_count()
    assert run(capsys, f"{REPO}:Q8_0")[0] == 0
    assert threading.active_count() <= before + 4  # the hub's own, one for each connection


def test_names_that_are_wrong_end_the_start(hub: FakeHub) -> None:
    with pytest.raises(ConfigError, match="has 2 quants; say which"):
        build_config(settings_for("-hf", REPO))
    with pytest.raises(FetchError, match="there is no model 'a/none'"):
        build_config(settings_for("--gguf", "a/none"))
