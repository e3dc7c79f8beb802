"""
An encoder and a decoder in one file: EuroBERT's architecture (arXiv 2503.05500), as arXiv 2507.00994 pretrains it.

What is notable:
- `causal` is an argument of the forward pass. The same weights are a decoder (causal=True) or an encoder (causal=False) at every call.
- Tokens come as rows, ids (B, T), and documents as `cu_seqlens`: document i is ids.view(-1)[cu_seqlens[i]:cu_seqlens[i+1]], and lies in
  one row. A token sees its own document and nothing else, and positions restart there. Packing, padding (a document of its own,
  scored nowhere) and single texts are all this one notion. Without cu_seqlens each row is one document.
- Pre-norm RMSNorm with statistics in fp32, rotary positions in fp32 (the half-split layout), grouped-query attention, SwiGLU, no
  biases, every weight drawn from N(0, 0.02), the output head untied unless `tie_embeddings`.
- Attention goes through one function, `attention`: our own Triton kernel on a GPU, PyTorch's elsewhere.
- The loss computes logits at target positions only, a block of rows at a time, with their gradients in the same pass.

    python model.py info out/mlm/last.pt                                              what a checkpoint is
    python model.py fill out/mlm/last.pt "The capital of France is <|mask|>."         guesses with their probabilities
    python model.py sample out/clm/last.pt "Once upon a time"                         goes on with a text
    python model.py export out/mlm/last.pt DIR                                        a folder for Hugging Face transformers

A Hugging Face folder (data/hf.py) stands for a checkpoint everywhere, as hf:DIR.
"""
import argparse, math, os, sys
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

LOGITS_AT_ONCE = 2**26  # logits (rows x vocabulary) that exist at any time in the loss: 256 MB in fp32
IGNORE = -100           # targets with this value count nothing


@dataclass
class Config:
    vocab_size: int = 128256         # rows of the embedding and of the head
    block_size: int = 2048           # longest row
    n_layer: int = 12
    n_head: int = 12                 # query heads; head_dim = n_embd / n_head
    n_kv_head: int = 12              # key and value heads, each shared by n_head / n_kv_head query heads
    n_embd: int = 768                # width C of the residual stream
    intermediate_size: int = 3072    # inner width of SwiGLU
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = False     # the head is the embedding matrix
    dropout: float = 0.0             # on what attention and SwiGLU add to the residual stream; for fine-tuning

    def __post_init__(self):
        if self.n_embd % self.n_head:
            raise ValueError(f"n_head {self.n_head} does not divide n_embd {self.n_embd}")
        if self.n_head % self.n_kv_head:
            raise ValueError(f"n_kv_head {self.n_kv_head} does not divide n_head {self.n_head}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} (n_embd / n_head) is odd; rotary positions need an even one")

    @property
    def head_dim(self):
        return self.n_embd // self.n_head


SIZES = {  # arXiv 2507.00994's models, and two for a laptop: micro for many runs, mini for one
    "micro": dict(n_layer=3, n_head=2, n_kv_head=2, n_embd=128, intermediate_size=384, tie_embeddings=True),
    "mini": dict(n_layer=4, n_head=4, n_kv_head=4, n_embd=256, intermediate_size=768, tie_embeddings=True),
    "210m": dict(n_layer=12, n_head=12, n_kv_head=12, n_embd=768, intermediate_size=3072),
    "610m": dict(n_layer=26, n_head=18, n_kv_head=6, n_embd=1152, intermediate_size=4096),
    "1b": dict(n_layer=26, n_head=18, n_kv_head=6, n_embd=1728, intermediate_size=4096),
}


# ---------------------------------------------------------------------------------------------------------------------------------
# attention

class Documents(NamedTuple):
    """Who sees whom, made once a forward pass and shared by all layers."""
    cu_seqlens: torch.Tensor | None  # (documents + 1,) int32, or None: each row is one document
    max_seqlen: int                  # no document is longer
    causal: bool
    mask: torch.Tensor | None        # (B or 1, 1, T, T), 0 where a token may look and -inf elsewhere; None where nothing is hidden
    table: torch.Tensor | None       # the work of our own kernel (kernels/attention.py); None: PyTorch's attention


