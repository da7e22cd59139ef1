"""The samplers by name, with llama.cpp's letter for each: requests and the command line may use either."""

from __future__ import annotations

LETTER_OF_SAMPLER = {
    "penalties": "e",
    "dry": "d",
    "top_n_sigma": "s",
    "top_k": "k",
    "typ_p": "y",
    "top_p": "p",
    "min_p": "m",
    "xtc": "x",
    "temperature": "t",
    "adaptive_p": "a",
}
SAMPLER_OF_LETTER = {letter: name for name, letter in LETTER_OF_SAMPLER.items()}
