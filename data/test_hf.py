"""What must stay true of Hugging Face folders. The folders are made here, in their format, so only the last tests need transformers."""
import json, math, subprocess, sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from data.batches import IGNORE, make_batch
from data.hf import LETTER, MASK, PAD, read_folder, read_tokenizer, write_folder
from data.tokenizer import GPT2_PATTERN, GPT4_PATTERN, Tokenizer, load_tokenizer
from data.tokens import TokenFile, TokenWriter
from model import from_checkpoint, load_checkpoint

ROOT = Path(__file__).resolve().parents[1]
CONFIG = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48,
          "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 5000.0, "hidden_act": "silu", "eos_token_id": 0, "tie_word_embeddings": False}
TEXT = "the theme  of 1234 other 12 themes\n\n\tis 中文 🙂 it's\u00a0the   end "


def spell(piece):
    return "".join(LETTER[byte] for byte in piece)


def make_tokenizer(folder, special=("<|endoftext|>", "<|im_start|>"), first=True, **changes):
    """A byte-level BPE of 256 bytes and 8 merges, special tokens before or after."""
    merges = ["t h", "th e", "Ġ the", "Ġ o", "e m", "the m", "i s", "Ġ Ġ"]
    pieces = [spell(bytes([b])) for b in range(256)] + [merge.replace(" ", "") for merge in merges]
    names = [*special, *pieces] if first else [*pieces, *special]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": names.index(name), "content": name, "special": True, **flags} for name in special]
    about = {"version": "1.0", "added_tokens": added, "normalizer": None, "post_processor": None, 
             "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
             "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True},
                                                                     {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}]},
             "model": {"type": "BPE", "unk_token": None, "vocab": {name: i for i, name in enumerate(names)}, "merges": merges}}
    about.update(changes)
    (folder / "tokenizer.json").write_text(json.dumps(about))
    return len(names)


