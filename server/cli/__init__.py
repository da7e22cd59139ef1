"""The command line: flags, environment and file become a Config. The only room that knows flag names."""

from server.cli.command import main

__all__ = ["main"]
