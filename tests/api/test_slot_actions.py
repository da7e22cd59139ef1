"""POST /slots/{id}: llama.cpp's bodies, and every refusal in words."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from server.engine.messages import SlotAction, SlotDone
from tests.support.http import Gate, served
from tests.support.scripted import ScriptedBackend
from tests.support.tiny_gguf import write_tiny_gguf

LONG = "a prompt that is long enough to be worth something, "


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Any]:
    """What `served` needs for slots in files."""
    (tmp_path / "slots").mkdir()
    (tmp_path / "slots" / "junk").write_bytes(b"junk" * 100)
    model = write_tiny_gguf(tmp_path / "model.gguf")
    return {"model_path": str(model), "slot_folder": str(tmp_path / "slots"), "slot_actions": True}


async def test_save_erase_and_restore(folders: dict[str, Any]) -> None:
    async with served(**folders) as s:
        first = (await s.post("/completion", {"prompt": LONG, "n_predict": 3, "id_slot": 0})).json()
        saved = await s.post("/slots/0?action=save", {"filename": "chat.bin"})
        erased = await s.http.post("/slots/0?action=erase")
        again = (await s.post("/completion", {"prompt": LONG, "n_predict": 3, "id_slot": 0})).json()
        await s.http.post("/slots/0?action=erase")
        restored = await s.post("/slots/0?action=restore", {"filename": "chat.bin"})
        third = (await s.post("/completion", {"prompt": LONG, "n_predict": 3, "id_slot": 0})).json()
    n_tokens = len(LONG) + 2
    body = saved.json()
    assert body.pop("timings")["save_ms"] > 0
    size = body["n_written"]
    assert size > 128 + 4 * n_tokens
    assert body == {"id_slot": 0, "filename": "chat.bin", "n_saved": n_tokens, "n_written": size}
    assert erased.json() == {"id_slot": 0, "n_erased": n_tokens}
    body = restored.json()
    assert body.pop("timings")["restore_ms"] > 0
    assert body == {"id_slot": 0, "filename": "chat.bin", "n_restored": n_tokens, "n_read": size}
    assert first["content"] == again["content"] == third["content"]
    assert [answer["timings"]["cache_n"] for answer in (first, again, third)] == [0, 0, len(LONG) - 1]


async def test_without_the_flag_the_way_out_is_named() -> None:
    async with served() as s:
        response = await s.post("/slots/0?action=save", {"filename": "x"})
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (501, "not_supported_error")
    assert "--slot-save-path" in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/slots/0", {"filename": "x"}, "the action '' is not known"),
        ("/slots/0?action=burn", {"filename": "x"}, "use ?action=save, ?action=restore or ?action=erase"),
        ("/slots/zero?action=save", {"filename": "x"}, "'zero' is no slot"),
        ("/slots/-1?action=erase", {}, "'-1' is no slot"),
        ("/slots/9?action=save", {"filename": "x"}, "there is no slot 9; there are 0 to 3"),
        ("/slots/0?action=save", {"filename": "x"}, "slot 0 holds nothing"),
        ("/slots/0?action=save", {}, "filename"),
        ("/slots/0?action=save", {"filename": 7}, "filename"),
        ("/slots/0?action=restore", {"filename": "none"}, "there is no file 'none'"),
        ("/slots/0?action=restore", {"filename": "../model.gguf"}, "is not allowed"),
        ("/slots/0?action=restore", {"filename": "junk"}, "'junk' cannot be restored: it does not begin like"),
    ],
)
async def test_what_is_wrong_is_a_400(path: str, body: dict[str, Any], words: str, folders: dict[str, Any]) -> None:
    async with served(**folders) as s:
        response = await s.post(path, body)
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    assert words in error["message"]


async def test_a_slot_at_work_is_a_409(folders: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    async with served(ScriptedBackend(reply=lambda _: "x", on_decode=gate), **folders) as s:
        act_on_slot = s.engine.act_on_slot

        async def act_and_open(slot: int, action: SlotAction, filename: str) -> SlotDone:
            answer = asyncio.create_task(act_on_slot(slot, action, filename))
            await s.engine.tokenize([], add_special=False)  # meanwhile the command is sent
            await gate.release(s.engine)
            return await answer

        monkeypatch.setattr(s.engine, "act_on_slot", act_and_open)
        running = asyncio.create_task(s.post("/completion", {"prompt": LONG, "n_predict": 3, "id_slot": 0}))
        await gate.entered(s.engine)
        response = await s.post("/slots/0?action=save", {"filename": "x"})
        assert (await running).status_code == 200
    error = response.json()["error"]
    assert (response.status_code, error["reason"]) == (409, "conflict")
    assert error["message"] == "slot 0 is at work; wait until its request is done, or take another slot"


async def test_a_folder_that_is_gone_is_a_500(folders: dict[str, Any]) -> None:
    async with served(**folders) as s:
        await s.post("/completion", {"prompt": LONG, "n_predict": 3, "id_slot": 0})
        shutil.rmtree(folders["slot_folder"])
        response = await s.post("/slots/0?action=save", {"filename": "x"})
    assert response.status_code == 500
    assert "could not be written to --slot-save-path: No such file" in json.dumps(response.json())