def make_folder(folder, config={}, shards=1, **tokenizer):
    """A Llama with random weights, its tensors named as transformers names them."""
    folder.mkdir(exist_ok=True)
    c = {**CONFIG, "vocab_size": make_tokenizer(folder, **tokenizer), **config}
    (folder / "config.json").write_text(json.dumps(c))
    C, I, kv = c["hidden_size"], c["intermediate_size"], c["hidden_size"] * c["num_key_value_heads"] // c["num_attention_heads"]
    shapes = {"model.embed_tokens": (c["vocab_size"], C), "model.norm": (C,)} | ({} if c["tie_word_embeddings"] else {"lm_head": (c["vocab_size"], C)})
    for n in range(c["num_hidden_layers"]):
        shapes |= {f"model.layers.{n}.{name}": shape for name, shape in {
            "input_layernorm": (C,), "post_attention_layernorm": (C,), "self_attn.q_proj": (C, C), "self_attn.k_proj": (kv, C), "self_attn.v_proj": (kv, C),
            "self_attn.o_proj": (C, C), "mlp.gate_proj": (I, C), "mlp.up_proj": (I, C), "mlp.down_proj": (C, I)}.items()}
    generator = torch.Generator().manual_seed(0)
    weights = {f"{name}.weight": torch.randn(shape, generator=generator) * 0.2 + (len(shape) == 1) for name, shape in shapes.items()}
    if shards == 1:
        save_file(weights, folder / "model.safetensors")
    else:
        where = {name: f"model-{i % shards}.safetensors" for i, name in enumerate(weights)}
        for file in set(where.values()):
            save_file({name: tensor for name, tensor in weights.items() if where[name] == file}, folder / file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


def edit(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def reference(folder, ids, causal):
    """Logits (T, V) of a Llama in float64, written out from its definition."""
    w = {name: tensor.double() for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}
    c = json.loads((folder / "config.json").read_text())
    T, H, D = len(ids), c["num_attention_heads"], c["hidden_size"] // c["num_attention_heads"]
    norm = lambda x, name: x / (x.pow(2).mean(-1, keepdim=True) + c["rms_norm_eps"]).sqrt() * w[f"{name}.weight"]
    angle = torch.arange(T)[:, None].double() / c["rope_theta"] ** (torch.arange(0, D, 2).double() / D)  # (T, D / 2)
    turn = torch.polar(torch.ones_like(angle), angle)

    def heads(x, name):
        return (x @ w[f"{name}.weight"].t()).view(T, -1, D).transpose(0, 1)  # (heads, T, D)

    def rope(x):
        y = torch.complex(x[..., :D // 2], x[..., D // 2:]) * turn
        return torch.cat((y.real, y.imag), -1)

    x = w["model.embed_tokens.weight"][ids]
    for n in range(c["num_hidden_layers"]):
        layer = f"model.layers.{n}."
        h = norm(x, layer + "input_layernorm")
        q, k, v = (heads(h, f"{layer}self_attn.{name}_proj") for name in "qkv")
        out = []
        for head in range(H):
            group = head * c["num_key_value_heads"] // H
            scores = rope(q[head]) @ rope(k[group]).t() / math.sqrt(D)
            if causal:
                scores = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf)
            out.append(scores.softmax(-1) @ v[group])
        x = x + torch.cat(out, -1) @ w[layer + "self_attn.o_proj.weight"].t()
        h = norm(x, layer + "post_attention_layernorm")
        gate, up = (h @ w[f"{layer}mlp.{name}_proj.weight"].t() for name in ("gate", "up"))
        x = x + (gate * gate.sigmoid() * up) @ w[layer + "mlp.down_proj.weight"].t()
    head = "model.embed_tokens.weight" if c["tie_word_embeddings"] else "lm_head.weight"
    return norm(x, "model.norm") @ w[head].t()


def logits_of(state, ids, causal):
    model = from_checkpoint(state).eval()
    with torch.no_grad():
        return (model(torch.as_tensor(ids)[None], causal=causal) @ model.head_weight.t())[0]


def refused(capture, *words):
    for word in words:
        assert word in str(capture.value)
    assert "\n" not in str(capture.value)


# --- the model


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("config", [{}, {"tie_word_embeddings": True}, {"num_key_value_heads": 4, "model_type": "eurobert"},
                                    {"model_type": "mistral", "sliding_window": None, "num_key_value_heads": 1}])
def test_a_folder_gives_the_logits_of_its_definition(tmp_path, config, causal):
    folder = make_folder(tmp_path / "in", config, shards=3 if config else 1)
    state = load_checkpoint(f"hf:{folder}")
    ids = np.random.default_rng(0).integers(0, 260, 40)
    theirs, ours = reference(folder, ids, causal), logits_of(state, ids, causal)
    assert (ours[:, :theirs.shape[1]] - theirs).abs().max() < 1e-4


def test_in_out_in_is_bit_equal(tmp_path):
    for n, config in enumerate(({}, {"tie_word_embeddings": True})):
        state = read_folder(make_folder(tmp_path / f"in{n}", config))
        for causal in (True, False):
            write_folder(state, tmp_path / f"out{n}{causal}", causal)
            again = read_folder(tmp_path / f"out{n}{causal}")
            assert again["config"] == state["config"] and again["data"] == state["data"]
            assert again["model"].keys() == state["model"].keys()
            assert all(torch.equal(again["model"][name], tensor) for name, tensor in state["model"].items())
            before, after = (Tokenizer.from_dict(s["tokenizer"]) for s in (state, again))
            assert before.special == after.special and before.vocab_size == after.vocab_size
            assert before.encode(TEXT).tolist() == after.encode(TEXT).tolist()


def test_a_folder_in_shards_is_the_same(tmp_path, monkeypatch):
    state = read_folder(make_folder(tmp_path / "in"))
    monkeypatch.setattr("data.hf.SHARD_BYTES", 20_000)
    write_folder(state, tmp_path / "out", True)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    again = read_folder(tmp_path / "out")
    assert all(torch.equal(again["model"][name], tensor) for name, tensor in state["model"].items())


@pytest.mark.parametrize("tied", [True, False])
def test_new_special_tokens_get_rows_at_the_mean(tmp_path, tied):
    folder = make_folder(tmp_path / "in", {"tie_word_embeddings": tied})
    state = read_folder(folder)
    tokenizer, old = Tokenizer.from_dict(state["tokenizer"]), json.loads((folder / "config.json").read_text())["vocab_size"]
    assert sorted((tokenizer.mask, tokenizer.pad)) == [old, old + 1] and tokenizer.eos == 0
    weights = load_file(folder / "model.safetensors")
    for ours, theirs in {"embed.weight": "model.embed_tokens.weight", **({} if tied else {"head.weight": "lm_head.weight"})}.items():
        assert len(state["model"][ours]) == tokenizer.vocab_size
        assert torch.equal(state["model"][ours][:old], weights[theirs])
        assert torch.allclose(state["model"][ours][[tokenizer.mask, tokenizer.pad]], weights[theirs].mean(0), atol=1e-7)


def test_reserved_tokens_become_mask_and_pad(tmp_path):
    special = ("<|begin|>", "<|end|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>")
    folder = make_folder(tmp_path / "in", {"eos_token_id": 265, "pad_token_id": 265}, special=special, first=False)
    state = read_folder(folder)
    tokenizer = Tokenizer.from_dict(state["tokenizer"])
    assert (tokenizer.eos, tokenizer.mask, tokenizer.pad) == (265, 266, 267)
    assert tokenizer.special == {"<|begin|>": 264, "<|end|>": 265, MASK: 266, PAD: 267}
    assert torch.equal(state["model"]["embed.weight"], load_file(folder / "model.safetensors")["model.embed_tokens.weight"])


def test_a_folder_with_its_own_mask_keeps_it(tmp_path):
    special = ("<|end|>", "<mask>", "<pad>")
    folder = make_folder(tmp_path / "in", {"model_type": "eurobert", "mask_token_id": 1, "pad_token_id": 2}, special=special)
    assert read_tokenizer(folder).roles == special[:1] + ("<pad>", "<mask>")


@pytest.mark.parametrize("field, value", [
    ("model_type", "qwen3"), ("hidden_act", "gelu"), ("attention_bias", True), ("mlp_bias", True), ("sliding_window", 4096), ("head_dim", 16),
    ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}), ("partial_rotary_factor", 0.5), ("layer_types", ["full_attention", "sliding_attention"]),
    ("eos_token_id", 77)])
def test_another_architecture_is_refused_by_its_field(tmp_path, field, value):
    folder = make_folder(tmp_path / "in")
    edit(folder / "config.json", **{field: value})
    with pytest.raises(SystemExit) as end:
        read_folder(folder)
    refused(end, field, "config.json")


def test_a_mistral_that_names_no_window_has_one(tmp_path):
    with pytest.raises(SystemExit) as end:
        read_folder(make_folder(tmp_path / "in", {"model_type": "mistral"}))
    refused(end, "sliding_window")


def test_tensors_that_do_not_fit_are_refused(tmp_path):
    folder = make_folder(tmp_path / "in")
    path = folder / "model.safetensors"
    whole, weights = path.read_bytes(), load_file(path)
    name = "model.layers.1.self_attn.k_proj.weight"
    norm = "model.layers.0.self_attn.q_norm.weight"
    for wrong, words in (({**weights, norm: torch.ones(8)}, [norm, "no place"]), ({k: v for k, v in weights.items() if k != name}, [name]),
                         ({**weights, name: torch.zeros(32, 32)}, [name, "[32, 32]", "[16, 32]"]), ({**weights, name: torch.zeros(16, 32).to(torch.int8)}, [name, "int8"])):
        save_file(wrong, path)
        with pytest.raises(SystemExit) as end:
            read_folder(folder)
        refused(end, *words)
    path.write_bytes(whole[:-100])
    with pytest.raises(SystemExit) as end:
        read_folder(folder)
    refused(end, "model.safetensors")
    path.unlink()
    with pytest.raises(SystemExit) as end:
        read_folder(folder)
    refused(end, "model.safetensors")


def test_nothing_is_written_over(tmp_path):
    state = read_folder(make_folder(tmp_path / "in"))
    with pytest.raises(SystemExit) as end:
        write_folder(state, tmp_path / "in", True)
    refused(end, str(tmp_path / "in"))
    assert not list(tmp_path.glob("*.tmp"))


# --- the tokenizer


def test_ids_split_and_special_tokens_are_the_files(tmp_path):
    make_folder(tmp_path / "in")
    tokenizer = load_tokenizer(f"hf:{tmp_path / 'in'}")
    vocab = json.loads((tmp_path / "in" / "tokenizer.json").read_text())["model"]["vocab"]
    assert (tokenizer.first, tokenizer.n_ordinary) == (2, 264)
    pieces = ["the", "Ġ", "1", "2", "Ġthe", "m", "ĠĠ", "Ġ", "3"]  # a digit ends a run of spaces; three spaces before a word are two and one
    assert tokenizer.encode("the 12 them   3").tolist() == [vocab[piece] for piece in pieces]
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.first <= min(tokenizer.encode("<|im_start|><|mask|>")) and Tokenizer.from_dict(tokenizer.to_dict()).hash == tokenizer.hash


@pytest.mark.parametrize("changes, word", [
    ({"normalizer": {"type": "NFC"}}, "normalizer"), ({"pre_tokenizer": {"type": "Whitespace"}}, "pre_tokenizer"),
    ({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True}}, "pre_tokenizer"),
    ({"added_tokens": [{"id": 0, "content": "<|endoftext|>", "special": True}, {"id": 1, "content": "<|im_start|>", "special": False}]}, "added_tokens")])
