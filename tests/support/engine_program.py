"""An engine process with a scripted backend and bad manners on demand, for tests of the supervisor and of the server.

`python -m tests.support.engine_program FD PARENT`. What the model path contains decides how it loads:
  refuse      the model cannot be loaded
  die         killed by SIGKILL while loading
  repack      killed by SIGILL while loading, unless the extra buffer types are off
What a prompt contains decides how it is answered:
  KILL        SIGKILL in the decode          ABORT      SIGABRT in the decode
  HANG        the decode never returns       anything   "You said ..."
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading

from server.engine.backend import DecodeStatus, Piece
from server.engine.options import EngineOptions
from server.engine.process import EngineProcess, OnProgress
from server.errors import LoadError
from tests.support.scripted import ScriptedBackend


def load(options: EngineOptions, on_progress: OnProgress) -> ScriptedBackend:
    path = options.model.path
    on_progress("loading the model", 0.5)
    if "refuse" in path:
        raise LoadError(f"llama.cpp cannot load {path}: unknown model architecture 'refuse'")
    if "die" in path:
        os.write(1, b"ggml_cuda: out of memory\n")
        os.kill(os.getpid(), signal.SIGKILL)
    if "repack" in path and options.model.use_extra_bufts:
        os.kill(os.getpid(), signal.SIGILL)
    backend = ScriptedBackend(reply=lambda prompt: f"You said {prompt}.", n_slots=options.model.n_slots)

    def misbehave(pieces: list[Piece]) -> DecodeStatus | None:
        text = " ".join(backend.text_of([*backend.held(piece.sequence), *piece.tokens]) for piece in pieces)
        if "KILL" in text:
            os.kill(os.getpid(), signal.SIGKILL)
        if "ABORT" in text:
            os.write(1, b"GGML_ASSERT(false) failed\n")
            os.abort()
        if "HANG" in text:
            threading.Event().wait()
        return None

    backend.on_decode = misbehave
    return backend


if __name__ == "__main__":
    sock = socket.socket(fileno=int(sys.argv[1]))
    sys.exit(EngineProcess(sock, load, leave=lambda: os._exit(0)).run())
