"""One value for every flag: the highest rank wins, then the values that depend on each other are settled.

Settling is where the command line's own rules live: what --parallel means for the cache, which flags exclude each
other, what becomes of split mode row and of the old names of --load-mode. Nothing here looks at a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from server.cli.flag import Flag
from server.cli.given import Given, Rank
from server.cli.names import Names
from server.cli.sampling_flags import DEFAULT_SAMPLERS
from server.errors import ConfigError

AUTO_SLOTS = 4


@dataclass(frozen=True, slots=True)
class Setting:
    """`where` says where the value is from, in words; `rank` is DEFAULT where nobody gave it."""

    flag: Flag
    value: Any
    rank: Rank
    where: str


class Settings:
    """Every flag's value by key."""

    def __init__(self, names: Names, given: Iterable[Given], warnings: list[str]) -> None:
        self.warnings = warnings
        self._settings: dict[str, Setting] = {}
        by_key: dict[str, list[Given]] = {}
        for each in given:
            by_key.setdefault(each.flag.key, []).append(each)
        for flag in names.flags.values():
            self._settings[flag.key] = self._merge(flag, by_key.get(flag.key, []))

    def _merge(self, flag: Flag, given: list[Given]) -> Setting:
        if not given:
            return Setting(flag, flag.default, Rank.DEFAULT, "default")
        rank = max(each.rank for each in given)
        counting = [each for each in given if each.rank is rank]
        last = counting[-1]
        if flag.kind.repeats:
            return Setting(flag, tuple(item for each in counting for item in each.value), rank, last.where)
        if any(each.value != last.value for each in counting):
            self.warnings.append(f"{flag.long_name} is given {len(counting)} times; the last one, {last.where}, counts")
        return Setting(flag, last.value, rank, last.where)

    def __getitem__(self, key: str) -> Any:
        return self._settings[key].value

    def __iter__(self) -> Iterator[Setting]:
        return iter(self._settings.values())

    def setting(self, key: str) -> Setting:
        return self._settings[key]

    def given(self, key: str) -> bool:
        return self._settings[key].rank is not Rank.DEFAULT

    def derive(self, key: str, value: Any, reason: str) -> None:
        """Replace a value by what it comes to."""
        old = self._settings[key]
        self._settings[key] = Setting(old.flag, value, old.rank, reason)

    def drop(self, key: str) -> None:
        old = self._settings[key]
        self._settings[key] = Setting(old.flag, old.flag.default, Rank.DEFAULT, "default")


def settle(settings: Settings) -> None:
    """Bring values that depend on each other together. Raises ConfigError for a contradiction."""
    for one, other in (
        ("gguf", "demo"),
        ("gguf", "hf-repo"),
        ("hf-repo", "demo"),
        ("chat-template", "chat-template-file"),
        ("grammar", "grammar-file"),
        ("rope-scale", "rope-freq-scale"),
    ):
        _choose(settings, one, other)
    if settings["hf-file"] and not settings["hf-repo"]:
        raise ConfigError(f"{settings.setting('hf-file').where} needs --hf-repo OWNER/REPO, which has the file")
    _settle_load_mode(settings)
    _settle_slots(settings)
    _settle_disk(settings)
    _settle_devices(settings)
    _settle_sampling(settings)
    key_file, cert_file = settings["ssl-key-file"], settings["ssl-cert-file"]
    if (key_file is None) != (cert_file is None):
        present, absent = ("key", "cert") if cert_file is None else ("cert", "key")
        where = settings.setting(f"ssl-{present}-file").where
        raise ConfigError(f"{where} is given without --ssl-{absent}-file; TLS needs both files, so add the other one")


def _choose(settings: Settings, one: str, other: str) -> None:
    """Two flags that say the same thing: the one of higher rank stays."""
    first, second = settings.setting(one), settings.setting(other)
    if not (settings.given(one) and settings.given(other)) or not (first.value and second.value):
        return
    if first.rank is second.rank:
        raise ConfigError(f"{first.where} and {second.where} exclude each other; keep one of them")
    settings.drop(one if first.rank < second.rank else other)