def test_another_tokenizer_is_refused_by_its_field(tmp_path, changes, word):
    make_folder(tmp_path / "in", **changes)
    with pytest.raises(SystemExit) as end:
        read_tokenizer(tmp_path / "in")
    refused(end, word, "tokenizer.json")


@pytest.mark.parametrize("merges", [["th e", "t h", "Ġ the", "Ġ o", "e m", "the m", "i s", "Ġ Ġ"],    # not in the order of the ids
                                    ["t h", "th e", "Ġ the", "Ġ o", "e m", "i s", "Ġ Ġ"],              # "them" is never made
                                    ["t h", "th e", "Ġ the", "Ġ o", "e m", "th em", "i s", "Ġ Ġ"]])    # made of parts that tiktoken has joined otherwise
def test_merges_that_tiktoken_would_do_otherwise_are_refused(tmp_path, merges):
    make_folder(tmp_path / "in")
    path = tmp_path / "in" / "tokenizer.json"
    edit(path, model={**json.loads(path.read_text())["model"], "merges": merges})
    with pytest.raises(SystemExit) as end:
        read_tokenizer(tmp_path / "in")
    refused(end, "merges", "tokenizer.json")


def test_special_ids_before_the_text_are_never_masked_or_drawn(tmp_path):
    make_folder(tmp_path / "in")
    tokenizer, rng = read_tokenizer(tmp_path / "in"), np.random.default_rng(0)
    out = TokenWriter(tmp_path / "t.bin", tokenizer)
    out.write([rng.integers(2, 266, n).astype(np.uint32) for n in rng.integers(1, 60, 300)])
    out.close()
    tokens = TokenFile(tmp_path / "t.bin")
    assert tokens.first == 2
    batch = make_batch(tokens, np.arange(64), 64, "mlm", 0.5, (0.0, 1.0, 0.0))
    targets = batch.targets[batch.targets != IGNORE]
    drawn = batch.ids.view(-1)[batch.places[:batch.n_targets]]
    for ids in (targets, drawn):
        assert ids.min() == 2 and ids.max() == 265
    assert len(set(drawn.tolist())) == 264


