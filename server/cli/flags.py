"""The flags of the server: the declarative table. Names, short forms, variables and defaults are llama.cpp's where it
has the flag (common/arg.cpp); `env` is GLMSERVE_<NAME> where llama.cpp has no variable."""

from __future__ import annotations

from server.chat.options import EFFORTS
from server.cli.engine_flags import CONTEXT, DEVICES, MODEL, ON_OFF_AUTO
from server.cli.flag import Flag, Group, flag
from server.cli.sampling_flags import SAMPLING
from server.cli.special_values import Hosts, JsonObject, Level, Origins, Prefix
from server.cli.values import Choice, Kind, Number, Switch, Whole, Words

_FILE = Kind(metavar="FILE", sample="FILE")
_SWITCH = Switch()
_SECONDS = Number(least=0, metavar="S", sample="30")

HTTP = Group(
    "HTTP",
    (
        flag(
            "--host",
            Hosts(),
            ("127.0.0.1",),
            "addresses to listen on, or paths that end in .sock",
            llama="HOST",
            main=True,
        ),
        flag(
            "--port",
            Whole(most=65535, metavar="PORT", sample="8080"),
            8080,
            "port to listen on; 0: any free one",
            llama="PORT",
            main=True,
        ),
        flag(
            "--api-key",
            Words(metavar="KEY,…", sample="KEY"),
            None,
            "keys, one of which clients must send; none: open to all",
            env="LLAMA_API_KEY",
            secret=True,
            main=True,
        ),
        flag(
            "--api-key-file",
            _FILE,
            None,
            "file with one key a line, # comments",
            note="Behind a key may stand name=NAME, max-jobs=N and priority=P (docs/operations.md).",
            llama="API_KEY_FILE",
            main=True,
        ),
        flag("--ssl-key-file", _FILE, None, "PEM file of the TLS key", llama="SSL_KEY_FILE", main=True),
        flag("--ssl-cert-file", _FILE, None, "PEM file of the TLS certificate", llama="SSL_CERT_FILE", main=True),
        flag(
            "--api-prefix", Prefix(may_be_empty=True), "", "path put before every route", llama="API_PREFIX", main=True
        ),
        flag(
            "--cors-origins",
            Origins(),
            ("*",),
            "origins whose pages may call; localhost: any port",
            llama="CORS_ORIGINS",
            main=True,
        ),
        flag(
            "--cors-methods",
            Words(metavar="M,…", sample="GET,POST"),
            ("GET", "POST", "DELETE", "OPTIONS"),
            "methods such pages may use",
            llama="CORS_METHODS",
        ),
        flag("--cors-headers", Words(metavar="H,…", sample="*"), ("*",), "headers they may send", llama="CORS_HEADERS"),
        flag(
            "--cors-credentials",
            _SWITCH,
            True,
            "they may send credentials",
            llama="CORS_CREDENTIALS",
            off="--no-cors-credentials",
        ),
        flag(
            "-to --timeout",
            _SECONDS,
            3600.0,
            "seconds of silence before a request is dropped; 0: never",
            llama="TIMEOUT",
        ),
        flag(
            "--sse-ping-interval",
            Whole(least=1, metavar="S", words={"off": None, "-1": None, "0": None}, sample="30"),
            30,
            "seconds between keep-alives in a silent stream; -1: none",
            llama="SSE_PING_INTERVAL",
        ),
        flag("--max-body-mib", Number(least=0, above=True, metavar="MIB", sample="64"), 64.0, "largest request body"),
        flag(
            "--model-names",
            Choice(choices=("strict", "any"), metavar="MODE", sample="any"),
            "strict",
            "a request for another model: strict (404), any (serve)",
            main=True,
        ),
        flag(
            "--metrics",
            _SWITCH,
            True,
            "GET /metrics",
            note="llama.cpp has it off by default.",
            llama="ENDPOINT_METRICS",
            off="--no-metrics",
            main=True,
        ),
        flag("--slots", _SWITCH, True, "GET /slots", llama="ENDPOINT_SLOTS", off="--no-slots", main=True),
        flag("--props", _SWITCH, False, "POST /props", llama="ENDPOINT_PROPS", off="--no-props", main=True),
    ),
)

LIFE = Group(
    "Queue and life",
    (
        flag(
            "--max-queue",
            Whole(),
            256,
            "requests that may wait for a slot; one more gets 429",
            note="Where there are several keys, one of them gets three quarters of the places at most.",
            main=True,
        ),
        flag(
            "--max-jobs-per-key",
            Whole(),
            0,
            "answers of one API key in slots at once; 0: no limit",
            note="The others of the key wait. max-jobs= in the key file wins.",
            main=True,
        ),
        flag(
            "--queue-timeout",
            Number(least=0, metavar="S", sample="60"),
            0.0,
            "seconds of waiting for a slot, then 503; 0: no limit",
            main=True,
        ),
        flag(
            "--request-limit",
            Number(least=0, metavar="S", sample="7200"),
            0.0,
            "longest life of a request in seconds, then 504; 0: no limit",
        ),
        flag("--shutdown-grace", _SECONDS, 30.0, "seconds that running requests get at SIGTERM", main=True),
        flag("--step-timeout", _SECONDS, 900.0, "seconds after which a step counts as hung; 0: never"),
        flag("--max-engine-failures", Whole(least=1), 5, "engine deaths in a row before the server gives up"),
    ),
)

