"""
Hugging Face folders, in and out: config.json, *.safetensors, tokenizer.json <-> the dict that a checkpoint holds and a Tokenizer.

Read are the models that have this project's architecture: Llama (SmolLM2, TinyLlama, ...), EuroBERT, and Mistral without a sliding window. Whatever differs
is refused with the field that does not fit; so is every tensor that has no place. Written is a EuroBERT (`AutoModel`, `AutoModelForMaskedLM`), which
looks both ways, or a Llama (`AutoModelForCausalLM`), which does not: the weights and their names are the same.

A vocabulary without <|mask|> or <|pad|> gets them: on reserved tokens if it has some, else on new rows at the mean of the others.
"""
import json, os, re, shutil, sys
from pathlib import Path

import numpy as np
import torch

from data.tokenizer import GPT2_PATTERN, MASK, PAD, Tokenizer, portable

MODELS = ("llama", "eurobert", "mistral")
DIGITS_PATTERN = r"""\p{N}|'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?[^\s\p{L}\p{N}]++|\s+(?![^\s\p{N}])|\s"""  # GPT-2's, after every digit was cut off
SHARD_BYTES = 5 * 2**30


def refuse(path, field, value, why):
    raise SystemExit(f"{path}: {field} {value!r}: {why}")


def read_json(path):
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SystemExit(f"{path}: no such file; hf: takes a folder with config.json, *.safetensors and tokenizer.json") from None
    except ValueError as problem:
        raise SystemExit(f"{path}: not JSON ({problem}); fetch it again") from None


def packages():
    try:
        from safetensors import SafetensorError, safe_open
        from safetensors.torch import save_file
    except ImportError:
        raise SystemExit("Hugging Face folders need safetensors: pip install safetensors") from None
    return safe_open, save_file, SafetensorError


# ---------------------------------------------------------------------------------------------------------------------------------
# the model

