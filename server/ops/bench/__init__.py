"""Measures any OpenAI-compatible server, this one by default, alone or in turns with a second one.

`python -m server.ops.bench --help`. Needs the extra `bench` (aiohttp).
"""