def without(tmp_path, *gone):
    """A folder whose vocabulary lacks these bytes."""
    make_folder(tmp_path / "in")
    path = tmp_path / "in" / "tokenizer.json"
    model = json.loads(path.read_text())["model"]
    kept = [name for name in model["vocab"] if name not in {spell(bytes([b])) for b in gone}]
    edit(path, model={**model, "vocab": {name: i for i, name in enumerate(kept)}})
    edit(tmp_path / "in" / "config.json", vocab_size=len(kept))
    return tmp_path / "in"


def test_bytes_without_an_id_are_named_and_left_out_before_the_merges(tmp_path, capsys):
    tokenizer = read_tokenizer(without(tmp_path, 4, 0xF3))
    assert "04 f3" in capsys.readouterr().err
    assert tokenizer.encode("t\x04h 12").tolist() == [*tokenizer.encode("t"), *tokenizer.encode("h 12")]  # a control character is a piece of its own
    assert tokenizer.encode(".\x04. \x04").tolist() == tokenizer.encode("..").tolist() + tokenizer.encode(" ").tolist()
    assert tokenizer.decode(tokenizer.encode("the\x04 end")) == "the end" and len(tokenizer.encode("\x04")) == 0


def test_patterns_mean_the_same_to_other_engines():
    ranks = {bytes([b]): b for b in range(256)}
    for pattern in (GPT2_PATTERN, GPT4_PATTERN):
        tokenizer = Tokenizer("bytes", pattern, ranks)
        assert "$" not in tokenizer.pattern and "}+|" not in tokenizer.pattern.replace(r"\p{N}++", "").replace(r"\p{L}++", "")
        assert tokenizer.hash == Tokenizer("bytes", tokenizer.pattern, ranks).hash


