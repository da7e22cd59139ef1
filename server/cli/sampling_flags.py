"""The part of the flag table that sets what a request gets when it names no sampling settings. Keys of SAMPLING_FIELDS
are flags, values the fields of engine.messages.SamplingOptions that they fill."""

from __future__ import annotations

from server.cli.flag import Group, flag
from server.cli.special_values import Biases, Samplers
from server.cli.values import Kind, Number, Switch, Texts, Whole

DEFAULT_SAMPLERS = ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")

_SHARE = Number(least=0, most=1, sample="0.9")
_POSITIVE = Number(least=0, sample="0.5")
_FINITE = Number(sample="0.5")

SAMPLING = Group(
    "Generation, where a request does not say",
    (
        flag(
            "-n --predict --n-predict",
            Whole(least=-1, sample="512"),
            -1,
            "most tokens of an answer; -1: until the context is full",
            llama="N_PREDICT",
            main=True,
        ),
        flag("--temp --temperature", _FINITE, 0.8, "temperature; 0: greedy", llama="TEMPERATURE", main=True),
        flag(
            "--top-k", Whole(least=-1, sample="40"), 40, "keep the k likeliest tokens; 0: all", llama="TOP_K", main=True
        ),
        flag("--top-p", _SHARE, 0.95, "keep the likeliest up to this sum; 1: all", llama="TOP_P", main=True),
        flag("--min-p", _SHARE, 0.05, "drop what is below this share of the top; 0: none", llama="MIN_P", main=True),
        flag(
            "-s --seed",
            Whole(least=-1, most=2**32 - 1, sample="42"),
            -1,
            "-1: another for every request",
            main=True,
        ),
        flag(
            "--repeat-penalty",
            Number(least=0, above=True, sample="1.1"),
            1.0,
            "penalty on repeated tokens; 1: off",
            llama="REPEAT_PENALTY",
            main=True,
        ),
        flag("--repeat-last-n", Whole(least=-1, sample="64"), 64, "tokens that penalties look back; -1: all"),
        flag("--presence-penalty", _FINITE, 0.0, "penalty on tokens that were there; 0: off", llama="PRESENCE_PENALTY"),
        flag("--frequency-penalty", _FINITE, 0.0, "the same for each time they were there", llama="FREQUENCY_PENALTY"),
        flag("--typical --typical-p", _SHARE, 1.0, "locally typical sampling; 1: off"),
        flag("--top-nsigma --top-n-sigma", _FINITE, -1.0, "keep tokens within n deviations; -1: off"),
        flag("--xtc-probability", _SHARE, 0.0, "chance of dropping the likeliest tokens; 0: off"),
        flag("--xtc-threshold", _SHARE, 0.1, "least probability of a token that XTC may drop"),
        flag("--dynatemp-range", _POSITIVE, 0.0, "dynamic temperature: plus and minus; 0: off"),
        flag("--dynatemp-exp", _POSITIVE, 1.0, "dynamic temperature: exponent"),
        flag("--dry-multiplier", _POSITIVE, 0.0, "DRY penalty on repeated sequences; 0: off"),
        flag("--dry-base", Number(least=1, sample="1.75"), 1.75, "DRY: growth with each further token"),
        flag("--dry-allowed-length", Whole(sample="2"), 2, "DRY: repeated length that is free"),
        flag("--dry-penalty-last-n", Whole(least=-1, sample="-1"), 64, "DRY: tokens to look back; -1: all, 0: off"),
        flag(
            "--dry-sequence-breaker",
            Texts(metavar="TEXT", sample="'\\n'", none="none"),
            ("\\n", ":", '"', "*"),
            "DRY: text that ends a sequence; repeatable",
            note="Escapes such as \\n are understood. none: no breakers. Default: line end, colon, quote, star.",
        ),
        flag("--mirostat", Whole(most=2, sample="2"), 0, "1 or 2: Mirostat in place of the samplers; 0: off"),
        flag("--mirostat-lr", _POSITIVE, 0.1, "Mirostat: learning rate (eta)"),
        flag("--mirostat-ent", _POSITIVE, 5.0, "Mirostat: target entropy (tau)"),
        flag("--adaptive-target", Number(most=1, sample="0.5"), -1.0, "adaptive-p: target probability; below 0: off"),
        flag("--adaptive-decay", Number(least=0, most=0.99, sample="0.9"), 0.9, "adaptive-p: how slowly it adapts"),
        flag("--samplers", Samplers(), DEFAULT_SAMPLERS, "samplers in the order in which they run"),
        flag("-l --logit-bias", Biases(), None, "bias of a token, as 15043+1 or 15043-inf"),
        flag("--ignore-eos", Switch(), False, "go on after the end of the turn"),
        flag("--grammar", Kind(metavar="GBNF", sample="GRAMMAR"), None, "grammar that every answer must follow"),
        flag("--grammar-file", Kind(metavar="FILE", sample="FILE"), None, "the same from a file"),
    ),
)

SAMPLING_FIELDS: dict[str, str] = {
    "temp": "temperature",
    "top-k": "top_k",
    "top-p": "top_p",
    "min-p": "min_p",
    "seed": "seed",
    "repeat-penalty": "repeat_penalty",
    "repeat-last-n": "repeat_last_n",
    "presence-penalty": "presence_penalty",
    "frequency-penalty": "frequency_penalty",
    "typical": "typical_p",
    "top-nsigma": "top_n_sigma",
    "xtc-probability": "xtc_probability",
    "xtc-threshold": "xtc_threshold",
    "dynatemp-range": "dynatemp_range",
    "dynatemp-exp": "dynatemp_exponent",
    "dry-multiplier": "dry_multiplier",
    "dry-base": "dry_base",
    "dry-allowed-length": "dry_allowed_length",
    "dry-penalty-last-n": "dry_penalty_last_n",
    "mirostat": "mirostat",
    "mirostat-lr": "mirostat_eta",
    "mirostat-ent": "mirostat_tau",
    "adaptive-target": "adaptive_target",
    "adaptive-decay": "adaptive_decay",
    "samplers": "samplers",
    "ignore-eos": "ignore_eos",
}