def attention(q, k, v, docs):
    """softmax(q k' / sqrt(D)) v inside each document. q (B, T, H, D); k, v (B, T, H_kv, D); returns (B, T, H, D).

    Our own kernel takes the tokens of all rows as they lie. Without it attention goes row by row, never over the packed batch: by
    PyTorch's fused kernel, or on a CPU, while a row of scores is short, by the formula as it stands, which is faster there (its
    scores are rounded to bf16 where q is bf16)."""
    if docs.table is not None:
        from kernels import attention as kernel
        return kernel.attention(*(x.flatten(0, 1) for x in (q, k, v)), docs.cu_seqlens, docs.max_seqlen, docs.causal, docs.table).view(q.shape)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, H, T, D)
    if (group := q.size(1) // k.size(1)) > 1:
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    if explicit_form(q.device, q.size(2), q.dtype):
        scores = (q * q.size(-1) ** -0.5) @ k.transpose(-1, -2)  # (B, H, T, T)
        y = (scores if docs.mask is None else scores + docs.mask).softmax(-1) @ v
    else:
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=docs.mask, is_causal=docs.causal and docs.mask is None)
    return y.transpose(1, 2)


def explicit_form(device, T, dtype):
    return device.type == "cpu" and T * dtype.itemsize <= 1024


def visible(start, causal, dtype):
    """start (B, T), a number that all tokens of a document share -> additive mask (B, 1, T, T) for `attention`."""
    see = start[:, :, None] == start[:, None, :]
    if causal:
        see = see.tril()
    return torch.zeros((), dtype=dtype, device=start.device).where(see, -math.inf)[:, None]


# ---------------------------------------------------------------------------------------------------------------------------------
# the network

class RMSNorm(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.n_embd))
        self.eps = config.norm_eps

    def forward(self, x):
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).type_as(x)


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.n_head, self.n_kv_head, self.head_dim = config.n_head, config.n_kv_head, config.head_dim
        self.qkv = nn.Linear(config.n_embd, (config.n_head + 2 * config.n_kv_head) * config.head_dim, bias=False)  # all queries, all keys, all values
        self.out = nn.Linear(config.n_embd, config.n_embd, bias=False)

    def forward(self, x, rope, docs):
        B, T, C = x.shape
        qk, v = self.qkv(x).view(B, T, -1, self.head_dim).split((self.n_head + self.n_kv_head, self.n_kv_head), 2)  # (B, T, heads, D)
        q, k = rotate(qk, *rope).split((self.n_head, self.n_kv_head), 2)
        return self.out(attention(q, k, v, docs).reshape(B, T, C))


def rotate(x, cos, sin):
    """Rotary positions (RoFormer, arXiv 2104.09864): dimensions i and i + D/2 of x (B, T, heads, D) are a plane, turned by an angle
    that grows with the position. cos, sin (B or 1, T, 1, D/2) fp32, so the products are fp32; the result has x's dtype."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).type_as(x)


class SwiGLU(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_up = nn.Linear(config.n_embd, 2 * config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, config.n_embd, bias=False)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, -1)  # (B, T, intermediate_size)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.norm1, self.attention = RMSNorm(config), Attention(config)
        self.norm2, self.mlp = RMSNorm(config), SwiGLU(config)
        self.dropout = config.dropout

    def forward(self, x, rope, docs):
        x = x + F.dropout(self.attention(self.norm1(x), rope, docs), self.dropout, self.training)
        return x + F.dropout(self.mlp(self.norm2(x)), self.dropout, self.training)


class Transformer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.kernel = False  # attention by kernels/attention.py, on a GPU that it supports; else by PyTorch
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = RMSNorm(config)
        self.head = None if config.tie_embeddings else nn.Linear(config.n_embd, config.vocab_size, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
        angle = torch.outer(torch.arange(config.block_size, dtype=torch.float32),
                            1 / config.rope_theta ** (torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim))
        self.register_buffer("cos", angle.cos()[:, None], persistent=False)  # (block_size, 1, D/2) fp32
        self.register_buffer("sin", angle.sin()[:, None], persistent=False)

    @property
    def head_weight(self):
        return self.embed.weight if self.head is None else self.head.weight

    def forward(self, ids, cu_seqlens=None, max_seqlen=None, causal=False, places=None, targets=None):
        """ids (B, T) -> hidden states (B, T, C), or with targets the summed loss in nats, a fp32 scalar.

        cu_seqlens: (documents + 1,) int32 bounds of the documents in ids.view(-1), with max_seqlen, a Python int, their greatest length;
                    None: each row is a document
        causal:     whether a token sees only what stands before it
        places:     (N,) int64 places in ids.view(-1) that are scored; None: all
        targets:    (N,) int64 ids to predict there; IGNORE counts nothing
        """
        B, T = ids.shape
        if T > self.config.block_size:
            raise ValueError(f"rows of {T} tokens, but block_size is {self.config.block_size}")
        x = self.embed(ids)  # (B, T, C)
        dtype, mask, table = compute_dtype(x), None, None
        if cu_seqlens is None:
            rope = self.cos[None, :T], self.sin[None, :T]
            if self.kernel:
                cu_seqlens = torch.arange(0, B * T + 1, T, dtype=torch.int32, device=ids.device)
            elif causal and explicit_form(x.device, T, dtype):
                mask = visible(torch.zeros(1, T, device=ids.device), causal, dtype)
        else:
            place = torch.arange(B * T, dtype=torch.int32, device=ids.device)
            start = cu_seqlens[torch.bucketize(place, cu_seqlens[1:], right=True)]  # of the document that each token is in
            place, start = (place - start).view(B, T), start.view(B, T)
            rope = self.cos[place], self.sin[place]
            mask = None if self.kernel else visible(start, causal, dtype)
        if self.kernel:
            from kernels.attention import row_blocks
            table = row_blocks(cu_seqlens, B * T, causal)
        docs = Documents(cu_seqlens, max_seqlen or T, causal, mask, table)
        for block in self.blocks:
            x = block(x, rope, docs)
        x = self.norm(x)
        if targets is None:
            return x
        x = x.flatten(0, 1)
        if places is not None:
            x = x[places]
        return HeadLoss.apply(x, self.head_weight, targets) if torch.is_grad_enabled() else score(x, self.head_weight, targets)[0]


# ---------------------------------------------------------------------------------------------------------------------------------
# the head

def compute_dtype(x):
    """The dtype that matrix products take x in: autocast's, or its own."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def logit_blocks(rows, vocab_size):
    """Slices of at most LOGITS_AT_ONCE logits each, of equal length but for the last."""
    n = max(1, math.ceil(rows * vocab_size / LOGITS_AT_ONCE))
    step = max(1, math.ceil(rows / n))
    return [slice(i, min(i + step, rows)) for i in range(0, rows, step)]


