"""`python -m scripts.tiny_glm [DIRECTORY]`: make tiny-glm from its dialogues, check it and write it."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

# Without these PyTorch gives memory back after every operation and fetches it again, zeroed, for the next one, and its
# threads wait for work at full speed. They have to be set before the first import of torch: see _restarted.
ENVIRONMENT = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**32),
    "MALLOC_TOP_PAD_": str(2**28),
    "OMP_WAIT_POLICY": "passive",
    "GOMP_SPINCOUNT": "0",
}

ROOT = Path(__file__).parents[2]
N_THREADS = 2


def make(directory: Path) -> None:
    import torch

    from scripts.tiny_glm import compare, corpus, export, readings, tokenizer, train

    torch.set_num_threads(N_THREADS)
    source = (corpus.MODEL_DIRECTORY / "chat_template.jinja").read_text(encoding="utf-8")
    template = corpus.ChatTemplate(source)
    dialogues = corpus.read_dialogues()
    answers = [answer for dialogue in dialogues for answer in corpus.answers_of(dialogue, template)]
    texts = [answer.prompt + answer.text for answer in answers]
    vocabulary = tokenizer.learn(texts)
    cutter = tokenizer.Tokenizer(vocabulary)
    plan = train.Plan()
    reader = readings.Reader(dialogues, template, plan.seed)
    sequences = [sequence for answer in answers for sequence in train.sequences_of([answer], cutter)]
    print(f"{len(dialogues)} dialogues, {len(answers)} answers, {len(vocabulary)} tokens, {plan.n_steps} steps")

    model = train.train(reader, cutter, plan, report=lambda line: print(line, flush=True))
    print("trained:", train.accuracy(model, sequences))
    export.round_weights(model)
    print("rounded:", train.accuracy(model, sequences))
    directory.mkdir(parents=True, exist_ok=True)
    shards = export.write_model(model, vocabulary, source, directory)
    compare.save_golden(compare.golden_logits(model, cutter, answers), directory / "golden.npz")
    for shard in shards:  # for models/tiny-glm.toml
        data = shard.read_bytes()
        print(f'[[shards]]\nname = "{shard.name}"\nbytes = {len(data)}\nsha256 = "{hashlib.sha256(data).hexdigest()}"')

    trunk, draft = compare.largest_differences(model, cutter, answers, shards)
    print(f"largest difference of logits between PyTorch and llama.cpp: trunk {trunk:.1e}, NextN {draft:.1e}")
    for cache, flash_attention in (("f16", False), ("f16", True), ("q8_0", True)):
        wrong = compare.wrong_answers(answers, shards[0], cache=cache, flash_attention=flash_attention)
        print(f"{cache} cache, flash attention {flash_attention}: {len(wrong)} of {len(answers)} answers differ")
        for answer, text in wrong:
            print(f"  {answer.dialogue} [{answer.index}] wants {answer.text!r}\n  gives {text!r}")


def _restarted(arguments: list[str]) -> None:
    """Run this module again with ENVIRONMENT set; the C library reads it at the start of a process."""
    os.execve(sys.executable, [sys.executable, "-m", "scripts.tiny_glm", *arguments], os.environ | ENVIRONMENT)


if __name__ == "__main__":
    if any(os.environ.get(name) != value for name, value in ENVIRONMENT.items()):
        _restarted(sys.argv[1:])
    make(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "models" / "tiny-glm")
