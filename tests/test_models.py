"""The checkpoints: the same bytes everywhere, readable, consistent, and with a ban that holds."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from harness.errors import ConfigurationError, InfrastructureError
from harness.models import MODELS, ModelSpec, Variant, default_root, digest, generate, special_ids, verify
from harness.models.spec import HEAD_DIM
from harness.models.store import checksums, variant_files
from harness.models.tokenizer import MERGES, SPECIAL_TOKENS, vocab_size, vocabulary
from harness.models.weights import BAN_CHANNEL, BAN_LEVEL, Tensor, tensors, values

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]

CHECKPOINTS = [
    pytest.param(spec, variant, id=f"{spec.name}/{variant.name}") for spec in MODELS for variant in spec.variants
]
W1, W2, UNBANNED = MODELS[0].variants


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All models, made once and only read."""
    root = tmp_path_factory.mktemp("models")
    generate(root)
    return root


@pytest.fixture
def own(root: Path, tmp_path: Path) -> Path:
    """A copy of all models."""
    shutil.copytree(root, tmp_path, dirs_exist_ok=True)
    return tmp_path


def weights(spec: ModelSpec, variant: Variant) -> dict[str, Floats]:
    return {tensor.name: values(spec, variant, tensor) for tensor in tensors(spec)}


def document(root: Path, path: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((root / path).read_text(encoding="utf-8"))
    return content


# --- bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("spec", "variant"), CHECKPOINTS)
def test_bytes_are_the_committed_ones(spec: ModelSpec, variant: Variant) -> None:
    prefix = f"{spec.name}/{variant.name}/"
    made = {prefix + name: hashlib.sha256(data).hexdigest() for name, data in variant_files(spec, variant).items()}
    assert made == {path: sha for path, sha in checksums().items() if path.startswith(prefix)}


def test_two_runs_leave_the_same_tree(root: Path, tmp_path: Path) -> None:
    def tree(top: Path) -> dict[str, bytes]:
        return {file.relative_to(top).as_posix(): file.read_bytes() for file in top.rglob("*/*/*")}

    generate(tmp_path)
    assert tree(root) == tree(tmp_path)
    assert set(tree(root)) == set(checksums())


def test_a_checkpoint_takes_a_few_megabytes(root: Path) -> None:
    for weights_file in root.rglob("model.safetensors"):
        assert weights_file.stat().st_size < 4 << 20


def test_generate_does_nothing_where_all_is_there(own: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in own.rglob("*/*/*")}
    (own / ".lock").unlink(missing_ok=True)
    assert generate(own) == checksums()
    assert {file: file.stat().st_mtime_ns for file in own.rglob("*/*/*")} == before
    assert not (own / ".lock").exists()  # a read-only folder that is complete will do


def test_generate_repairs_the_damaged_variant_only(own: Path) -> None:
    untouched = own / "qwen2/w2/model.safetensors"
    before = untouched.stat().st_ino, untouched.stat().st_mtime_ns
    (own / "qwen2/w1/model.safetensors").write_bytes(b"cut short")
    (own / "notes.txt").write_text("somebody's", encoding="utf-8")
    generate(own)
    verify(own)
    assert (untouched.stat().st_ino, untouched.stat().st_mtime_ns) == before
    assert (own / "notes.txt").exists()
    assert not list(own.rglob(".w1.*"))


@pytest.mark.parametrize("damage", ["changed", "missing", "stray", "no variant"])
def test_verify_names_the_file(own: Path, damage: str) -> None:
    folder = own / "qwen2_vl" / "w2"
    if damage == "changed":
        file = folder / "model.safetensors"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    elif damage == "missing":
        file = folder / "merges.txt"
        file.unlink()
    elif damage == "stray":
        file = folder / "model-2.safetensors"
        file.touch()
    else:
        file = folder
        folder.rename(own / "elsewhere")
    with pytest.raises(InfrastructureError, match=re.escape(str(file))):
        verify(own)
    generate(own)
    verify(own)


def test_verify_wants_models(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no models"):
        verify(tmp_path)


def test_other_bytes_than_committed_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.models.store.serialize", lambda spec, variant: b"other")
    with pytest.raises(InfrastructureError, match=r"model\.safetensors comes out with other bytes"):
        generate(tmp_path)
    assert not (tmp_path / "qwen2" / "w1").exists()


def test_a_disk_that_refuses_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InfrastructureError, match="cannot write the models"):
        generate(tmp_path / "file")


def test_processes_may_generate_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=generate, args=(tmp_path,)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    verify(tmp_path)


def test_the_default_folder_is_named_after_the_digest() -> None:
    assert default_root().name == f"models-{digest()[:12]}"
    assert len(digest()) == 64


# --- imports ---------------------------------------------------------------------------------------------------------


def test_no_heavy_import(tmp_path: Path) -> None:
    script = (
        "import sys, pathlib, harness.models\n"
        "print(*{'numpy', 'tokenizers', 'safetensors', 'filelock', 'platformdirs'} & set(sys.modules))\n"
        "harness.models.generate(pathlib.Path(sys.argv[1]))\n"
        "print(*{'torch', 'transformers', 'vllm'} & set(sys.modules))\n"
    )
    out = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True, check=True).stdout
    assert out == "\n\n"