class HeadLoss(torch.autograd.Function):
    """Summed cross-entropy of hidden (N, C) @ weight' (V, C) against targets (N,), and its gradients, a block of rows at a time.

    Logits of all rows never exist together, and no matrix product is done twice: the gradient of a block needs its softmax, which is at hand.
    Sums over blocks are fp32 (arXiv 2410.10989 does the same in one Triton kernel)."""

    @staticmethod
    def forward(ctx, hidden, weight, targets):
        dtype = compute_dtype(hidden)
        h, w = hidden.to(dtype), weight.to(dtype)
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        d_hidden, d_weight = torch.empty_like(h), torch.zeros_like(weight, dtype=torch.float32)
        for rows in logit_blocks(len(h), len(w)):
            target = targets[rows].clamp(min=0)[:, None]
            counts = (targets[rows] != IGNORE)[:, None].float()
            logits = h[rows] @ w.t()                                    # (rows, V)
            top = logits.amax(-1, keepdim=True).float()
            p = (logits - top).exp_()                                   # fp32 from here on
            total = p.sum(-1, keepdim=True)
            loss = loss + ((total.log() + top - logits.gather(1, target)) * counts).sum()  # not in place: torch.compile of 2.11 then loses the gradient
            del logits
            d_logits = p.mul_(counts / total).scatter_add_(1, target, -counts).to(dtype)  # softmax minus one at the target
            del p
            d_hidden[rows] = d_logits @ w
            d_weight += d_logits.t() @ h[rows]
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.dtypes = hidden.dtype, weight.dtype
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_loss):
        d_hidden, d_weight = ctx.saved_tensors
        return (d_hidden * d_loss).to(ctx.dtypes[0]), (d_weight * d_loss).to(ctx.dtypes[1]), None


@torch.no_grad()
def score(hidden, weight, targets):
    """hidden (N, C), weight (V, C), targets (N,) -> summed loss in nats (fp32) and how many targets are the first guess (int64), both scalars."""
    dtype = compute_dtype(hidden)
    h, w = hidden.to(dtype), weight.to(dtype)
    loss, right = torch.zeros((), device=hidden.device), torch.zeros((), dtype=torch.int64, device=hidden.device)
    for rows in logit_blocks(len(h), len(w)):
        logits = (h[rows] @ w.t()).float()
        loss += F.cross_entropy(logits, targets[rows], ignore_index=IGNORE, reduction="sum")
        right += (logits.argmax(-1) == targets[rows]).sum()
    return loss, right


# ---------------------------------------------------------------------------------------------------------------------------------
# size, work and memory