# --- the commands


def command(*line, ok=True):
    done = subprocess.run([sys.executable, *map(str, line)], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode == 0) == ok, done.stdout + done.stderr
    return done.stdout if ok else done.stderr


def test_from_a_folder_to_an_encoder_and_back(tmp_path):
    folder, data = make_folder(tmp_path / "in"), tmp_path / "data"
    tokenizer, rng = read_tokenizer(folder), np.random.default_rng(0)
    data.mkdir()
    for split in ("train", "val"):
        out = TokenWriter(data / f"{split}.bin", tokenizer)
        out.write([rng.integers(2, 266, 40).astype(np.uint32) for _ in range(40)])
        out.close()
    tokenizer.save(data / "bpe.json")
    run = ["train.py", "--device", "cpu", "--dataset", data, "--objective", "mlm", "--block_size", "32", "--batch_size", "4", "--tokens_per_iter", "128",
           "--max_iters", "4", "--out_dir", tmp_path / "run"]
    out = command(*run, "--init_from", f"hf:{folder}")
    assert "rate 0.0005" in out and "iteration 4" in out
    assert "finished" in command(*run, "--init_from", "resume")
    state = load_checkpoint(tmp_path / "run" / "last.pt")
    before = read_folder(folder)
    assert state["config"] == before["config"]
    moved = (state["model"]["blocks.0.attention.qkv.weight"] - before["model"]["blocks.0.attention.qkv.weight"]).abs()
    assert 0 < moved.max() < 0.01  # it began there
    assert "last mlm" in command("model.py", "info", tmp_path / "run" / "last.pt")
    guesses = command("model.py", "fill", tmp_path / "run" / "last.pt", "the <|mask|> of <|mask|>")
    assert guesses.count("%") == 10
    assert "EuroBertForMaskedLM" in command("model.py", "export", tmp_path / "run" / "last.pt", tmp_path / "out")
    assert command("model.py", "fill", f"hf:{tmp_path / 'out'}", "the <|mask|> of <|mask|>") == guesses
    assert command("model.py", "sample", f"hf:{folder}", "the theme", "--tokens", 5).startswith("the theme")
    long = [*run[:-1], tmp_path / "other", "--init_from", f"hf:{folder}"]
    long[long.index("32")], long[long.index("4")] = "128", "1"
    assert "reads at most 64 tokens" in command(*long, ok=False)
    make_tokenizer(folder, special=("<|endoftext|>", "<|im_start|>"), first=False)
    edit(folder / "config.json", eos_token_id=264)
    assert f"--tokenizer hf:{folder}" in command(*run[:-1], tmp_path / "other", "--init_from", f"hf:{folder}", ok=False)


# --- against transformers


def loaded(folder, auto):
    transformers = pytest.importorskip("transformers", reason="compares with transformers: pip install transformers")
    return getattr(transformers, auto).from_pretrained(folder)