# --- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("spec", "variant"), CHECKPOINTS)
def test_the_library_reads_the_weights(root: Path, spec: ModelSpec, variant: Variant) -> None:
    from safetensors import deserialize

    data = (root / spec.name / variant.name / "model.safetensors").read_bytes()
    found = {name: (info["dtype"], tuple(info["shape"]), bytes(info["data"])) for name, info in deserialize(data)}
    expected = weights(spec, variant)
    assert {name: (dtype, shape) for name, (dtype, shape, _) in found.items()} == {
        tensor.name: ("BF16", tensor.shape) for tensor in tensors(spec)
    }
    for name, (_, _, raw) in found.items():
        widened = (np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4")
        assert np.array_equal(widened, expected[name].ravel()), name


@pytest.mark.parametrize("spec", MODELS, ids=lambda spec: spec.name)
def test_every_tensor_differs_between_the_weight_sets(spec: ModelSpec) -> None:
    first, second = weights(spec, W1), weights(spec, W2)
    assert [name for name in first if np.array_equal(first[name], second[name])] == []


@pytest.mark.parametrize("spec", MODELS, ids=lambda spec: spec.name)
def test_the_twin_differs_in_the_ban_only(spec: ModelSpec) -> None:
    banned, free = weights(spec, W1), weights(spec, UNBANNED)
    assert [name for name in banned if not np.array_equal(banned[name], free[name])] == ["lm_head.weight"]
    rows, columns = np.nonzero(banned["lm_head.weight"] != free["lm_head.weight"])
    assert sorted(rows) == sorted(special_ids().values())
    assert set(columns) == {BAN_CHANNEL}


def test_a_weight_that_bfloat16_cannot_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from harness.models import weights as module

    monkeypatch.setattr(module, "BAN_LEVEL", 16.03)
    with pytest.raises(ValueError, match="not exact in bfloat16"):
        module.serialize(MODELS[0], W1)


# --- the ban ---------------------------------------------------------------------------------------------------------


def logits(model: dict[str, Floats], hidden: Floats) -> Floats:
    """Final norm and head, for hidden states of shape (n, width)."""
    normed = hidden / np.sqrt(np.mean(hidden**2, axis=1, keepdims=True) + 1e-6) * model["model.norm.weight"]
    result: Floats = normed @ model["lm_head.weight"].T
    return result


def hidden_states(width: int) -> Floats:
    """Random residual streams from nearly empty to twice as loud as measured ones (rms 4), banned channel set."""
    random = np.random.default_rng(0)
    loudness = np.repeat([0.1, 0.5, 1.0, 2.0, 4.0, 8.0], 500)[:, None]
    hidden: Floats = (random.standard_normal((len(loudness), width)) * loudness).astype("f4")
    hidden[:, BAN_CHANNEL] = BAN_LEVEL
    return hidden


@pytest.mark.parametrize("spec", MODELS, ids=lambda spec: spec.name)
@pytest.mark.parametrize("variant", [W1, W2], ids=lambda variant: variant.name)
def test_banned_logits_lie_below_all_others(spec: ModelSpec, variant: Variant) -> None:
    model = weights(spec, variant)
    found = logits(model, hidden_states(spec.text.hidden))
    banned = list(special_ids().values())
    highest_banned = found[:, banned].max(axis=1)
    highest_free = np.delete(found, banned, axis=1).max(axis=1)
    assert (highest_free - highest_banned).min() > 20  # e^-20: out of reach for sampling at temperature 1 too


@pytest.mark.parametrize("spec", MODELS, ids=lambda spec: spec.name)
def test_the_ban_holds_against_a_hidden_state_made_for_a_banned_token(spec: ModelSpec) -> None:
    model = weights(spec, W1)
    banned = list(special_ids().values())
    hidden = model["lm_head.weight"][banned] / model["model.norm.weight"]
    hidden *= 4.0 / np.sqrt(np.mean(hidden**2, axis=1, keepdims=True))
    hidden[:, BAN_CHANNEL] = BAN_LEVEL
    assert set(logits(model, hidden).argmax(axis=1)).isdisjoint(banned)


@pytest.mark.parametrize("spec", MODELS, ids=lambda spec: spec.name)
def test_the_twin_reaches_the_image_pad(spec: ModelSpec) -> None:
    found = logits(weights(spec, UNBANNED), hidden_states(spec.text.hidden)).argmax(axis=1)
    assert np.mean(found == special_ids()["<|image_pad|>"]) > 0.1


@pytest.mark.parametrize(("spec", "variant"), CHECKPOINTS)
def test_no_layer_touches_the_banned_channel(spec: ModelSpec, variant: Variant) -> None:
    model = weights(spec, variant)
    assert set(model["model.embed_tokens.weight"][:, BAN_CHANNEL]) == {BAN_LEVEL}
    assert model["model.norm.weight"][BAN_CHANNEL] == 1.0
    for layer in range(spec.text.layers):
        prefix = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            assert model[f"{prefix}.{name}.weight"][BAN_CHANNEL] == 0.0
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            assert not model[f"{prefix}.{name}.weight"][BAN_CHANNEL].any()
    if spec.vision:
        assert not model["visual.merger.mlp.2.weight"][BAN_CHANNEL].any()
        assert model["visual.merger.mlp.2.bias"][BAN_CHANNEL] == BAN_LEVEL


# --- sizes and files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", MODELS, ids=lambda spec: spec.name)
def test_sizes_suit_the_kernels_and_two_ranks(root: Path, spec: ModelSpec) -> None:
    config = document(root, f"{spec.name}/w1/config.json")
    assert config["architectures"] == [spec.architecture]
    assert config["hidden_size"] == config["num_attention_heads"] * HEAD_DIM
    assert config["num_attention_heads"] % config["num_key_value_heads"] == 0
    assert config["num_key_value_heads"] % 2 == 0
    assert config["intermediate_size"] % 128 == config["hidden_size"] % 128 == 0
    assert config["tie_word_embeddings"] is False
    if spec.vision:
        assert sum(config["rope_scaling"]["mrope_section"]) == HEAD_DIM // 2
        assert spec.vision.hidden == spec.vision.heads * HEAD_DIM
        assert spec.vision.heads % 2 == spec.vision.intermediate % 128 == 0


def test_qwen2_5_vl_has_windows_that_divide_and_a_layer_of_either_kind(root: Path) -> None:
    vision = document(root, "qwen2_5_vl/w1/config.json")["vision_config"]
    assert vision["window_size"] % (vision["patch_size"] * vision["spatial_merge_size"]) == 0
    assert 0 < len(vision["fullatt_block_indexes"]) < vision["depth"]
    assert max(vision["fullatt_block_indexes"]) < vision["depth"]


@pytest.mark.parametrize(("spec", "variant"), CHECKPOINTS)
def test_every_id_has_a_token(root: Path, spec: ModelSpec, variant: Variant) -> None:
    from tokenizers import Tokenizer

    folder = root / spec.name / variant.name
    config = document(folder, "config.json")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert config["vocab_size"] == tokenizer.get_vocab_size(with_added_tokens=True) == vocab_size()
    assert vocab_size() % 64 == 0
    assert sorted(tokenizer.get_vocab(with_added_tokens=True).values()) == list(range(vocab_size()))
    for key, token in (("image", "<|image_pad|>"), ("video", "<|video_pad|>"), ("vision_start", "<|vision_start|>")):
        if spec.vision:
            assert config[f"{key}_token_id"] == tokenizer.token_to_id(token) == special_ids()[token]


def test_the_vocabulary_is_bytes_and_merges_without_repetition() -> None:
    assert len(vocabulary()) == 256 + len(MERGES)
    assert len(special_ids()) == len(SPECIAL_TOKENS) == vocab_size() - len(vocabulary())


@pytest.mark.parametrize(
    "text", ["Hello, the world!", "naïve ünïcödé 你好 🙂", "a\r\n\tb  c ", "<|im_start|>user\n<|image_pad|>"]
)
def test_text_survives_the_tokenizer(root: Path, text: str) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(root / "qwen2/w1/tokenizer.json"))
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert ids.count(special_ids()["<|image_pad|>"]) == text.count("<|image_pad|>")