def count_parameters(config):
    """(blocks with the final norm, embedding, head): the head is 0 where it is tied to the embedding."""
    C, D = config.n_embd, config.head_dim
    block = C * (config.n_head + 2 * config.n_kv_head) * D + C * C + 3 * C * config.intermediate_size + 2 * C
    return config.n_layer * block + C, config.vocab_size * C, 0 if config.tie_embeddings else config.vocab_size * C


def flops_per_token(config, context, scored):
    """Floating-point operations of a training step, a token: 2 for each weight in the forward and 4 in the backward pass, and the products of
    attention. context: keys that a token sees on average; scored: targets / tokens, since the head works only there."""
    blocks, embedding, _ = count_parameters(config)
    return 6 * blocks + 12 * config.n_layer * config.n_embd * context + 6 * embedding * scored


def training_bytes(config, tokens, row, scored, bytes_per_value=2):
    """Memory of a training step, about: weights, gradients and AdamW's two moments in fp32, and what `tokens` tokens leave behind for the backward
    pass in rows of `row`. bytes_per_value: of a matrix operand, 2 in bf16 and 4 in fp32."""
    C, D, I, b = config.n_embd, config.head_dim, config.intermediate_size, bytes_per_value
    heads = config.n_head + 2 * config.n_kv_head
    layer = 2 * C * (4 + 4 + b) + (heads + config.n_head) * D * b + 4 * I * b  # two norms; q, k, v and what attention gives; SwiGLU
    if explicit_form(torch.device("cpu"), row, torch.bfloat16 if b == 2 else torch.float32):
        layer += 2 * config.n_head * row * b
    head = min(LOGITS_AT_ONCE, tokens * scored * config.vocab_size) * (b + 4)
    return 16 * sum(count_parameters(config)) + tokens * config.n_layer * layer + head


# ---------------------------------------------------------------------------------------------------------------------------------
# weights on disk

def save_checkpoint(path, state):
    """Writes a dict of tensors and plain values beside `path` and renames it: `path` is the old file or the new one, whole, at any moment."""
    part = f"{path}.tmp"
    try:
        with open(part, "wb") as file:
            torch.save(on_cpu(state), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except (OSError, RuntimeError) as problem:
        cause = problem.__context__ if isinstance(problem.__context__, OSError) else problem  # torch.save hides a full disk behind an error of its own
        raise SystemExit(f"{path}: not written ({cause}); what was there before is intact") from None
    finally:
        if os.path.exists(part):
            os.remove(part)


def on_cpu(value):
    """The same with every tensor in it on the CPU, so that the file opens on a machine without a GPU."""
    if isinstance(value, dict):
        return {key: on_cpu(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(on_cpu, value))
    return value.cpu() if isinstance(value, torch.Tensor) else value


def load_checkpoint(path, needed=("model", "config", "tokenizer", "settings")):
    """The dict that `save_checkpoint` wrote, on the CPU: model (parameter name -> tensor), config, tokenizer, settings, ...
    hf:DIR: the same from a Hugging Face folder."""
    hugging_face = str(path).startswith("hf:")
    if hugging_face:
        from data.hf import read_folder
        state = read_folder(str(path)[3:])
    elif not os.path.isfile(path):
        raise SystemExit(f"{path}: no such checkpoint" + (f", it is a folder: give the last.pt in it, or hf:{path} if it is Hugging Face's" if os.path.isdir(path) else ""))
    try:
        state = state if hugging_face else torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        missing = [key for key in needed if key not in state]
    except Exception as problem:
        first_line = (str(problem).splitlines() or ["empty"])[0]
        raise SystemExit(f"{path}: not a checkpoint of this project ({type(problem).__name__}: {first_line[:120]})") from None
    if missing:
        raise SystemExit(f"{path}: a checkpoint without {', '.join(missing)}; this needs a whole one")
    return state


def from_checkpoint(state, **changes):
    """The model of a checkpoint, in fp32, on the CPU, in training mode; changes: values of its Config that are not to be the checkpoint's."""
    model = Transformer(Config(**{**state["config"], **changes}))
    model.load_state_dict(state["model"])
    return model


# ---------------------------------------------------------------------------------------------------------------------------------
# on the command line

def info(state, path):
    from data.hf import is_causal
    config = state["config"]
    blocks, embedding, head = count_parameters(Config(**config))
    total, head = (blocks + embedding + head) / 1e6, f"{head / 1e6:.1f}M" if head else "tied to it"
    if "family" in state:  # of finetune.py
        trained = f"fine-tuned for {state['family']}, rate {state['rate']:g}, seed {state['seed']}" + (f"; labels {', '.join(state['labels'])}" if state["labels"] else "")
    else:
        trained = f"{state.get('iter', 0):,} iterations on {state.get('tokens', 0):,} tokens here; last {'clm' if is_causal(state) else 'mlm'}"
    print(f"""{path}
  model      {total:.1f}M parameters: blocks {blocks / 1e6:.1f}M, embedding {embedding / 1e6:.1f}M, head {head}
  shape      {', '.join(f'{name} {value}' for name, value in config.items())}
  tokenizer  {state['tokenizer']['name']}
  trained    {trained}""")


@torch.no_grad()
def fill(state, text, top=5):
    """Prints the `top` likeliest tokens at each <|mask|> of a text, over the whole vocabulary."""
    from data.tokenizer import Tokenizer
    tokenizer, model = Tokenizer.from_dict(state["tokenizer"]), from_checkpoint(state).eval()
    ids = []
    for i, part in enumerate(text.split("<|mask|>")):
        ids += [tokenizer.mask] * (i > 0) + tokenizer.encode(part).tolist()
    if tokenizer.mask not in ids:
        raise SystemExit(f"{text!r}: write <|mask|> for the token to guess")
    if len(ids) > model.config.block_size:
        raise SystemExit(f"the text has {len(ids):,} tokens, and the model reads at most {model.config.block_size:,}; give a shorter one")
    places = [i for i, token in enumerate(ids) if token == tokenizer.mask]
    chances = (model(torch.tensor([ids]))[0, places] @ model.head_weight.t()).softmax(-1)  # (masks, V)
    for n, row in enumerate(chances):
        best = row.topk(top)
        for chance, token in zip(best.values.tolist(), best.indices.tolist()):
            print(f"<|mask|> {n + 1}  {chance:7.2%}  {tokenizer.decode([token])!r}")


@torch.no_grad()
def sample(state, text, tokens, temperature, seed=1337):
    """Prints a text and up to `tokens` more tokens, drawn from the model one by one; temperature 0: the likeliest each time."""
    from data.tokenizer import Tokenizer
    tokenizer, model = Tokenizer.from_dict(state["tokenizer"]), from_checkpoint(state).eval()
    prompt, generator = tokenizer.encode(text).tolist() or [tokenizer.eos], torch.Generator().manual_seed(seed)
    ids = list(prompt)
    allowed = torch.full((model.config.vocab_size,), -math.inf)
    allowed[tokenizer.first:tokenizer.first + tokenizer.n_ordinary] = allowed[tokenizer.eos] = 0
    for _ in range(tokens):
        logits = model(torch.tensor([ids[-model.config.block_size:]]), causal=True)[0, -1] @ model.head_weight.t() + allowed
        ids.append(int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator) if temperature else logits.argmax()))
        if ids[-1] == tokenizer.eos:
            break
    print(text + tokenizer.decode(ids[len(prompt):]))