@pytest.mark.parametrize("causal", [True, False])
def test_transformers_gives_the_same_logits_tokens_and_states(tmp_path, causal):
    state = read_folder(make_folder(tmp_path / "in", {"tie_word_embeddings": causal}))
    write_folder(state, tmp_path / "out", causal)
    theirs = loaded(tmp_path / "out", "AutoModelForCausalLM" if causal else "AutoModelForMaskedLM").eval()
    assert type(theirs).__name__ == ("LlamaForCausalLM" if causal else "EuroBertForMaskedLM")
    ids = torch.randint(0, 266, (40,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert (theirs(ids[None]).logits[0] - logits_of(state, ids, causal)).abs().max() < 1e-4
        states = loaded(tmp_path / "out", "AutoModel").eval()(ids[None]).last_hidden_state
    model = from_checkpoint(state).eval()
    assert (states - model(ids[None], causal=causal)).abs().max() < 1e-4


@pytest.mark.parametrize("pattern", [None, GPT2_PATTERN, GPT4_PATTERN])
def test_transformers_gives_the_same_ids(tmp_path, pattern):
    folder = make_folder(tmp_path / "in")
    ours = read_tokenizer(folder)
    if pattern:
        ours = Tokenizer("bytes", pattern, {piece: i - ours.first for piece, i in ours.ranks.items()})
        state = {**read_folder(folder), "tokenizer": ours.to_dict()}
        write_folder(state, tmp_path / "out", False)
        folder = tmp_path / "out"
    theirs = loaded(folder, "AutoTokenizer")
    rng = np.random.default_rng(0)
    letters = list("them is o1234\n\t  中é🙂'sLL.½\u00a0")
    for text in [TEXT] + ["".join(rng.choice(letters, 60)) for _ in range(300)]:
        assert theirs.encode(text, add_special_tokens=False) == ours.encode(text).tolist(), text
    if not pattern:
        folder = without(tmp_path, 4, 0xF3, 0xA0)
        ours, theirs = read_tokenizer(folder), loaded(folder, "AutoTokenizer")
        for text in ("".join(rng.choice([*letters, "\x04", "\x04", "\U000e0067"], 30)) for _ in range(300)):
            assert theirs.encode(text, add_special_tokens=False) == ours.encode(text).tolist(), text
    else:
        assert (theirs.eos_token_id, theirs.pad_token_id, theirs.mask_token_id) == (ours.eos, ours.pad, ours.mask)
        assert theirs.encode("the<|mask|>") == [*ours.encode("the"), ours.mask]


@pytest.mark.parametrize("family", ["sc", "qa"])
def test_heads_that_transformers_has_no_class_for_are_refused(tmp_path, family):
    with pytest.raises(SystemExit) as end:
        write_folder({**read_folder(make_folder(tmp_path / "in")), "family": family}, tmp_path / "out", False)
    refused(end, "transformers has no class")
    assert not (tmp_path / "out").exists()


def test_a_token_classifier_is_exported_whole(tmp_path):
    state = read_folder(make_folder(tmp_path / "in"))
    head = {"weight": torch.randn(3, 32), "bias": torch.randn(3)}
    assert write_folder({**state, "family": "tc", "labels": ["O", "B-PER", "I-PER"], "head": head}, tmp_path / "out", False) == "EuroBertForTokenClassification"
    theirs = loaded(tmp_path / "out", "AutoModelForTokenClassification").eval()
    assert theirs.config.id2label == {0: "O", 1: "B-PER", 2: "I-PER"}
    ids = torch.arange(2, 40)[None]
    with torch.no_grad():
        ours = from_checkpoint(state).eval()(ids) @ head["weight"].t() + head["bias"]
        assert (theirs(ids).logits - ours).abs().max() < 1e-4


def test_sentence_transformers_gives_the_same_embeddings(tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers", reason="compares with sentence-transformers: pip install sentence-transformers")
    state = {**read_folder(make_folder(tmp_path / "in")), "family": "ir"}
    write_folder(state, tmp_path / "out", False)
    tokenizer, model = Tokenizer.from_dict(state["tokenizer"]), from_checkpoint(state).eval()
    texts = ["the theme of 12", "it is the end  of the other theme 🙂"]
    theirs = sentence_transformers.SentenceTransformer(str(tmp_path / "out"), device="cpu").encode(texts, prompt_name="query")
    for text, vector in zip(texts, theirs):  # theirs come from one padded batch
        ids = torch.from_numpy(tokenizer.encode("Query: " + text).astype(np.int64))[None]
        with torch.no_grad():
            ours = torch.nn.functional.normalize(model(ids)[0].mean(0), dim=0)
        assert np.abs(ours.numpy() - vector).max() < 1e-5
