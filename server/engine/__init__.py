"""Tokens in, events out: slots, batches, sampling, and the process that owns llama.cpp."""