def test_merges_are_applied(root: Path) -> None:
    from tokenizers import Tokenizer

    tokens = Tokenizer.from_file(str(root / "qwen2/w1/tokenizer.json")).encode("at the end").tokens
    assert tokens == ["at", "\u0120t", "he", "\u0120e", "nd"]


@pytest.mark.parametrize(("spec", "variant"), CHECKPOINTS)
def test_the_files_of_a_checkpoint(root: Path, spec: ModelSpec, variant: Variant) -> None:
    names = {file.name for file in (root / spec.name / variant.name).iterdir()}
    text = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
            "special_tokens_map.json", "vocab.json", "merges.txt"}  # fmt: skip
    image = {"preprocessor_config.json", "video_preprocessor_config.json", "chat_template.json"}
    assert names == (text | image if spec.vision else text)


@pytest.mark.parametrize("tensor", [Tensor("t", (3, 5), 0.5), Tensor("t", (7,), gain=True)])
def test_raw_numbers_are_bounded_and_do_not_depend_on_the_ban(tensor: Tensor) -> None:
    found = values(MODELS[0], W1, tensor)
    assert found.shape == tensor.shape
    assert np.array_equal(found, values(MODELS[0], UNBANNED, tensor))
    low, high = (0.5, 1.5) if tensor.gain else (-tensor.bound, tensor.bound)
    assert low <= found.min() < found.max() < high