CHAT = Group(
    "Chat",
    (
        flag(
            "--chat-template",
            Kind(metavar="JINJA", sample="TEMPLATE"),
            None,
            "Jinja text in place of the model's template",
            llama="CHAT_TEMPLATE",
        ),
        flag(
            "--chat-template-file",
            _FILE,
            None,
            "Jinja file in place of the model's template",
            llama="CHAT_TEMPLATE_FILE",
            main=True,
        ),
        flag(
            "--chat-template-kwargs",
            JsonObject(),
            None,
            "variables for the template; a request's own win",
            llama="CHAT_TEMPLATE_KWARGS",
            main=True,
        ),
        flag(
            "-rea --reasoning",
            ON_OFF_AUTO,
            "auto",
            "thinking (template variable enable_thinking)",
            note="auto leaves it to the template. --chat-template-kwargs and the request win.",
            llama="REASONING",
            main=True,
        ),
        flag(
            "--reasoning-effort",
            Choice(choices=("default", *EFFORTS), metavar="LEVEL", sample="high"),
            "default",
            "how much thinking, from none, minimal, low … to max",
            note="default leaves it to the template. GLM gets the level that its template knows (docs/api.md), other "
            "models the variable reasoning_effort as it is. --chat-template-kwargs and the request win.",
            llama="REASONING_EFFORT",
        ),
        flag(
            "--reasoning-budget",
            Whole(words={"-1": None}, sample="4096"),
            None,
            "most tokens of reasoning, then it is closed; -1: no limit",
            note="0: none at all. A request's own wins.",
            llama="THINK_BUDGET",
        ),
        flag(
            "--reasoning-budget-message",
            Kind(metavar="TEXT", sample="TEXT"),
            None,
            "text at the end of reasoning that the budget closes",
            llama="THINK_BUDGET_MESSAGE",
        ),
        flag(
            "--reasoning-preserve",
            _SWITCH,
            False,
            "keep the reasoning of earlier turns in the prompt",
            note="Sets the template variable clear_thinking to false; off leaves it to the template. "
            "llama.cpp has it on by default.",
            llama="REASONING_PRESERVE",
            off="--no-reasoning-preserve",
        ),
        flag(
            "--normalize-prompts",
            _SWITCH,
            True,
            "drop client lines that defeat caching",
            note="Claude Code's billing line in system prompts, which changes with each request (docs/api.md).",
            off="--no-normalize-prompts",
        ),
        flag(
            "--tool-grammar",
            Choice(choices=("auto", "off"), metavar="WHEN", sample="off"),
            "auto",
            "auto: calls cannot be malformed; off: they can",
            note="auto holds a call, from its opening tag on, to an offered name, declared arguments and values of "
            "their schemas. Calls that a request forces are held so always.",
        ),
        flag(
            "--reasoning-format",
            Choice(choices=("auto", "none", "deepseek", "deepseek-legacy"), metavar="FORMAT", sample="none"),
            "auto",
            "auto, none, deepseek, deepseek-legacy",
            note="Thoughts go to reasoning_content (auto, deepseek), stay in content (none) or both (deepseek-legacy).",
            llama="THINK",
            main=True,
        ),
    ),
)

LOG = Group(
    "Log",
    (
        flag(
            "-lv --log-level --verbosity --log-verbosity",
            Level(),
            "info",
            "error, warn, info, debug, or 0 to 5",
            llama="LOG_VERBOSITY",
            main=True,
        ),
        flag(
            "--log-format",
            Choice(choices=("text", "json"), metavar="FORMAT", sample="json"),
            "text",
            "text, or json: one object a line",
            main=True,
        ),
        flag(
            "--log-cache-misses",
            _SWITCH,
            False,
            "log where prompts differ from cached ones",
            note="With a few words of both prompts, so it is off by default (docs/operations.md).",
            off="--no-log-cache-misses",
        ),
        flag("--log-file", _FILE, None, "write the log there too", llama="LOG_FILE", main=True),
    ),
)

COMMAND = Group(
    "Command",
    (
        flag("--config", _FILE, None, "TOML file: keys are long names without dashes", action=True, main=True),
        flag("--print-config", _SWITCH, False, "show every value and its origin, then exit", action=True, main=True),
        flag("--list-devices", _SWITCH, False, "show the devices llama.cpp sees, then exit", action=True, main=True),
        flag("--version", _SWITCH, False, "show the versions, then exit", action=True, main=True),
        flag("-h --help --usage", _SWITCH, False, "show the flags most used", action=True, main=True),
        flag("--help-all", _SWITCH, False, "show all flags", action=True, main=True),
    ),
)

GROUPS: tuple[Group, ...] = (MODEL, CONTEXT, DEVICES, HTTP, LIFE, CHAT, SAMPLING, LOG, COMMAND)


def all_flags() -> list[Flag]:
    return [each for group in GROUPS for each in group.flags]
