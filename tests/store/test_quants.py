"""A repository's files sorted into quants, and what a name chooses of them."""

from __future__ import annotations

import pytest

from server.errors import ConfigError
from server.store.names import HubName
from server.store.quants import RemoteFile, choose, quants_of, size_text

GIB = 1 << 30


def files(*paths: str, size: int = GIB) -> list[RemoteFile]:
    return [RemoteFile(path, size, None) for path in paths]


def shards(stem: str, count: int) -> list[RemoteFile]:
    return files(*(f"{stem}-{i:05d}-of-{count:05d}.gguf" for i in range(1, count + 1)))


UNSLOTH = [
    *shards("UD-Q4_K_M/GLM-5.2-UD-Q4_K_M", 11),
    *shards("UD-IQ1_S/GLM-5.2-UD-IQ1_S", 3),
    *shards("BF16/GLM-5.2-BF16", 33),
    *files("mmproj-F16.gguf", "imatrix_unsloth.gguf", "README.md", "config.json"),
]
FLAT = files("GLM-4.7-Flash-Q4_K_M.gguf", "GLM-4.7-Flash-UD-Q4_K_XL.gguf", "GLM-4.7-Flash.Q8_0.gguf", "other.gguf")


def refusal(name: HubName, listed: list[RemoteFile]) -> str:
    with pytest.raises(ConfigError) as caught:
        choose(name, listed)
    return caught.value.message


def test_a_folder_for_every_quant() -> None:
    assert [str(quant) for quant in quants_of(UNSLOTH)] == [
        "UD-IQ1_S (3.0 GiB, 3 files)",
        "UD-Q4_K_M (11.0 GiB, 11 files)",
        "BF16 (33.0 GiB, 33 files)",
    ]
    chosen = choose(HubName("u/g", "ud-q4_k_m"), list(reversed(UNSLOTH)))
    assert [file.name for file in chosen.files] == [f"GLM-5.2-UD-Q4_K_M-{i:05d}-of-00011.gguf" for i in range(1, 12)]


def test_files_side_by_side() -> None:
    assert {quant.name for quant in quants_of(FLAT)} == {"Q4_K_M", "UD-Q4_K_XL", "Q8_0", "other"}
    assert choose(HubName("u/g", "Q4_K_XL"), FLAT).name == "UD-Q4_K_XL"
    assert choose(HubName("u/g", file="GLM-4.7-Flash.Q8_0.gguf"), FLAT).name == "Q8_0"


@pytest.mark.parametrize(
    "name", "IQ2_XXS Q4_K_M UD-Q2_K_XL BF16 f16 Q8_0 IQ4_NL TQ1_0 MXFP4_MOE Q3_K_S UD-IQ3_XXS Q6_K".split()
)
def test_names_of_quants_at_the_end_of_a_file(name: str) -> None:
    assert quants_of(files(f"Some-Model-7B-{name}.gguf"))[0].name == name


def test_two_models_of_one_quant_go_by_their_files() -> None:
    listed = files("a-Q4_0.gguf", "b-Q4_0.gguf")
    assert {quant.name for quant in quants_of(listed)} == {"a-Q4_0", "b-Q4_0"}
    assert choose(HubName("u/g", "b-Q4_0"), listed).files[0].path == "b-Q4_0.gguf"


def test_one_quant_needs_no_name() -> None:
    assert choose(HubName("u/g"), files("m.gguf", "mmproj-m.gguf")).name == "m"


def test_ambiguity_is_answered_with_the_choices() -> None:
    message = refusal(HubName("u/g"), UNSLOTH)
    assert message == (
        "u/g has 3 quants; say which, as in u/g:UD-IQ1_S: UD-IQ1_S (3.0 GiB, 3 files), UD-Q4_K_M (11.0 GiB, 11 files), "
        "BF16 (33.0 GiB, 33 files)"
    )
    assert refusal(HubName("u/g", "Q9"), UNSLOTH).startswith("u/g has no quant 'Q9'; it has UD-IQ1_S (3.0 GiB")
    both = files("x-UD-Q4_K.gguf", "x-XX-Q4_K.gguf", "x.gguf")
    assert [quant.name for quant in quants_of(both)]
    assert "means more than one quant" in refusal(HubName("u/g", "M"), files("a-M/x.gguf", "b-M/x.gguf"))


def test_many_choices_are_cut() -> None:
    message = refusal(HubName("u/g"), files(*(f"m{i}.gguf" for i in range(45))))
    assert message.endswith("and 5 more")


def test_a_recipes_pattern_finds_what_its_name_does_not() -> None:
    listed = files("GLM-Q6_K-IQ2_S-IQ2_S-IQ3_S.gguf", "GLM-Q4_K_M.gguf")
    chosen = choose(HubName("u/g", "IQ2_S", pattern="*Q6_K-IQ2_S*.gguf"), listed)
    assert (chosen.name, chosen.files[0].path) == ("IQ2_S", "GLM-Q6_K-IQ2_S-IQ2_S-IQ3_S.gguf")
    assert choose(HubName("u/g", "Q4_K_M", pattern="gone/*.gguf"), listed).name == "Q4_K_M"


def test_repositories_that_have_nothing_for_us() -> None:
    assert "has no GGUF files; look for" in refusal(HubName("zai-org/GLM"), files("model.safetensors"))
    assert "there is no file 'x.gguf' in u/g; it has 'm.gguf'" in refusal(
        HubName("u/g", file="x.gguf"), files("m.gguf")
    )
    assert "no .gguf file" in refusal(HubName("u/g", file="x.gguf"), [])
    half = shards("q/m", 4)[:3]
    assert "has only 3 of the 4 shards of q: its upload is not complete" in refusal(HubName("u/g"), half)


def test_sizes_in_words() -> None:
    assert [size_text(n) for n in (0, 1023, 1536, 466e9, 1.5e12)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "434.0 GiB",
        "1.4 TiB",
    ]
