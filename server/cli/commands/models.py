"""python -m server models: the models that there are recipes for, and which of them are here."""

from __future__ import annotations

import sys

from server.cli.flag import Group
from server.cli.subcommand import Call, Place, Spec, models_dir_option, option
from server.cli.values import Switch

SPEC = Spec(
    "models",
    "lists the models that there are recipes for, and which of them are here",
    places=(Place("NAME", "one model: its quants, and flags for this and other boxes", required=False),),
    groups=(
        Group(
            "How",
            (
                models_dir_option(),
                option("--json", Switch(), False, "write one JSON document"),
            ),
        ),
    ),
    notes=(
        "Models are looked for in the models folder and in the cache of Hugging Face's own client.",
        "Sizes are rounded, as published; what nobody published is unknown until the model is fetched.",
    ),
)


def run(call: Call) -> int:
    from server.cli.models_display import json_text, list_text, one_text
    from server.cli.this_box import judge_for, memory_here
    from server.store.local import local_models
    from server.store.places import Places
    from server.store.recipes import load_recipes, recipe_named

    recipes = load_recipes()
    if call["name"]:
        recipes = (recipe_named(call["name"], recipes),)
    places = Places.from_environment(call.environment, call["models-dir"])
    local = local_models(places.models, places.hf_cache)
    memory = memory_here(call.environment)
    judge = judge_for(memory, call.environment)
    if call["json"]:
        text = json_text(recipes, local, judge=judge)
    elif call["name"]:
        text = one_text(recipes[0], local, judge=judge)
    else:
        text = list_text(recipes, local, color=sys.stdout.isatty(), judge=judge)
        how = "What is here was planned with the server's defaults; the rest goes by size alone."
        text += f"This box: {memory.text}. {how}\n"
    sys.stdout.write(text)
    sys.stdout.flush()
    return 0