def main(argv):
    from data.hf import is_causal, write_folder
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, what, more in (("info", "what a checkpoint is", None), ("fill", "guess the tokens at <|mask|>", "text"),
                             ("sample", "go on with a text", "text"), ("export", "write a folder for Hugging Face transformers", "folder")):
        command = commands.add_parser(name, help=what, allow_abbrev=False)
        command.add_argument("checkpoint", help="a .pt file, or hf:DIR")
        if more:
            command.add_argument(more)
    commands.choices["sample"].add_argument("--tokens", type=int, default=50, help="how many at most (default: 50)")
    commands.choices["sample"].add_argument("--temperature", type=float, default=0.8, help="0: the likeliest token each time (default: 0.8)")
    commands.choices["export"].add_argument("--causal", choices=("true", "false"),
                                            help="as a Llama that looks back only, or as a EuroBERT (default: as the model was last trained)")
    args = parser.parse_args(argv)
    state = load_checkpoint(args.checkpoint, ("model", "config", "tokenizer", "settings"))
    causal = is_causal(state)
    if "family" in state and args.command in ("fill", "sample"):
        raise SystemExit(f"{args.checkpoint}: fine-tuned ({state['family']}), so it has no head over the vocabulary; give a pretrained checkpoint")
    if args.command == "info":
        info(state, args.checkpoint)
    elif args.command == "export":
        causal = causal if args.causal is None else args.causal == "true"
        print(f"{args.folder}: {write_folder(state, args.folder, causal)}, in fp32")
    else:
        if causal != (args.command == "sample"):
            print(f"note: this model was last trained with {'clm' if causal else 'mlm'}", file=sys.stderr)
        fill(state, args.text) if args.command == "fill" else sample(state, args.text, args.tokens, args.temperature)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except SystemExit as end:
        if isinstance(end.code, str):
            end.code = f"error: {end.code}"
        raise