def _settle_load_mode(settings: Settings) -> None:
    old = [settings.setting(key) for key in ("mlock", "mmap", "direct-io") if settings[key] is not None]
    if not old:
        return
    mlock, mmap, direct_io = settings["mlock"], settings["mmap"], settings["direct-io"]
    if direct_io:
        mode = "dio"
    elif mlock:
        mode = "mlock" if mmap is False else "mmap+mlock"
    else:
        mode = {True: "mmap", False: "none", None: "auto"}[mmap]
    names = " and ".join(dict.fromkeys(each.where for each in old))
    verb = "is an old name" if len(old) == 1 else "are old names"
    for each in old:
        settings.drop(each.flag.key)
    load_mode = settings.setting("load-mode")
    if load_mode.rank >= max(each.rank for each in old):
        settings.warnings.append(f"{names} {verb} of --load-mode and does not count beside {load_mode.where}")
    else:
        settings.warnings.append(f"{names} {verb}: it counts as --load-mode {mode}")
        settings.derive("load-mode", mode, names)


def _settle_slots(settings: Settings) -> None:
    if settings["parallel"] is None:
        settings.derive("parallel", AUTO_SLOTS, "auto")
        unified, reason = True, "on, because --parallel is auto"
    else:
        unified, reason = False, "off, because --parallel is a number"
    if settings["kv-unified"] is None:
        settings.derive("kv-unified", unified, reason)
    per_slot, slots = settings["kv-unified-per-slot"], settings["parallel"]
    if per_slot and not settings.given("ctx-size"):
        settings.derive("ctx-size", slots * per_slot, "--parallel times --kv-unified-per-slot")
    _settle_batch(settings)


def _settle_batch(settings: Settings) -> None:
    """A batch holds whole micro-batches: of the two, the one that was not given follows."""
    n_batch, n_ubatch = settings["batch-size"], settings["ubatch-size"]
    if n_ubatch <= n_batch:
        return
    if not settings.given("ubatch-size"):
        settings.derive("ubatch-size", n_batch, "as --batch-size")
    elif not settings.given("batch-size"):
        settings.derive("batch-size", n_ubatch, "as --ubatch-size")
    else:
        where, batch = settings.setting("ubatch-size").where, settings.setting("batch-size").where
        raise ConfigError(f"{where} is {n_ubatch}, more than {batch} {n_batch}; lower the first or raise the second")


def _settle_disk(settings: Settings) -> None:
    if settings["cache-disk"] is None:
        if settings.given("cache-disk-limit"):
            where = settings.setting("cache-disk-limit").where
            settings.warnings.append(f"{where} has no effect without --cache-disk DIR")
    elif settings["cache-ram"] == 0:
        where, ram = settings.setting("cache-disk").where, settings.setting("cache-ram").where
        raise ConfigError(
            f"{where} needs host memory, through which everything comes from disk, and {ram} is 0; give --cache-ram a "
            f"size that holds the longest prompts, or leave --cache-disk out"
        )


def _settle_devices(settings: Settings) -> None:
    mode = settings.setting("split-mode")
    if mode.value == "row":
        settings.warnings.append(
            f"{mode.where} row is served as layer: this llama.cpp has no row buffers on CUDA any more; give layer"
        )
        settings.derive("split-mode", "layer", f"{mode.where} row")
    if settings["main-gpu"] and settings["split-mode"] != "none":
        where = settings.setting("main-gpu").where
        settings.warnings.append(
            f"{where} has no effect with --split-mode {settings['split-mode']}; give none for one GPU"
        )
    devices = settings["device"]
    if devices and "none" in devices and len(devices) > 1:
        where = settings.setting("device").where
        raise ConfigError(f"{where} names 'none' beside other devices; give none alone, or the devices alone")


def _settle_sampling(settings: Settings) -> None:
    if settings["temp"] < 0:
        settings.derive("temp", 0.0, f"{settings.setting('temp').where}, as 0")
    if settings["seed"] == 2**32 - 1:
        settings.derive("seed", -1, settings.setting("seed").where)
    if settings["mirostat"] and settings["samplers"] != DEFAULT_SAMPLERS:
        settings.warnings.append("--mirostat takes the place of --samplers, which has no effect")
