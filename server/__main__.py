from server.cli import main

try:
    raise SystemExit(main())
except ModuleNotFoundError as error:
    if (error.name or "server").partition(".")[0] == "server":
        raise
    raise SystemExit(
        f"error: the package '{error.name}' is not installed for this Python; in the source tree run 'make install', "
        f"then use .venv/bin/python -m server"
    ) from None