def read_config(folder):
    """(config.json, the values of model.py's Config that it means)."""
    path = Path(folder) / "config.json"
    about = read_json(path)
    if about.get("model_type") not in MODELS:
        refuse(path, "model_type", about.get("model_type"), f"not this project's architecture; {', '.join(MODELS)} are")
    rope = about.get("rope_parameters") or about.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        refuse(path, "rope_scaling", kind, "not implemented; only plain rotary positions are")
    about.setdefault("sliding_window", 4096 if about["model_type"] == "mistral" else None)  # transformers' default
    for field, wanted in {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "sliding_window": None, "partial_rotary_factor": 1.0}.items():
        value = {**rope, **about}.get(field, wanted)
        if value != wanted:
            refuse(path, field, value, f"this architecture has {json.dumps(wanted)}")
    layers = set(about.get("layer_types") or ["full_attention"])
    if layers != {"full_attention"}:
        refuse(path, "layer_types", sorted(layers), "every layer here has full attention")
    try:
        config = {"vocab_size": about["vocab_size"], "n_layer": about["num_hidden_layers"], "n_head": about["num_attention_heads"],
                  "n_kv_head": about.get("num_key_value_heads") or about["num_attention_heads"], "n_embd": about["hidden_size"],
                  "intermediate_size": about["intermediate_size"], "block_size": about["max_position_embeddings"]}
    except KeyError as field:
        raise SystemExit(f"{path}: no field {field}; the folder is not whole") from None
    usual = {"llama": (False, 1e-6), "mistral": (False, 1e-6), "eurobert": (False, 1e-5)}[about["model_type"]]  # transformers' defaults
    config |= {"rope_theta": float(rope.get("rope_theta", about.get("rope_theta", 10000.0))), "norm_eps": about.get("rms_norm_eps", usual[1]),
               "tie_embeddings": about.get("tie_word_embeddings", usual[0]), "dropout": 0.0}
    if (about.get("head_dim") or config["n_embd"] // config["n_head"]) * config["n_head"] != config["n_embd"]:
        refuse(path, "head_dim", about["head_dim"], f"here it is hidden_size / num_attention_heads, {config['n_embd']} / {config['n_head']}")
    return about, config


def layout(config):
    """Our parameter name -> (the names of its parts in a folder, which lie one below the other, the number of rows of each, columns or None)."""
    C, I, D = config["n_embd"], config["intermediate_size"], config["n_embd"] // config["n_head"]
    table = {"embed.weight": (["model.embed_tokens"], [config["vocab_size"]], C)}
    for n in range(config["n_layer"]):
        ours, theirs = f"blocks.{n}.", f"model.layers.{n}."
        table |= {
            ours + "norm1.weight": ([theirs + "input_layernorm"], [C], None),
            ours + "attention.qkv.weight": ([theirs + f"self_attn.{x}_proj" for x in "qkv"], [C, config["n_kv_head"] * D, config["n_kv_head"] * D], C),
            ours + "attention.out.weight": ([theirs + "self_attn.o_proj"], [C], C),
            ours + "norm2.weight": ([theirs + "post_attention_layernorm"], [C], None),
            ours + "mlp.gate_up.weight": ([theirs + "mlp.gate_proj", theirs + "mlp.up_proj"], [I, I], C),
            ours + "mlp.down.weight": ([theirs + "mlp.down_proj"], [C], I)}
    table["norm.weight"] = (["model.norm"], [C], None)
    if not config["tie_embeddings"]:
        table["head.weight"] = (["lm_head"], [config["vocab_size"]], C)
    return table


def read_weights(folder, config):
    """{our parameter name: fp32 tensor} from model.safetensors or from the shards of its index."""
    safe_open, _, SafetensorError = packages()
    index = folder / "model.safetensors.index.json"
    files = sorted(set(read_json(index)["weight_map"].values())) if index.exists() else ["model.safetensors"]
    found = {}  # their name -> the open file it is in
    for path in (folder / name for name in files):
        try:
            file = safe_open(path, "pt")
        except (OSError, SafetensorError) as problem:
            raise SystemExit(f"{path}: not a file of safetensors, or not whole ({problem}); fetch it again") from None
        found |= dict.fromkeys(file.keys(), (file, path))
    if "model.embed_tokens.weight" not in found and "embed_tokens.weight" in found:
        raise SystemExit(f"{folder}: the weights of a bare AutoModel, without a head; give a folder of a model for masked or causal language")

    def take(name, shape):
        if name not in found:
            raise SystemExit(f"{folder}: no tensor {name}; the folder is not whole, or not of this architecture")
        file, path = found.pop(name)
        tensor = file.get_tensor(name)
        if list(tensor.shape) != shape:
            raise SystemExit(f"{path}: {name} has shape {list(tensor.shape)}, config.json makes it {shape}")
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise SystemExit(f"{path}: {name} is {str(tensor.dtype)[6:]}; give unquantised weights")
        return tensor.float()

    weights = {}
    for ours, (parts, rows, columns) in layout(config).items():
        weights[ours] = torch.cat([take(f"{part}.weight", [n] if columns is None else [n, columns]) for part, n in zip(parts, rows)])
    embedding = weights["embed.weight"]
    if config["tie_embeddings"] and "lm_head.weight" in found and not torch.equal(take("lm_head.weight", list(embedding.shape)), embedding):
        raise SystemExit(f"{folder}: lm_head.weight is not the embedding, although config.json says tie_word_embeddings")
    over = [name for name in found if not name.endswith("rotary_emb.inv_freq")]
    if over:
        raise SystemExit(f"{folder}: {over[0]} has no place in this architecture ({len(over)} such tensors)")
    return weights


def read_folder(folder):
    """What load_checkpoint returns, of a folder: model, config, tokenizer, settings, data and a clock at 0."""
    folder = Path(folder)
    about, config = read_config(folder)
    tokenizer = read_tokenizer(folder)
    weights = read_weights(folder, config)
    new = tokenizer.vocab_size - config["vocab_size"]
    if new > 0:
        for name in {"embed.weight", "head.weight"} & weights.keys():
            weights[name] = torch.cat((weights[name], weights[name].mean(0).expand(new, -1)))
        config["vocab_size"] = tokenizer.vocab_size
    return {"model": weights, "config": config, "tokenizer": tokenizer.to_dict(),
            "settings": {"size": "hf", "objective": "mlm" if about["model_type"] == "eurobert" else "clm"},
            "data": {"tokenizer_hash": tokenizer.hash, "digest": ""}, "iter": 0, "tokens": 0, "first_row": 0, "best": float("inf")}


def is_causal(state):
    """Whether the model of a checkpoint was last trained to look back only."""
    return "family" not in state and state["settings"].get("objective", "mlm").split(",")[-1].split(":")[0] == "clm"


def write_folder(state, folder, causal):
    """The model and tokenizer of a checkpoint as a folder that transformers loads, in fp32: as EuroBertForMaskedLM, or, causal, as LlamaForCausalLM.

    A fine-tuned checkpoint names its `family`: "ir" adds what sentence-transformers reads; "tc" becomes a EuroBertForTokenClassification with
    `head` {weight (labels, C), bias (labels,)} and `labels`; for "sc" and "qa" transformers has no class with our head. Returns the class."""
    _, save_file, _ = packages()
    folder, config, tokenizer, family = Path(folder), state["config"], Tokenizer.from_dict(state["tokenizer"]), state.get("family")
    if family in ("sc", "qa"):
        what = "mean pooling and one linear layer on a EuroBERT" if family == "sc" else "start and end logits on a EuroBERT"
        raise SystemExit(f"{folder}: not written; transformers has no class with this model's head ({what}). Export the pretrained checkpoint instead")
    if family and causal:
        raise SystemExit(f"{folder}: not written; a fine-tuned model looks both ways, so --causal true does not fit it")
    name = "LlamaForCausalLM" if causal else "EuroBertForTokenClassification" if family == "tc" else "EuroBertForMaskedLM"
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SystemExit(f"{folder}: there already; give a new folder")
    part = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    part.mkdir(parents=True)
    about = {"architectures": [name], "model_type": "llama" if causal else "eurobert",
             "vocab_size": config["vocab_size"], "hidden_size": config["n_embd"], "intermediate_size": config["intermediate_size"],
             "num_hidden_layers": config["n_layer"], "num_attention_heads": config["n_head"], "num_key_value_heads": config["n_kv_head"],
             "head_dim": config["n_embd"] // config["n_head"], "max_position_embeddings": config["block_size"], "hidden_act": "silu",
             "rms_norm_eps": config["norm_eps"], "rope_theta": config["rope_theta"],
             "rope_parameters": {"rope_type": "default", "rope_theta": config["rope_theta"]}, "attention_bias": False, "mlp_bias": False,
             "attention_dropout": 0.0, "tie_word_embeddings": config["tie_embeddings"], "initializer_range": 0.02, "dtype": "float32",
             "bos_token_id": None, "eos_token_id": tokenizer.eos, "pad_token_id": tokenizer.pad, **({} if causal else {"mask_token_id": tokenizer.mask})}
    if family == "tc":
        about |= {"id2label": dict(enumerate(state["labels"])), "label2id": {label: i for i, label in enumerate(state["labels"])}}
    try:
        shards, size = [{}], 0
        tensors = {part: tensor for ours, (parts, rows, _) in layout(config).items() if family != "tc" or ours != "head.weight"
                   for part, tensor in zip((f"{part}.weight" for part in parts), state["model"][ours].float().split(rows))}
        if family == "tc":
            tensors |= {f"classifier.{part}": tensor.float() for part, tensor in state["head"].items()}
        for part_name, tensor in tensors.items():
            if size  + 4 * tensor.numel() > SHARD_BYTES and shards[-1]:
                shards, size = shards + [{}], 0
            shards[-1][part_name] = tensor.contiguous().clone()
            size += 4 * tensor.numel()
        files = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))] if len(shards) > 1 else ["model.safetensors"]
        for file, shard in zip(files, shards):
            save_file(shard, part / file, {"format": "pt"})
        if len(shards) > 1:
            where = {name: file for file, shard in zip(files, shards) for name in shard}
            total = sum(4 * tensor.numel() for tensor in tensors.values())
            write_json(part / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": where})
        write_json(part / "config.json", about)
        write_tokenizer(tokenizer, part, config["block_size"])
        if family == "ir":
            write_pooling(part, config["n_embd"], config["block_size"])
        if folder.exists():
            folder.rmdir()
        part.rename(folder)
    except OSError as problem:
        raise SystemExit(f"{folder}: not written ({problem.strerror or problem}); nothing was kept") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return name


def write_pooling(folder, width, block_size):
    """What sentence-transformers reads beside the model: the mean over tokens, brought to length 1, and the prefixes of queries and documents."""
    kinds = ("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")
    write_json(folder / "modules.json", [{"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
                                         for i, (kind, path) in enumerate(kinds)])
    (folder / "1_Pooling").mkdir()
    (folder / "2_Normalize").mkdir()
    write_json(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": width, "pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False})
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": block_size, "do_lower_case": False})
    write_json(folder / "config_sentence_transformers.json", {"prompts": {"query": "Query: ", "document": "Document: "}, "similarity_fn_name": "cosine"})


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# ---------------------------------------------------------------------------------------------------------------------------------
# the tokenizer

def byte_letters():
    """Byte -> the character that stands for it in a byte-level vocabulary (GPT-2's table): itself if it can be printed, else one from 256 on."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printed]
    return {b: chr(b) for b in printed} | {b: chr(256 + i) for i, b in enumerate(others)}


LETTER = byte_letters()
BYTE = {letter: byte for byte, letter in LETTER.items()}


def split_pattern(path, about):
    """The one regex that cuts text as this pre-tokenizer does."""
    steps = about["pretokenizers"] if about and about["type"] == "Sequence" else [about] if about else []
    kinds = [step["type"] for step in steps]
    if kinds[-1:] == ["ByteLevel"] and not steps[-1].get("add_prefix_space"):
        first, cuts = steps[0], steps[-1].get("use_regex", True)
        if kinds == ["ByteLevel"] and cuts:
            return GPT2_PATTERN
        if kinds == ["Digits", "ByteLevel"] and first.get("individual_digits") and cuts:
            return DIGITS_PATTERN
        if kinds == ["Split", "ByteLevel"] and first["behavior"] == "Isolated" and not first.get("invert") and not cuts:
            pattern = first["pattern"].get("Regex", "$")
            if pattern == portable(pattern):
                return pattern
            refuse(path, "pre_tokenizer", pattern, "`$`, `{1,3}+` and plain strings are not read: they mean other things to other regex engines")
    refuse(path, "pre_tokenizer", kinds, "not a way of cutting text that is known here, which are ByteLevel alone, after single Digits, or after a "
           "Split by one regex, without a leading space")


def merged(piece, order):
    """The parts of `piece` (bytes) after all merges, {(left, right): place in the list}, lowest first: the rule that tokenizer.json states."""
    parts = [piece[i:i + 1] for i in range(len(piece))]
    while len(parts) > 1:
        best, i = min((order.get(pair, len(order)), i) for i, pair in enumerate(zip(parts, parts[1:])))
        if best == len(order):
            break
        parts[i:i + 2] = [parts[i] + parts[i + 1]]
    return parts


def same_merges(path, tokenizer, order, whole_first):
    """tiktoken joins any two parts whose union has an id, lowest id first; the file lists the pairs. Both give the same on every piece of the
    vocabulary and on 20,000 random runs of pieces, or the file is refused."""
    ranks = tokenizer.ranks
    last = -1
    for left, right in order:
        rank = ranks.get(left + right)
        if rank is None or left not in ranks or right not in ranks:
            refuse(path, "merges", [left, right], "not pieces of the vocabulary")
        if rank < last:
            refuse(path, "merges", [left, right], "the ids do not rise in the order of the merges, which tiktoken needs")
        last = rank
    pieces = list(ranks)
    rng = np.random.default_rng(0)
    runs = [] if whole_first else pieces
    runs = runs + [b"".join(pieces[i] for i in row) for row in rng.integers(0, len(pieces), (20_000, 2))]
    different = 0
    for run in runs:
        theirs = [run] if whole_first and run in ranks else merged(run, order)
        if tokenizer._bpe._encode_single_piece(run) != [ranks[part] for part in theirs]:
            different += 1
            example = run
    if different:
        refuse(path, "merges", example, f"cut otherwise by tiktoken ({different} of {len(runs)} trials); such a vocabulary is not supported")


def read_tokenizer(folder):
    """A Tokenizer with the ids of the folder's tokenizer.json, and with <|mask|> and <|pad|>."""
    folder = Path(folder)
    path, (config, _) = folder / "tokenizer.json", read_config(folder)
    about = read_json(path)
    model = about.get("model") or {"type": None}
    for field, wanted in {"type": "BPE", "byte_fallback": False, "dropout": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}.items():
        if (model.get(field, wanted) or None) != (wanted or None):
            refuse(path, f"model.{field}", model[field], f"only byte-level BPE is read, with {json.dumps(wanted)}")
    if about.get("normalizer"):
        refuse(path, "normalizer", about["normalizer"]["type"], "text must reach the merges unchanged")
    added = {token["content"]: token["id"] for token in about.get("added_tokens") or []}
    for token in about.get("added_tokens") or []:
        if not token.get("special"):
            refuse(path, "added_tokens", token["content"], "not a special token, so text that spells it would get another id here")
    try:
        ranks = {bytes(BYTE[letter] for letter in piece): i for piece, i in model["vocab"].items() if piece not in added}
        order = {tuple(bytes(BYTE[letter] for letter in part) for part in (pair.split(" ") if isinstance(pair, str) else pair)): i
                 for i, pair in enumerate(model["merges"])}
    except KeyError as letter:
        refuse(path, "model.vocab", letter.args[0], "a character that stands for no byte; only byte-level BPE is read")
    vocab_size, (special, roles) = config["vocab_size"], roles_of(folder, config, added, ranks)
    if (last := max(special.values())) >= vocab_size:
        vocab_size = -(-(last + 1) // 64) * 64
    tokenizer = Tokenizer(f"hf:{folder.resolve().name}", split_pattern(path, about.get("pre_tokenizer")), ranks, special, roles, vocab_size)
    same_merges(path, tokenizer, order, model.get("ignore_merges", False))
    if tokenizer.missing:
        print(f"{path}: no id for the bytes {bytes(tokenizer.missing).hex(' ')}; text loses them, as it does in transformers", file=sys.stderr)
    return tokenizer


def roles_of(folder, config, added, ranks):
    """(name -> id of all special tokens, the names for <|eos|>, <|pad|> and <|mask|>): those the folder names, reserved ones, or new ones."""
    name_of = {i: name for name, i in added.items()}
    more = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").exists() else {}
    names = {role: (value.get("content") if isinstance(value, dict) else value) for role in ("eos", "pad", "mask") for value in [more.get(f"{role}_token")]}

    def given(role):
        i = config.get(f"{role}_token_id")
        i = i[0] if isinstance(i, list) else i
        return name_of.get(i) or (names[role] if names[role] in added else None)

    eos = given("eos")
    if eos is None:
        refuse(folder / "config.json", "eos_token_id", config.get("eos_token_id"), "not a special token of tokenizer.json; the end of a document needs one")
    special = dict(added)
    reserved = [name for name in added if re.search(r"reserved|unused", name)]
    roles = {}
    for role, ours in ("mask", MASK), ("pad", PAD):
        theirs = ours if ours in special else given(role)
        if theirs is None or theirs in (eos, *roles.values()):
            theirs = ours
            special[ours] = special.pop(reserved.pop(0)) if reserved else max(*special.values(), *ranks.values(), config["vocab_size"] - 1) + 1
        roles[role] = theirs
        if theirs in reserved:
            reserved.remove(theirs)
    return special, (eos, roles["pad"], roles["mask"])


def write_tokenizer(tokenizer, folder, block_size):
    """tokenizer.json and tokenizer_config.json, with the same ids."""
    ranks, spell = tokenizer.ranks, lambda piece: "".join(LETTER[byte] for byte in piece)
    merges = []
    for piece in sorted(ranks, key=ranks.get):
        pairs = [(piece[:i], piece[i:]) for i in range(1, len(piece)) if piece[:i] in ranks and piece[i:] in ranks]
        merges += [[spell(left), spell(right)] for left, right in sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))]
    token = lambda name, i: {"id": i, "content": name, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": tokenizer.pattern}, "behavior": "Isolated", "invert": False}
    special = dict(sorted(tokenizer.special.items(), key=lambda item: item[1]))
    write_json(folder / "tokenizer.json", {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [token(*item) for item in special.items()], "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]}, "post_processor": None, "decoder": level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": False,
                  "byte_fallback": False, "ignore_merges": True, "vocab": {spell(piece): i for piece, i in ranks.items()} | special, "merges": merges}})
    eos, pad, mask = tokenizer.roles
    write_json(folder / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, "pad_token": pad, "mask_token": mask, "model_max_length": block_size,
        "clean_up_tokenization_spaces": False, "model_input_names": ["input_ids", "attention_mask"]})
