"""Names that are not flags of this server but may stand in an operator's command line: what llama.cpp has and we do
not, what it has removed, and what other servers call it. None is passed over in silence: each is the server's own way
(SAME), harmless and answered with a warning (IGNORED), another spelling of one of our flags (Spelling), or refused with
the reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from functools import partial

from server.cli.special_values import SamplerLetters
from server.cli.values import Kind, Whole, Words


class Answer(Enum):
    SAME = auto()  # the server does just this
    IGNORED = auto()  # no effect on answers: one warning
    REFUSED = auto()


@dataclass(frozen=True, slots=True)
class Foreign:
    """`same_values`: values that ask for what the server does anyway. `off`: negations, answered with `off_answer`."""

    names: tuple[str, ...]
    answer: Answer
    why: str
    takes_value: bool = True
    env: str | None = None
    off: tuple[str, ...] = ()
    off_answer: Answer = Answer.SAME
    same_values: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Spelling:
    """Names that set the flag `sets`: to `text`, or to their own value; `convert` reads that as another kind."""

    names: tuple[str, ...]
    sets: str
    text: str | None = None
    off: tuple[str, ...] = ()
    off_text: str | None = None
    env: str | None = None
    convert: Kind | None = None
    warning: str | None = None

    @property
    def takes_value(self) -> bool:
        return self.text is None


_DOWNLOAD = "models come from a hub or from disk: give --gguf a path, OWNER/REPO:QUANT or a recipe's name"
_SPECULATION = "speculative decoding is not supported yet: leave it out"
_MULTIMODAL = "images, sound and video are not supported: this server serves text models"
_EMBEDDINGS = "embeddings and reranking are not supported: this server generates text"
_ADAPTERS = "adapters and control vectors are not supported: merge them into the model first"
_TOOLS = "the server runs no tools, agents or MCP servers itself: the client does"
_ROUTER = "one server serves one model: start one for each model, with --gguf"
_UI = "there is no web page to configure"
_AFFINITY = "the placement of threads is left to the system; use taskset or numactl around the command"
_YARN = "YaRN's own settings are not supported; --rope-scaling yarn takes them from the model"
_PRESET = f"model presets are not supported, and {_DOWNLOAD}"
_LOOKS = "the log has one look; choose it with --log-format"


def _foreign(
    answer: Answer,
    why: str,
    names: str,
    *,
    env: str | None = None,
    value: bool = True,
    off: str = "",
    off_answer: Answer = Answer.SAME,
    same: str = "",
) -> Foreign:
    variable = f"LLAMA_ARG_{env}" if env else None
    return Foreign(
        tuple(names.split()), answer, why, value, variable, tuple(off.split()), off_answer, tuple(same.split())
    )


_refused = partial(_foreign, Answer.REFUSED)
_ignored = partial(_foreign, Answer.IGNORED)
_same = partial(_foreign, Answer.SAME, value=False)
_IGNORED, _REFUSED = Answer.IGNORED, Answer.REFUSED

FOREIGN: tuple[Foreign, ...] = (
    # getting the model
    _refused(_DOWNLOAD, "-mu --model-url", env="MODEL_URL"),
    _refused(_DOWNLOAD, "-dr --docker-repo", env="DOCKER_REPO"),
    _refused("python -m server models lists what is on disk", "-cl --cache-list", value=False),
    _refused(_PRESET, "--embd-gemma-default --gpt-oss-20b-default --gpt-oss-120b-default", value=False),
    _refused(_PRESET, "--fim-qwen-1.5b-default --fim-qwen-3b-default --fim-qwen-7b-default", value=False),
    _refused(_PRESET, "--fim-qwen-7b-spec --fim-qwen-14b-spec --fim-qwen-30b-default", value=False),
    _refused(_PRESET, "--vision-gemma-4b-default --vision-gemma-12b-default", value=False),
    _refused(_ROUTER, "--models-preset", env="MODELS_PRESET"),
    _refused(_ROUTER, "--models-max", env="MODELS_MAX"),
    _refused(_ROUTER, "--models-autoload", env="MODELS_AUTOLOAD", value=False, off="--no-models-autoload"),
    # loading
    _ignored("tensors are never read from disk on demand", "-lzm --lazy-mode", env="LAZY_MODE", same="auto off"),
    _refused("the model's metadata cannot be overridden: change the file (gguf-set-metadata)", "--override-kv"),
    _refused(_ADAPTERS, "--lora"),
    _refused(_ADAPTERS, "--lora-scaled"),
    _refused(_ADAPTERS, "--lora-init-without-apply", value=False),
    _refused(_ADAPTERS, "--control-vector"),
    _refused(_ADAPTERS, "--control-vector-scaled"),
    _refused(_ADAPTERS, "--control-vector-layer-range"),
    _refused(_YARN, "--yarn-orig-ctx", env="YARN_ORIG_CTX", same="0"),
    _refused(_YARN, "--yarn-ext-factor", env="YARN_EXT_FACTOR", same="-1 -1.0"),
    _refused(_YARN, "--yarn-attn-factor", env="YARN_ATTN_FACTOR", same="-1 -1.0"),
    _refused(_YARN, "--yarn-beta-slow", env="YARN_BETA_SLOW", same="-1 -1.0"),
    _refused(_YARN, "--yarn-beta-fast", env="YARN_BETA_FAST", same="-1 -1.0"),
    _refused("the server does not unload an idle model: stop it", "--sleep-idle-seconds", same="-1"),
    # context and cache
    _refused(
        "the context is never shifted: an answer that fills it ends there, so take a larger --ctx-size",
        "--context-shift",
        env="CONTEXT_SHIFT",
        value=False,
        off="--no-context-shift",
    ),
    _ignored("the context is never shifted, so nothing needs keeping", "--keep", same="0"),
    _ignored(
        "parts of a prompt are not moved in the cache; equal beginnings are reused",
        "--cache-reuse",
        env="CACHE_REUSE",
        same="0",
    ),
    _ignored(
        "checkpoints share the memory of --cache-ram",
        "-ctxcp --ctx-checkpoints --swa-checkpoints",
        env="CTX_CHECKPOINTS",
        same="0",
    ),
    _ignored("one checkpoint is made a turn", "-cms --checkpoint-min-step", env="CHECKPOINT_MIN_SPACING_NT"),
    _ignored("the cache of sliding windows keeps llama.cpp's size", "--swa-full", env="SWA_FULL", value=False),
    _ignored("llama.cpp no longer defragments its cache", "-dt --defrag-thold", env="DEFRAG_THOLD"),
    # processor
    _ignored(_AFFINITY, "-C --cpu-mask"),
    _ignored(_AFFINITY, "-Cr --cpu-range"),
    _ignored(_AFFINITY, "--cpu-strict", same="0"),
    _ignored(_AFFINITY, "--prio", same="0"),
    _ignored(_AFFINITY, "--poll"),
    _ignored(_AFFINITY, "-Cb --cpu-mask-batch"),
    _ignored(_AFFINITY, "-Crb --cpu-range-batch"),
    _ignored(_AFFINITY, "--cpu-strict-batch", same="0"),
    _ignored(_AFFINITY, "--prio-batch", same="0"),
    _ignored(_AFFINITY, "--poll-batch"),
    _ignored("llama.cpp's own timers are not used", "--perf", env="PERF", value=False, off="--no-perf"),
    # HTTP
    _ignored(
        "connections are served by one event loop, without threads", "--threads-http", env="THREADS_HTTP", same="-1"
    ),
    _refused("a port is not shared: run one server on it", "--reuse-port", env="REUSE_PORT", value=False),
    _refused("no files are served: put a web server in front", "--path", env="STATIC_PATH"),
    _ignored("there is no web page", "--ui --webui", env="UI", value=False, off="--no-ui --no-webui"),
    _ignored(_UI, "--ui-config --webui-config", env="UI_CONFIG"),
    _ignored(_UI, "--ui-config-file --webui-config-file", env="UI_CONFIG_FILE"),
    _refused(
        _TOOLS,
        "--ui-mcp-proxy --webui-mcp-proxy",
        env="UI_MCP_PROXY",
        value=False,
        off="--no-ui-mcp-proxy --no-webui-mcp-proxy",
    ),
    _refused(_TOOLS, "--tools", env="TOOLS", same="none"),
    _refused(_TOOLS, "--tools-runtime", env="TOOLS_RUNTIME"),
    _refused(_TOOLS, "--mcp-servers-config", env="MCP_SERVERS_CONFIG"),
    _refused(_TOOLS, "--mcp-servers-json", env="MCP_SERVERS_JSON"),
    _refused(_TOOLS, "-ag --agent", env="AGENT", value=False, off="-no-ag --no-agent"),
    # embeddings, images
    _refused(_EMBEDDINGS, "--embedding --embeddings", env="EMBEDDINGS", value=False),
    _refused(_EMBEDDINGS, "--rerank --reranking", env="RERANKING", value=False),
    _refused(_EMBEDDINGS, "--pooling", env="POOLING", same="none"),
    _refused(_EMBEDDINGS, "--embd-normalize"),
    _refused(_MULTIMODAL, "-mm --mmproj", env="MMPROJ"),
    _refused(_MULTIMODAL, "-mmu --mmproj-url", env="MMPROJ_URL"),
    _refused(_MULTIMODAL, "--mmproj-auto", env="MMPROJ_AUTO", value=False, off="--no-mmproj --no-mmproj-auto"),
    _refused(_MULTIMODAL, "--mmproj-offload", env="MMPROJ_OFFLOAD", value=False, off="--no-mmproj-offload"),
    _refused(_MULTIMODAL, "-mmdev --mmproj-device", same="none"),
    _refused(_MULTIMODAL, "--image-min-tokens", env="IMAGE_MIN_TOKENS"),
    _refused(_MULTIMODAL, "--image-max-tokens", env="IMAGE_MAX_TOKENS"),
    _refused(_MULTIMODAL, "--mtmd-batch-max-tokens", env="MTMD_BATCH_MAX_TOKENS"),
    _refused(_MULTIMODAL, "--video-fps", env="VIDEO_FPS"),
    _refused(_MULTIMODAL, "--video-timestamp-interval", env="VIDEO_TIMESTAMP_INTERVAL"),
    _refused(_MULTIMODAL, "--video-ffmpeg-dir", env="VIDEO_FFMPEG_DIR"),
    _refused(_MULTIMODAL, "--media-path"),
    # chat and sampling
    _same("templates are always rendered with Jinja", "--jinja", env="JINJA", off="--no-jinja", off_answer=_REFUSED),
    _refused(
        "answers are always parsed: leave it out, or take --reasoning-format none to keep thoughts in the content",
        "--skip-chat-parsing",
        env="SKIP_CHAT_PARSING",
        value=False,
        off="--no-skip-chat-parsing",
    ),
    _same(
        "a last assistant message is continued",
        "--prefill-assistant",
        env="PREFILL_ASSISTANT",
        off_answer=_REFUSED,
        off="--no-prefill-assistant",
    ),
    _refused('stop texts belong to the request: send them as "stop"', "-r --reverse-prompt"),
    _refused("special tokens are not shown in answers: leave it out", "-sp --special", value=False),
    _ignored("infill is not served", "--spm-infill", value=False),
    _refused("a schema for all requests is not supported yet: give --grammar, a GBNF grammar", "-j --json-schema"),
    _refused(
        "a schema for all requests is not supported yet: give --grammar, a GBNF grammar",
        "-jf --json-schema-file",
    ),
    _ignored("tokens are sampled on the CPU", "-bs --backend-sampling", env="BACKEND_SAMPLING", value=False),
    _ignored("escapes in --dry-sequence-breaker are always understood", "--no-escape", value=False),
    _same("escapes are understood", "-e --escape", off_answer=_IGNORED),
    # log and command
    _ignored(_LOOKS, "--log-prefix", env="LOG_PREFIX", value=False, off="--no-log-prefix"),
    _ignored(_LOOKS, "--log-timestamps", env="LOG_TIMESTAMPS", value=False, off="--no-log-timestamps"),
    _ignored(_LOOKS, "--log-colors", env="LOG_COLORS"),
    _refused("prompts are never written to a log: leave it out", "--log-prompts-dir"),
    _refused("there is no completion script", "--completion-bash", value=False),
    # speculation
    _refused(_SPECULATION, "--spec-type", env="SPEC_TYPE", same="none"),
    _refused(_SPECULATION, "--spec-default", value=False),
    _refused(_SPECULATION, "--spec-draft-model -md --model-draft", env="SPEC_DRAFT_MODEL"),
    _refused(_SPECULATION, "--spec-draft-hf -hfd -hfrd --hf-repo-draft", env="SPEC_DRAFT_HF_REPO"),
    _refused(_SPECULATION, "-lcs --lookup-cache-static"),
    _refused(_SPECULATION, "-lcd --lookup-cache-dynamic"),
    _refused(_SPECULATION, "--spec-draft-n-max", env="SPEC_DRAFT_N_MAX"),
    _refused(_SPECULATION, "--spec-draft-n-min", env="SPEC_DRAFT_N_MIN"),
    _refused(_SPECULATION, "--spec-draft-p-split --draft-p-split", env="SPEC_DRAFT_P_SPLIT"),
    _refused(_SPECULATION, "--spec-draft-p-min --draft-p-min", env="SPEC_DRAFT_P_MIN"),
    _refused(_SPECULATION, "--spec-draft-type-k -ctkd --cache-type-k-draft", env="SPEC_DRAFT_CACHE_TYPE_K"),
    _refused(_SPECULATION, "--spec-draft-type-v -ctvd --cache-type-v-draft", env="SPEC_DRAFT_CACHE_TYPE_V"),
    _refused(_SPECULATION, "--spec-draft-ngl -ngld --gpu-layers-draft --n-gpu-layers-draft", env="N_GPU_LAYERS_DRAFT"),
    _refused(_SPECULATION, "--spec-draft-device -devd --device-draft"),
    _refused(_SPECULATION, "--spec-draft-override-tensor -otd --override-tensor-draft"),
    _refused(_SPECULATION, "--spec-draft-cpu-moe -cmoed --cpu-moe-draft", env="SPEC_DRAFT_CPU_MOE", value=False),
    _refused(
        _SPECULATION,
        "--spec-draft-n-cpu-moe --spec-draft-ncmoe -ncmoed --n-cpu-moe-draft",
        env="SPEC_DRAFT_N_CPU_MOE",
    ),
    _refused(
        _SPECULATION,
        "--spec-draft-backend-sampling",
        env="SPEC_DRAFT_BACKEND_SAMPLING",
        value=False,
        off="--no-spec-draft-backend-sampling",
    ),
    _refused(_SPECULATION, "--spec-synth-len", env="SPEC_SYNTH_LEN"),
    _refused(_SPECULATION, "--spec-synth-rates", env="SPEC_SYNTH_RATES"),
    _refused(_SPECULATION, "--spec-draft-threads -td --threads-draft"),
    _refused(_SPECULATION, "--spec-draft-threads-batch -tbd --threads-batch-draft"),
    _refused(_SPECULATION, "--spec-draft-cpu-mask -Cd --cpu-mask-draft"),
    _refused(_SPECULATION, "--spec-draft-cpu-range -Crd --cpu-range-draft"),
    _refused(_SPECULATION, "--spec-draft-cpu-strict --cpu-strict-draft"),
    _refused(_SPECULATION, "--spec-draft-prio --prio-draft"),
    _refused(_SPECULATION, "--spec-draft-poll --poll-draft"),
    _refused(_SPECULATION, "--spec-draft-cpu-mask-batch -Cbd --cpu-mask-batch-draft"),
    _refused(_SPECULATION, "--spec-draft-cpu-strict-batch --cpu-strict-batch-draft"),
    _refused(_SPECULATION, "--spec-draft-prio-batch --prio-batch-draft"),
    _refused(_SPECULATION, "--spec-draft-poll-batch --poll-batch-draft"),
    _refused(_SPECULATION, "--spec-ngram-mod-n-min --spec-ngram-mod-n-max --spec-ngram-mod-n-match"),
    _refused(_SPECULATION, "--spec-ngram-simple-size-n --spec-ngram-simple-size-m --spec-ngram-simple-min-hits"),
    _refused(_SPECULATION, "--spec-ngram-map-k-size-n --spec-ngram-map-k-size-m --spec-ngram-map-k-min-hits"),
    _refused(_SPECULATION, "--spec-ngram-map-k4v-size-n --spec-ngram-map-k4v-size-m --spec-ngram-map-k4v-min-hits"),
    # what llama.cpp itself has removed
    _refused(
        f"llama.cpp replaced it by --spec-draft-n-max and --spec-ngram-mod-n-max, and {_SPECULATION}",
        "--draft --draft-n --draft-max",
        env="DRAFT_MAX",
    ),
    _refused(
        f"llama.cpp replaced it by --spec-draft-n-min and --spec-ngram-mod-n-min, and {_SPECULATION}",
        "--draft-min --draft-n-min",
        env="DRAFT_MIN",
    ),
    _refused(
        f"llama.cpp replaced it by the --spec-ngram-* flags of each type, and {_SPECULATION}",
        "--spec-ngram-size-n --spec-ngram-size-m --spec-ngram-min-hits",
    ),
    _refused("llama.cpp removed self-extend: --rope-scaling yarn stretches a context", "-gan --grp-attn-n"),
    _refused("llama.cpp removed self-extend: --rope-scaling yarn stretches a context", "-gaw --grp-attn-w"),
    _refused("llama.cpp removed tail-free sampling: use --min-p", "--tfs"),
    _refused("llama.cpp removed it: send a system message with each request", "-spf --system-prompt-file"),
    _ignored("llama.cpp removed it; line ends count as any token", "--penalize-nl --no-penalize-nl", value=False),
    _ignored("llama.cpp removed it", "-nommq --no-mul-mat-q -mmq --mul-mat-q", value=False),
    _ignored("llama.cpp removed it; --log-file appends", "--log-append --log-new --log-enable", value=False),
    # what other servers call it
    _refused("here it is --parallel", "--max-num-seqs"),
    _refused("here it is --batch-size", "--max-num-batched-tokens"),
    _refused("here it is --cache-type-k and --cache-type-v", "--kv-cache-dtype"),
    _refused("here it is --tensor-split and --split-mode", "--tensor-parallel-size -tp"),
    _refused("here it is --api-prefix", "--root-path"),
    _refused(
        "the parser is chosen by the model and its template, and GLM's reads every generation: leave it out",
        "--tool-call-parser --reasoning-parser",
        same="glm45 glm47",
    ),
    _same("tool calls need no switch", "--enable-auto-tool-choice"),
)

SPELLINGS: tuple[Spelling, ...] = (
    Spelling(("-v", "--verbose", "--log-verbose"), "log-level", "debug"),
    Spelling(
        ("--log-jsonl",),
        "log-format",
        "json",
        off=("--no-log-jsonl",),
        off_text="text",
        env="LLAMA_ARG_LOG_JSONL",
    ),
    Spelling(("--log-disable",), "log-level", "error", warning="errors are logged all the same"),
    Spelling(("--sampler-seq", "--sampling-seq"), "samplers", convert=SamplerLetters()),
    # vLLM's
    Spelling(("--served-model-name",), "alias", convert=Words(metavar="NAME,…", sample="glm-5.2,glm")),
    Spelling(("--max-model-len",), "kv-unified-per-slot", convert=Whole(least=1, most=2**31 - 1, sample="32768")),
    Spelling(("--slots-endpoint-disable",), "slots", "off", warning="its name is --no-slots now"),
)
