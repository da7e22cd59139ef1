"""The texts at the top of a bundle: README.md for the person on the far side, install.py and join.py to run there."""

from __future__ import annotations

from server.store.bundle.description import Description
from server.store.bundle.transfer import gib

# Written so that an old Python can read it far enough to say that it is too old.
_SCRIPT = '''\
#!/usr/bin/env python3
"""{about} Needs Python {python} and nothing else, no network."""
import os
import sys

if sys.version_info < (3, 11):
    sys.exit("error: this needs Python {python}, but this is Python %d.%d; run: python{python} %s ..." % (
        sys.version_info[0], sys.version_info[1], os.path.basename(sys.argv[0])))

sys.dont_write_bytecode = True
here = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(here, "tools"))
{call}
'''


def install_script(python: tuple[int, int]) -> str:
    return _SCRIPT.format(
        about="Checks this bundle and installs it: python3 install.py --prefix FOLDER",
        python=f"{python[0]}.{python[1]}",
        call="from pathlib import Path\n\nfrom server.store.bundle.install import main\n\nsys.exit(main(Path(here)))",
    )


def join_script(python: tuple[int, int]) -> str:
    return _SCRIPT.format(
        about="Puts pieces of a bundle together: python3 join.py --to FOLDER PIECE ...",
        python=f"{python[0]}.{python[1]}",
        call="from server.store.bundle.pieces import main\n\nsys.exit(main())",
    )


def readme(description: Description, n_bytes: int, *, signed: bool) -> str:
    target = description.target
    python = f"python{target.python[0]}.{target.python[1]}"
    cuda = (
        f"Its llama.cpp computes on NVIDIA GPUs of the architectures {', '.join(description.cuda)} (and on CPUs). The "
        f"driver must be there already; the CUDA libraries are in the bundle."
        if description.cuda
        else "Its llama.cpp computes on CPUs; it has no CUDA part."
    )
    image = (
        f"\n## As a container instead\n\n```sh\ndocker load -i data/image/{description.image}\n```\n\n"
        f"The image has no model inside: mount `data/model`.\n"
        if description.image
        else ""
    )
    signature = (
        "\nIt is signed (`bundle.sig`, OpenSSF model signing). With the maker's public key, from a machine that has "
        "the package model-signing:\n`python -m server bundle verify . --public-key KEY.pem`\n"
        if signed
        else ""
    )
    return f"""\
# {description.name}: a model and its server, to be installed without a network

Made by glmserve {description.made_with} for **{target}**; {gib(n_bytes)}. {cuda}

## Install

```sh
{python} install.py --prefix /opt/glm
```

reads every file and compares it with its checksum, makes a Python environment in `/opt/glm/venv`, puts the model beside
it (hard-linked where both are on one file system, else copied; `--model-in-place` leaves it here) and prints the line
that starts the server. Only Python is needed, with its standard library; pip, compilers, a network and root are not.

```sh
/opt/glm/start                                    # http://127.0.0.1:8080, settings in /opt/glm/glmserve.toml
/opt/glm/start --host 0.0.0.0 --api-key-file KEYS # further flags win
```

`/opt/glm/glmserve.service` is a unit for systemd. `/opt/glm/venv/bin/python -m server doctor --gguf /opt/glm/model`
says what this machine lacks.

## Did everything arrive?

```sh
{python} install.py
```

without `--prefix` only checks. Each damaged or missing file is named, of large files the damaged part as well; copy
those again and repeat. A check that is interrupted goes on where it was.
`sha256sum -c manifest-sha256.txt` says the same.
{signature}{image}
## What is here

| path | what |
|---|---|
| `data/model/` | the model, {len(description.model)} files |
| `data/wheels/` | Python packages, the server among them, and their hashes |
| `data/config/glmserve.toml` | the server's settings |
| `data/licenses/`, `data/sbom.cdx.json` | licences of everything, and the list of it (CycloneDX) |
| `tools/` | what `install.py` and `join.py` run; the standard library is all they use |
| `*-sha256.txt`, `bagit.txt`, `bag-info.txt` | checksums, in BagIt layout |
"""
